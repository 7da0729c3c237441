"""Which backends there are, by name; none is loaded before it is asked for. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moedoctor.models.layer_shape import QUANTIZATIONS
from moedoctor.reference.moe_backend import Variant

if TYPE_CHECKING:
    from moedoctor.reference.moe_backend import Backend

UPSTREAM = (
    Variant("MARLIN", "nvfp4"),
    Variant("EMULATION", "nvfp4", "nvfp4"),
    Variant("FLASHINFER_TRTLLM", "nvfp4", "nvfp4"),
    Variant("FLASHINFER_CUTEDSL", "nvfp4", "nvfp4"),
    Variant("FLASHINFER_CUTLASS", "nvfp4", "nvfp4"),
    Variant("VLLM_CUTLASS", "nvfp4", "nvfp4"),
    Variant("TRITON", "fp8", "fp8"),
    Variant("MARLIN", "fp8"),
    Variant("VLLM_CUTLASS", "fp8", "fp8"),
    Variant("FLASHINFER_CUTLASS", "fp8", "fp8"),
    Variant("FLASHINFER_TRTLLM", "fp8", "fp8"),
    Variant("TRITON", "bf16"),
    Variant("FLASHINFER_CUTLASS", "bf16"),
    Variant("FLASHINFER_TRTLLM", "bf16"),
)
"""vLLM's own, under vLLM's own names."""
OWN = tuple(Variant(name, one) for name in ("OURS", "REFERENCE") for one in QUANTIZATIONS)
ALL = (*UPSTREAM, *OWN)


def names() -> Sequence[str]:
    """The names of the backends, each once."""
    return tuple(dict.fromkeys(one.name for one in ALL))


def find(name: str, quantizations: Sequence[str] = QUANTIZATIONS) -> Sequence[Variant]:
    """The variants of the backend `name` (in any case, ``-`` for ``_``); ``all`` is every one but REFERENCE.

    Empty where there is none.
    """
    wanted = name.strip().upper().replace("-", "_")
    return tuple(
        one
        for one in ALL
        if one.quantization in quantizations
        and (one.name == wanted or (wanted == "ALL" and one.name != "REFERENCE"))
    )


def create(variant: Variant) -> Backend:
    """The backend itself. Imports torch, and what the backend needs where it is prepared."""
    if variant.name == "REFERENCE":
        from moedoctor.bench.backends.reference import Reference

        return Reference(variant.quantization, variant.activations)
    if variant.name == "OURS":
        from moedoctor.bench.backends.ours import Ours

        return Ours(variant.quantization, variant.activations)
    from moedoctor.upstream.moe_backends.backends import VllmBackend

    return VllmBackend(variant)
