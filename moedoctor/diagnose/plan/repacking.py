"""The GPU memory that a backend takes for a moment to repack a layer's experts after loading (MD026).

vLLM converts one layer at a time, and the loaded tensors of a layer go when all of its new ones are there.
The figures are the allocations of vLLM 0.33.0; the tests compare them with peaks that an H200 showed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moedoctor.models.layer_shape import LayerShape


@dataclass(frozen=True)
class Repacking:
    bytes: int | None
    """At most beside all loaded weights; None if it is not known."""
    how: str
    """The parts that were added up, or why it is not known."""


def compute_repacking(backend: str, scheme: str, layer: LayerShape) -> Repacking:
    """Return the bytes beside the loaded weights for a layer with experts in `scheme`, in vLLM's spelling."""
    if (backend, scheme) in _RULES:
        how, count = _RULES[backend, scheme]
        w2 = layer.experts * layer.intermediate * layer.hidden
        return Repacking(count(layer.experts, layer.experts * layer.w13_rows * layer.hidden, w2), how)
    return Repacking(None, f"not computed for {backend} with {scheme}: `moedoctor preflight -v` may know it")


def _count_marlin_fp8(experts: int, w13: int, w2: int) -> int:
    # `prepare_fp8_moe_layer_for_marlin` concatenates a list of repacked experts; its last expert's transposed
    # weights live until then.
    return max(2 * w13 + w13 // experts, w13 + 2 * w2 + w2 // experts)


def _count_marlin_nvfp4(experts: int, w13: int, w2: int) -> int:
    # `_nvfp4_compute_scale_factor` selects the positive scales by a mask: with BF16 activations, for a scale
    # 2 bytes in BF16, 4 in float32, 1 of the mask, three int64 places and 4 of the selected scale.
    each = 2 + 4 + 1 + 3 * 8 + 4
    return (w13 + w2) // 2 + max(each * w13 // 16, w13 // 16 + each * w2 // 16)


_RULES: Mapping[tuple[str, str], tuple[str, Callable[[int, int, int], int]]] = {
    **{
        ("TRITON", scheme): ("it uses the weights as they are loaded", lambda experts, w13, w2: 0)
        for scheme in ("bf16", "fp8")
    },
    ("MARLIN", "fp8"): (
        "the repacked experts as a list and as a tensor, the larger of w13 and w2",
        _count_marlin_fp8,
    ),
    ("MARLIN", "nvfp4"): (
        "the repacked weights, and 35 bytes for each scale while the scales' common factor is computed",
        _count_marlin_nvfp4,
    ),
}
"""(backend, scheme) -> what is added up, and the rule: (experts, weights of w13, weights of w2) -> bytes."""
