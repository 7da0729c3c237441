"""What to set in place of settings that are gone, or never were; and what some of them are really about."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import Version

LINEAR_BACKEND = Version("0.22.0")
"""The first release with --linear-backend."""

COMPILED = frozenset(
    (
        "VLLM_CUSTOM_ALLREDUCE_ALGO",
        "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS",
        "VLLM_CHAT_TEMPLATE_FUEL",
        "VLLM_HTTP_MAX_REQUEST_BODY_SIZE",
        "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
    )
)
"""Read by compiled parts alone: found in the binaries of 0.18.0, 0.19.1, 0.20.0, 0.21.0 and 0.33.0, in no
Python file."""

OTHER_LAYERS: Mapping[str, str] = {
    "VLLM_NVFP4_GEMM_BACKEND": "decides linear layers only; MoE layers take --moe-backend",
}
"""Variables whose name is often taken to be about MoE layers."""

_FLASHINFER = {
    "throughput": "--moe-backend flashinfer_cutlass",
    "latency": "--moe-backend flashinfer_trtllm",
    "masked_gemm": "--moe-backend flashinfer_cutedsl",
}
_ANY_FLASHINFER = "--moe-backend flashinfer_cutlass (or flashinfer_trtllm)"
_NO_FLASHINFER = {
    "VLLM_USE_FLASHINFER_MOE_FP4": "--moe-backend cutlass (or marlin)",
    "VLLM_USE_FLASHINFER_MOE_FP8": "--moe-backend triton (or deep_gemm, marlin)",
    "VLLM_USE_FLASHINFER_MOE_FP16": "--moe-backend triton",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "--moe-backend marlin (or triton)",
}
_USES = {
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "--moe-backend flashinfer_trtllm",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": "--moe-backend flashinfer_cutlass",
}
_MARLIN = ("VLLM_MXFP4_USE_MARLIN", "VLLM_TEST_FORCE_FP8_MARLIN")
_WISHES = ("VLLM_NVFP4_MOE_BACKEND", "VLLM_MOE_BACKEND", "VLLM_FP8_MOE_BACKEND", "VLLM_MXFP4_MOE_BACKEND")
"""Never in any release (vllm-project/vllm#38971 asked for the first)."""
_BACKENDS = {"flashinfer": "flashinfer_cutlass", "vllm_cutlass": "cutlass", "deepgemm": "deep_gemm"}


def instead(name: str, value: str, release: str) -> str | None:
    """What does in `release` what the variable did, or was meant to; None where nothing does or nobody can
    know."""
    on = value.strip().lower() not in ("0", "false", "")
    if name in _WISHES:
        word = value.strip().lower().replace("-", "_")
        return f"--moe-backend {_BACKENDS.get(word, word) or 'marlin'}"
    if name == "VLLM_FLASHINFER_MOE_BACKEND":
        return _FLASHINFER.get(value, _ANY_FLASHINFER)
    if name in _NO_FLASHINFER:
        return _ANY_FLASHINFER if on else _NO_FLASHINFER[name]
    if name in _USES:
        return _USES[name] if on else None
    if name in _MARLIN:
        return "--moe-backend marlin" if on else None
    if name == "VLLM_NVFP4_GEMM_BACKEND" and Version(release) >= LINEAR_BACKEND:
        return f"--linear-backend {value.lower().replace('-', '_')}"
    return None
