"""The GPUs that use a library: vLLM and FlashInfer select some of their libraries only on some GPUs.

Without kernels for another GPU such a library is not broken. The tables restate the conditions in the sources
of vLLM 0.17.1 to 0.33.0 and FlashInfer 0.6.4 to 0.7.2.post1. All GPUs use a library that is not in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from moedoctor.fixes.arch.targets import Capability


@dataclass(frozen=True)
class LibraryUse:
    """The GPUs and models that use a library."""

    uses: Callable[[Capability], bool]
    gpus: str
    """The GPUs in words: ``9.x``."""
    source: str
    """File and condition that show it."""
    needed_by: str | None = None
    """The few models that need it; None if any model may use it on these GPUs."""


def _match_majors(*majors: int) -> Callable[[Capability], bool]:
    return lambda gpu: gpu[0] in majors


_FLASHMLA = LibraryUse(
    _match_majors(9, 10), "9.x and 10.x", "vllm/v1/attention/ops/flashmla.py: is_flashmla_sparse_supported"
)
VLLM = {
    "_vllm_fa2_C": LibraryUse(
        lambda gpu: gpu >= (8, 0),
        "8.0 and newer",
        "vllm/vllm_flash_attn/flash_attn_interface.py: _is_fa2_supported",
    ),
    "_vllm_fa3_C": LibraryUse(
        _match_majors(9), "9.x", "vllm/vllm_flash_attn/flash_attn_interface.py: _is_fa3_supported"
    ),
    "_flashmla_C": _FLASHMLA,
    "_flashmla_extension_C": _FLASHMLA,
    "_flashkda_C": LibraryUse(
        _match_majors(9, 10, 12),
        "9.x, 10.x and 12.x",
        "vllm/models/kimi_k3/nvidia/kda.py: is_flashkda_supported",
        "Kimi and GLM models with KDA layers",
    ),
    "_deepselect_C": LibraryUse(
        _match_majors(10),
        "10.x",
        "vllm/model_executor/layers/indexer_topk.py: is_device_capability_family(100)",
    ),
    "_qutlass_C": LibraryUse(
        lambda gpu: gpu >= (10, 0),
        "10.0 and newer",
        "vllm/model_executor/layers/quantization/fp_quant.py: get_min_capability",
        "FP-Quant checkpoints, and NVFP4 checkpoints with transforms",
    ),
}
"""Extension module of vLLM -> its use."""

_FUSED_MOE = "flashinfer/fused_moe/core.py: get_cutlass_fused_moe_module"
FLASHINFER = {
    "fused_moe_120": LibraryUse(_match_majors(12), "12.x", _FUSED_MOE),
    "fused_moe_103": LibraryUse(lambda gpu: gpu == (10, 3), "10.3", _FUSED_MOE),
    "fused_moe_100": LibraryUse(
        lambda gpu: gpu in ((10, 0), (10, 7), (11, 0)), "10.0, 10.7 and 11.0", _FUSED_MOE
    ),
    "fused_moe_90": LibraryUse(_match_majors(9), "9.0", _FUSED_MOE),
    "fused_moe_89": LibraryUse(lambda gpu: gpu == (8, 9), "8.9", _FUSED_MOE),
}
"""Module of FlashInfer -> its use."""
_HARDWARE = re.compile(r"_h20_.*$")
"""``fused_moe_90_h20_prebuilt_d`` is fused_moe_90 for one GPU."""


def find_library_use(path: str, module: str | None = None) -> LibraryUse | None:
    """Return when the library at `path`, or the FlashInfer module, is used; None if on every GPU."""
    name = PurePath(path.rpartition("!")[2]).name.partition(".")[0]
    return VLLM.get(name) or FLASHINFER.get(_HARDWARE.sub("", module or name))
