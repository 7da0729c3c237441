"""Check of scales against each other: experts of one layer whose weights are orders of magnitude apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from moedoctor.diagnose.checkpoint.lint_records import Findings
from moedoctor.diagnose.checkpoint.lint_scales import ScaleValues
from moedoctor.diagnose.checkpoint.modules import GLOBAL_SCALES, INPUT_SCALES, Parts, expert_name, scheme
from moedoctor.diagnose.checkpoint.values import SMALLEST_NORMAL, SMALLEST_NORMAL_F32

_SPREAD = 1e3
"""Between the largest weights of two matrices of one layer. An estimate, not a measurement: trained matrices
have a standard deviation of about 0.005 to 0.1 and largest weights 5 to 20 times that, 0.025 to 2, a factor
of 80 apart at most; a healthy layer stays ten times below the limit."""
_INPUT_SPREAD = 1e4
_LARGEST_CODE = {"nvfp4": 6.0, "fp8": 448.0}
"""Of E2M1 and E4M3: what a weight is with a scale of 1."""


def check_spread(values: ScaleValues, modules: Mapping[str, Parts], found: Findings) -> None:
    """Scales of the experts of one layer that are orders of magnitude apart.

    First each kind of scale of each projection; then, in layers of which nothing was said, the largest
    weights over all projections, which block scales and global scales make together.
    """
    named: set[str] = set()
    for part in (*GLOBAL_SCALES, *INPUT_SCALES, "weight_scale"):
        groups: dict[tuple[str, str], list[tuple[float, str, str]]] = {}
        for module, (value, info) in values.singles.get(part, {}).items():
            name = expert_name(module)
            if name is not None and SMALLEST_NORMAL_F32 <= value < math.inf:
                groups.setdefault((name.layer, name.projection), []).append((value, module, info.shard))
        limit = _INPUT_SPREAD if part in INPUT_SCALES else _SPREAD
        for (layer, _), group in groups.items():
            least, most = min(group), max(group)
            if most[0] > limit * least[0]:
                shown = f"{least[0]:g}, and {most[0]:g} in {most[1]}"
                found.add("scale_spread", f"{least[1]}.{part}", least[2], shown)
                if part not in INPUT_SCALES:
                    named.add(layer)
    layers: dict[str, list[tuple[float, str, str]]] = {}
    for layer, weight in _largest_weights(values, modules):
        layers.setdefault(layer, []).append(weight)
    for layer, weights in layers.items():
        least, most = min(weights), max(weights)
        if layer not in named and most[0] > _SPREAD * least[0]:
            shown = f"largest weight by its scales {least[0]:g}, and {most[0]:g} in {most[1]}"
            found.add("scale_spread", least[1], least[2], shown)


def _largest_weights(
    values: ScaleValues, modules: Mapping[str, Parts]
) -> Iterator[tuple[str, tuple[float, str, str]]]:
    """Layer -> the largest weight that a module's scales allow, the tensor of its scales, and its file.

    Scales that other checks name (zero, NaN, negative, subnormal) are left out.
    """
    for module, (scale, tensor, info) in values.largest.items():
        name, kind = expert_name(module), scheme(modules[module])
        if name is None or kind not in _LARGEST_CODE:
            continue
        whole = 1.0
        if kind == "nvfp4":
            if info.dtype != "F8_E4M3" or scale < SMALLEST_NORMAL:
                continue
            whole = _global_scale(values, module)
        weight = _LARGEST_CODE[kind] * scale * whole
        if min(scale, whole) >= SMALLEST_NORMAL_F32 and weight < math.inf:
            yield name.layer, (weight, tensor, info.shard)


def _global_scale(values: ScaleValues, module: str) -> float:
    """What the block scales are multiplied by; NaN where it is not there or none."""
    for part in GLOBAL_SCALES:
        if module in values.singles.get(part, {}):
            value = values.singles[part][module][0]
            # compressed-tensors stores the reciprocal.
            return value if part == "weight_scale_2" else 1 / value if value else math.nan
    return math.nan
