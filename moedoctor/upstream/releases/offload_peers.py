"""vLLM's own offloaders on plain modules, for comparisons with ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def version() -> str | None:
    """The vLLM whose offloaders can be used here; None where there is none that can."""
    try:
        import vllm
        import vllm._C  # the UVA view is made by a C++ operator
        from vllm.model_executor.offloader import prefetch, uva  # noqa: F401
    except (ImportError, OSError):
        return None
    return str(vllm.__version__)


def uva_offload(layers: Sequence[nn.Module], names: Sequence[str], nbytes: int) -> Any:
    """`UVAOffloader`, as it chooses by itself: with UVA where that can be had."""
    from vllm.model_executor.offloader.uva import UVAOffloader

    offloader = UVAOffloader(cpu_offload_max_bytes=nbytes, cpu_offload_params=set(names))
    if not offloader.uva_offloading:
        raise RuntimeError("vLLM holds UVA for unavailable here")
    offloader.wrap_modules(one for one in layers)
    return offloader


def copying_offload(layers: Sequence[nn.Module], names: Sequence[str], nbytes: int) -> Any:
    """`UVAOffloader` on the branch that it takes on WSL: no UVA, no pinned memory, copies in each forward."""
    from vllm.model_executor.offloader.uva import UVAOffloader

    offloader = UVAOffloader(cpu_offload_max_bytes=nbytes, cpu_offload_params=set(names))
    offloader.uva_offloading = offloader.pin_memory = False
    offloader.wrap_modules(one for one in layers)
    return offloader


def prefetch_offload(layers: Sequence[nn.Module], names: Sequence[str]) -> Any:
    """`PrefetchOffloader` for every layer, two ahead: as many device buffers as ours has."""
    from vllm.model_executor.offloader.base import set_offloader
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    offloader = PrefetchOffloader(group_size=1, num_in_group=1, prefetch_step=2, offload_params=set(names))
    set_offloader(offloader)  # its operators find it there
    offloader.wrap_modules(one for one in layers)
    offloader.post_init()
    return offloader
