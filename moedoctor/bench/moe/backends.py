"""The names of the MoE backends. A backend is loaded only when it is created. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moedoctor.models.layer_shape import QUANTIZATIONS
from moedoctor.reference.moe_backend import Variant

if TYPE_CHECKING:
    from moedoctor.reference.moe_backend import Backend

UPSTREAM = (
    Variant("MARLIN", "nvfp4"),
    Variant("HUMMING", "nvfp4"),
    Variant("EMULATION", "nvfp4", "nvfp4"),
    Variant("FLASHINFER_TRTLLM", "nvfp4", "nvfp4"),
    Variant("FLASHINFER_CUTEDSL", "nvfp4", "nvfp4"),
    Variant("FLASHINFER_CUTLASS", "nvfp4", "nvfp4"),
    Variant("VLLM_CUTLASS", "nvfp4", "nvfp4"),
    Variant("B12X", "nvfp4", "nvfp4"),
    Variant("FLASHINFER_B12X", "nvfp4", "nvfp4"),
    Variant("TRITON", "fp8", "fp8"),
    Variant("MARLIN", "fp8"),
    Variant("HUMMING", "fp8"),
    Variant("VLLM_CUTLASS", "fp8", "fp8"),
    Variant("FLASHINFER_CUTLASS", "fp8", "fp8"),
    Variant("FLASHINFER_TRTLLM", "fp8", "fp8"),
    Variant("HPC", "fp8", "fp8"),
    Variant("TRITON", "fp8-block", "fp8_block"),
    Variant("MARLIN", "fp8-block"),
    Variant("HUMMING", "fp8-block"),
    Variant("DEEPGEMM", "fp8-block", "fp8_block"),
    Variant("FLASHINFER_CUTLASS", "fp8-block", "fp8_block"),
    Variant("FLASHINFER_TRTLLM", "fp8-block", "fp8_block"),
    Variant("HPC", "fp8-block", "fp8_block"),
    Variant("TRITON", "bf16"),
    Variant("FLASHINFER_CUTLASS", "bf16"),
    Variant("FLASHINFER_TRTLLM", "bf16"),
)
"""Backends of vLLM 0.21.0 to 0.33.0 for one GPU, by vLLM's own names. A release that lacks one refuses it.

``fp8`` has one scale for each matrix of an expert, ``fp8-block`` one for 128 x 128 weights and for 128 values
of an activation. MXFP4 is not covered, nor are backends for tokens grouped by expert (with BATCHED in the
name) or for several GPUs (with MOE_EP). For ``fp8-block``, only vLLM's TRITON and MARLIN have been run.
"""
OWN = tuple(Variant(name, quantization) for name in ("OURS", "REFERENCE") for quantization in QUANTIZATIONS)
ALL = (*UPSTREAM, *OWN)


def list_names() -> Sequence[str]:
    """Return the names of the backends, each once."""
    return tuple(dict.fromkeys(variant.name for variant in ALL))


def find(name: str, quantizations: Sequence[str] = QUANTIZATIONS) -> Sequence[Variant]:
    """Return the variants of the backend `name`, or nothing if no backend has that name.

    Any case, ``-`` for ``_``. ``all`` means every backend but REFERENCE.
    """
    key = name.strip().upper().replace("-", "_")
    return tuple(
        variant
        for variant in ALL
        if variant.quantization in quantizations
        and (variant.name == key or (key == "ALL" and variant.name != "REFERENCE"))
    )


def create(variant: Variant) -> Backend:
    """Return the backend itself. Imports torch; what else the backend needs is imported when it prepares."""
    if variant.name in ("OURS", "REFERENCE"):
        from moedoctor.bench.moe.own_backends import Ours, Reference

        own = Ours if variant.name == "OURS" else Reference
        return own(variant.quantization, variant.activations)
    from moedoctor.upstream.moe_backends.backends import VllmBackend

    return VllmBackend(variant)
