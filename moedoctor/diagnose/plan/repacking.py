"""The GPU memory that a backend takes for a moment to repack a layer's experts after loading (MD026).

vLLM converts one layer at a time, and the loaded tensors of a layer go when all of its new ones are there.
The figures are the allocations of vLLM 0.33.0; the tests compare them with peaks that an H200 showed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moedoctor.models.layer_shape import LayerShape

_MARLIN_TILE = 64
_HUMMING_TILE = 128
"""The intermediate size is padded to a multiple of it."""


@dataclass(frozen=True)
class Repacking:
    bytes: int | None
    """At most beside all loaded weights; None if it is not known."""
    how: str
    """The parts that were added up, or why it is not known."""


def compute_repacking(backend: str, scheme: str, layer: LayerShape) -> Repacking:
    """Return the bytes beside the loaded weights for a layer with experts in `scheme`, in vLLM's spelling."""
    if (backend, scheme) not in _RULES:
        return Repacking(None, f"not computed for {backend} with {scheme}: ask `moedoctor preflight -v`")
    how, count = _RULES[backend, scheme]
    return Repacking(count(layer), how)


def _count_marlin_fp8(layer: LayerShape) -> int:
    # `prepare_fp8_moe_layer_for_marlin` concatenates a list of repacked experts; the transposed weights of
    # its last expert live until then, and those that were padded until the end.
    w13, w2 = _count_weights(layer, _MARLIN_TILE)
    padded = w13 + w2 if layer.intermediate % _MARLIN_TILE else 0
    return padded + max(2 * w13 + w13 // layer.experts, w13 + 2 * w2 + w2 // layer.experts)


def _count_marlin_nvfp4(layer: LayerShape) -> int:
    # `_nvfp4_compute_scale_factor` selects the scales above 0 by a mask: for each, with BF16 activations, it
    # has 2 bytes in BF16, 4 in float32, 1 of the mask, three int64 places and 4 of what was selected.
    w13, w2 = _count_weights(layer, _MARLIN_TILE)
    scale = 2 + 4 + 1 + 3 * 8 + 4
    return (w13 + w2) // 2 + max(scale * w13, w13 + scale * w2) // 16


def _count_marlin_mxfp4(layer: LayerShape) -> int:
    # The scales in BF16, as a list, and as a tensor.
    w13, w2 = _count_weights(layer, _MARLIN_TILE)
    return (w13 + w2) // 2 + max((2 + 1 + 1) * w13, w13 + (2 + 1 + 1) * w2) // 32


def _count_humming_fp8(layer: LayerShape) -> int:
    # A scale of a block becomes one of each row, in BF16: converted, padded, and twice to bring it in order.
    w13, _ = _count_weights(layer, _HUMMING_TILE)
    return 2 * w13 + 4 * 2 * w13 // 128


def _count_humming_nvfp4(layer: LayerShape) -> int:
    w13, _ = _count_weights(layer, _HUMMING_TILE)
    return w13 + 3 * w13 // 16


def _count_weights(layer: LayerShape, tile: int) -> tuple[int, int]:
    """Return the weights of w13 and of w2 in a layer whose intermediate size is padded to a multiple."""
    w2 = layer.experts * layer.hidden * -(-layer.intermediate // tile) * tile
    return w2 * layer.w13_rows // layer.intermediate, w2


_RULES: Mapping[tuple[str, str], tuple[str, Callable[[LayerShape], int]]] = {
    ("TRITON", "bf16"): ("the weights are used as they are loaded", lambda layer: 0),
    ("TRITON", "fp8"): ("the weights are used as they are loaded", lambda layer: 0),
    ("MARLIN", "fp8"): ("repacked experts as a list and as a tensor, of w13 or w2", _count_marlin_fp8),
    ("MARLIN", "nvfp4"): (
        "repacked experts, and 35 bytes for each scale while a factor for all of them is computed",
        _count_marlin_nvfp4,
    ),
    ("MARLIN", "mxfp4"): (
        "repacked experts, and three copies of the scales; to vLLM 0.25.1 a list of them, too",
        _count_marlin_mxfp4,
    ),
    ("HUMMING", "fp8"): ("w13 padded and repacked, and its scales four times", _count_humming_fp8),
    ("HUMMING", "nvfp4"): ("w13 padded and repacked, and its scales three times", _count_humming_nvfp4),
}
"""(backend, scheme) -> what is added up, and the rule."""
