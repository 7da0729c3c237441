"""vLLM's own offloader on plain modules, for a claim about its copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def find_version() -> str | None:
    """Return the version of the vLLM whose offloaders can be used here, or None."""
    try:
        import vllm
        from vllm.model_executor.offloader import uva  # noqa: F401
    except (ImportError, OSError):
        return None
    return str(vllm.__version__)


def offload_by_copies(layers: Sequence[nn.Module], names: Sequence[str], nbytes: int) -> Any:
    """Offload by `UVAOffloader` as on WSL: no UVA, no pinned memory, copies in each forward."""
    from vllm.model_executor.offloader.uva import UVAOffloader

    offloader = UVAOffloader(cpu_offload_max_bytes=nbytes, cpu_offload_params=set(names))
    offloader.uva_offloading = offloader.pin_memory = False
    offloader.wrap_modules(iter(layers))
    return offloader
