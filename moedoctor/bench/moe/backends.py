"""The names of the MoE backends. A backend is loaded only when it is created. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moedoctor.models.layer_shape import QUANTIZATIONS
from moedoctor.reference.moe_backend import Variant

if TYPE_CHECKING:
    from moedoctor.reference.moe_backend import Backend

UPSTREAM = tuple(
    Variant(name, quantization, activations)
    for quantization, activations, names in (
        ("nvfp4", "none", "MARLIN HUMMING"),
        ("nvfp4", "nvfp4", "EMULATION FLASHINFER_TRTLLM FLASHINFER_CUTEDSL FLASHINFER_CUTLASS VLLM_CUTLASS"),
        ("nvfp4", "nvfp4", "B12X FLASHINFER_B12X"),
        ("fp8", "fp8", "TRITON VLLM_CUTLASS FLASHINFER_CUTLASS FLASHINFER_TRTLLM HPC"),
        ("fp8", "none", "MARLIN HUMMING"),
        ("fp8-block", "fp8_block", "TRITON DEEPGEMM FLASHINFER_CUTLASS FLASHINFER_TRTLLM HPC"),
        ("fp8-block", "none", "MARLIN HUMMING"),
        ("bf16", "none", "TRITON FLASHINFER_CUTLASS FLASHINFER_TRTLLM"),
    )
    for name in names.split()
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
