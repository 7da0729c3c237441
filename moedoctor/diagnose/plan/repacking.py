"""The memory that loading takes for a moment: to repack experts on the GPU (MD026), and on the host.

vLLM converts one layer at a time, and the loaded tensors of a layer go when all of its new ones are there.
The figures are the allocations of vLLM 0.33.0; the tests compare them with peaks that an H200 showed.
Those of the host are bounds: they are read from that release and from torch, and were not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from moedoctor.models.layer_shape import LayerShape

_TILES = {"MARLIN": 64, "HUMMING": 128}
"""Backend -> what the intermediate size is padded to a multiple of."""


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
    tile = _TILES.get(backend, 1)
    w2 = layer.experts * layer.hidden * -(-layer.intermediate // tile) * tile
    return Repacking(count(layer, w2 * layer.w13_rows // layer.intermediate, w2), how)


def compute_host_peak(sizes: Iterable[int], limit: int) -> int:
    """Return the bytes of the host, at most, while ``--cpu-offload-gb`` moves parameters of these sizes.

    `UVAOffloader` takes parameters in their order until `limit` is reached. Each is copied to the host, and
    the copy to pinned memory, which torch rounds up to a power of two; both exist for a moment.
    """
    moved = pinned = peak = 0
    for size in sizes:
        if moved >= limit:
            break
        moved, pinned = moved + size, pinned + (1 << (size - 1).bit_length() if size else 0)
        peak = max(peak, pinned + size)
    return peak


def _count_marlin_fp8(layer: LayerShape, w13: int, w2: int) -> int:
    # `prepare_fp8_moe_layer_for_marlin` concatenates a list of repacked experts; the transposed weights of
    # its last expert live until then, and those that were padded until the end.
    padded = w13 + w2 if layer.intermediate % _TILES["MARLIN"] else 0
    return padded + max(2 * w13 + w13 // layer.experts, w13 + 2 * w2 + w2 // layer.experts)


def _count_marlin_nvfp4(layer: LayerShape, w13: int, w2: int) -> int:
    # `_nvfp4_compute_scale_factor` selects the scales above 0 by a mask: for each, with BF16 activations, it
    # has 2 bytes in BF16, 4 in float32, 1 of the mask, three int64 places and 4 of what was selected.
    scale = 2 + 4 + 1 + 3 * 8 + 4
    return (w13 + w2) // 2 + max(scale * w13, w13 + scale * w2) // 16


_RULES: Mapping[tuple[str, str], tuple[str, Callable[[LayerShape, int, int], int]]] = {
    ("TRITON", "bf16"): ("the weights are used as they are loaded", lambda layer, w13, w2: 0),
    ("TRITON", "fp8"): ("the weights are used as they are loaded", lambda layer, w13, w2: 0),
    ("MARLIN", "fp8"): ("repacked experts as a list and as a tensor, of w13 or w2", _count_marlin_fp8),
    ("MARLIN", "nvfp4"): (
        "repacked experts, and 35 bytes for each scale while a factor for all of them is computed",
        _count_marlin_nvfp4,
    ),
    ("MARLIN", "mxfp4"): (  # scales in BF16, as a list, and as a tensor
        "repacked experts, and three copies of the scales; to vLLM 0.25.1 a list of them, too",
        lambda layer, w13, w2: (w13 + w2) // 2 + max(4 * w13, w13 + 4 * w2) // 32,
    ),
    ("HUMMING", "fp8"): (  # a scale of a block becomes one of each row, in BF16
        "w13 padded and repacked, and its scales four times",
        lambda layer, w13, w2: 2 * w13 + 4 * 2 * w13 // 128,
    ),
    ("HUMMING", "nvfp4"): (
        "w13 padded and repacked, and its scales three times",
        lambda layer, w13, w2: w13 + 3 * w13 // 16,
    ),
}
"""(backend, scheme) -> what is added up, and the rule: layer, weights of w13 and of w2 -> bytes."""
