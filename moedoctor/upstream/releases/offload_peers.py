"""vLLM's own offloaders on plain modules, for comparisons with ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def version() -> str | None:
    """Return the version of the vLLM whose offloaders can be used here, or None."""
    try:
        import vllm
        import vllm._C  # the UVA view is made by a C++ operator
        from vllm.model_executor.offloader import prefetch, uva  # noqa: F401
    except (ImportError, OSError):
        return None
    return str(vllm.__version__)


def uva_offload(layers: Sequence[nn.Module], names: Sequence[str], nbytes: int) -> Any:
    """Offload by `UVAOffloader` with UVA. Raises RuntimeError if vLLM finds no UVA here."""
    from vllm.model_executor.offloader.uva import UVAOffloader

    offloader = UVAOffloader(cpu_offload_max_bytes=nbytes, cpu_offload_params=set(names))
    if not offloader.uva_offloading:
        raise RuntimeError("vLLM finds no UVA here")
    offloader.wrap_modules(iter(layers))
    return offloader


def copying_offload(layers: Sequence[nn.Module], names: Sequence[str], nbytes: int) -> Any:
    """Offload by `UVAOffloader` as on WSL: no UVA, no pinned memory, copies in each forward."""
    from vllm.model_executor.offloader.uva import UVAOffloader

    offloader = UVAOffloader(cpu_offload_max_bytes=nbytes, cpu_offload_params=set(names))
    offloader.uva_offloading = offloader.pin_memory = False
    offloader.wrap_modules(iter(layers))
    return offloader


def prefetch_offload(layers: Sequence[nn.Module], names: Sequence[str]) -> Any:
    """Offload every layer by `PrefetchOffloader`, two ahead: as many device buffers as ours has."""
    from vllm.model_executor.offloader.base import set_offloader
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    offloader = PrefetchOffloader(group_size=1, num_in_group=1, prefetch_step=2, offload_params=set(names))
    set_offloader(offloader)  # its operators look for it there
    offloader.wrap_modules(iter(layers))
    offloader.post_init()
    return offloader
