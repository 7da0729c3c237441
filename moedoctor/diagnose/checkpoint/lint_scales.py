"""Checks of the scales' values: the only tensors of a checkpoint that are read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moedoctor.diagnose.checkpoint.lint_records import Findings
from moedoctor.diagnose.checkpoint.modules import (
    GLOBAL_SCALES,
    INPUT_SCALES,
    KV_SCALES,
    PAIRS,
    Parts,
    expert_name,
    scheme,
    tensor_name,
)
from moedoctor.diagnose.checkpoint.quantization import Declared
from moedoctor.diagnose.checkpoint.safetensors_header import TensorInfo
from moedoctor.diagnose.checkpoint.values import (
    FULL_BYTES,
    SMALLEST_NORMAL,
    SMALLEST_NORMAL_F32,
    BlockScaleCounts,
    Reader,
)

_READABLE = frozenset({"F32", "F64", "F16", "BF16"})
_MOST_VALUES = 1 << 20
_SAME = 1e-5
_SUBNORMAL_SHARE = 5e-4
_LARGEST_F32 = 3.4028235e38
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Single = dict[str, dict[str, tuple[float, TensorInfo]]]
"""Part (``weight_scale_2``) -> module -> its one value, and where it is."""


@dataclass(frozen=True)
class ScaleValues:
    """What was read of the scales."""

    singles: Single
    largest: Mapping[str, tuple[float, str, TensorInfo]]
    """Module -> the largest scale of its weight's blocks or rows, without a global scale, and its tensor."""
    seen: float
    """Share of the block scales that was looked at, 0 to 1."""


def check_values(reader: Reader, modules: Mapping[str, Parts], found: Findings) -> ScaleValues:
    """Zero, NaN, negative and subnormal scales, and what was read on the way."""
    ordered = sorted(_scales(modules), key=lambda one: (one[3].shard, one[3].start))
    blocks = [info for _, _, _, info in ordered if info.dtype == "F8_E4M3"]
    total = sum(one.size for one in blocks)
    whole, seen = total <= FULL_BYTES, 0
    singles: Single = {}
    largest: dict[str, tuple[float, str, TensorInfo]] = {}
    for module, part, parts, info in ordered:
        name = tensor_name(module, part)
        if info.dtype == "F8_E4M3":
            counts = reader.block_scales(info, whole)
            _check_block_scales(reader, name, parts, info, counts, whole, found)
            most = counts.largest
            seen += counts.seen
        elif info.dtype in _READABLE and 0 < info.elements <= _MOST_VALUES:
            values = reader.floats(info)
            _check_floats(name, part, info, values, found)
            if len(values) == 1:
                singles.setdefault(part, {})[module] = (values[0], info)
            most = max(values)
        else:
            continue
        if part in ("weight_scale", "weight_scale_inv"):
            largest[module] = (most, name, info)
    return ScaleValues(singles, largest, seen / total if total else 1.0)


def _scales(modules: Mapping[str, Parts]) -> Iterator[tuple[str, str, Parts, TensorInfo]]:
    for module, parts in modules.items():
        for part, info in parts.items():
            if part.endswith(("scale", "scale_2", "scale_inv")):
                yield module, part, parts, info


def _check_block_scales(
    reader: Reader,
    name: str,
    parts: Parts,
    info: TensorInfo,
    counts: BlockScaleCounts,
    whole: bool,
    found: Findings,
) -> None:
    if counts.nan:
        found.add("scale_nan", name, info.shard, f"{counts.nan} of {counts.seen} are NaN")
    if counts.negative:
        found.add("scale_negative", name, info.shard, f"{counts.negative} of {counts.seen} are negative")
    if counts.zero:
        weight = parts.get("weight_packed") or parts.get("weight")
        lost = reader.zero_blocks(info, weight, whole) if weight is not None else 0
        if lost:
            value = f"{counts.zero} of {counts.seen} are 0, {lost} or more of them over weights that are not"
            found.add("scale_zero", name, info.shard, value)
    usable = counts.seen - counts.zero - counts.nan - counts.negative
    if usable and (counts.subnormal > _SUBNORMAL_SHARE * counts.seen or 0 < counts.largest < SMALLEST_NORMAL):
        value = f"{counts.subnormal} of {counts.seen} are below {SMALLEST_NORMAL:g}"
        found.add("scale_subnormal", name, info.shard, value)


def _check_floats(name: str, part: str, info: TensorInfo, values: tuple[float, ...], found: Findings) -> None:
    bad = next((one for one in values if not math.isfinite(one)), None)
    if bad is not None:
        found.add("scale_nan", name, info.shard, str(bad))
        return
    least = min(values)
    if least < 0:
        found.add("scale_negative", name, info.shard, least)
    elif part in INPUT_SCALES and (least == 0 or 1 / least > _LARGEST_F32):
        found.add("input_scale_zero", name, info.shard, least)
    elif least == 0 and part in KV_SCALES:
        # An engine takes it for none, or stops.
        found.add("kv_scales_missing", name, info.shard, least)
    elif least == 0:
        found.add("scale_zero", name, info.shard, least)
    elif least < SMALLEST_NORMAL_F32:
        found.add("scale_subnormal", name, info.shard, least)
    elif len(values) == 1 and (
        (part == "weight_scale_2" and least > 1) or (part == "weight_global_scale" and least < 1)
    ):
        found.add("scale_inverted", name, info.shard, least)


def check_input_scales(modules: Mapping[str, Parts], declared: tuple[Declared, ...], found: Findings) -> None:
    """MD015: quantised modules without an input scale where activations are quantised with a stored one."""
    for module, parts in modules.items():
        kind = scheme(parts)
        if kind not in ("nvfp4", "fp8") or any(one in parts for one in INPUT_SCALES):
            continue
        rules = [rule for one in declared if (rule := one.rules.of(module)) is not None]
        if any(rule.static_inputs and rule.scheme == kind for rule in rules):
            weight = parts.get("weight_packed") or parts["weight"]
            name = tensor_name(module, "input_global_scale" if "weight_packed" in parts else "input_scale")
            found.add("input_scale_missing", name, weight.shard, "not in the checkpoint")


def check_pairs(singles: Single, found: Findings) -> None:
    """MD014: gate and up of an expert with global scales of their own; the same for other fused layers."""
    for part in GLOBAL_SCALES:
        values = singles.get(part, {})
        for module, (value, info) in values.items():
            name = expert_name(module)
            if name is not None:
                partner = PAIRS.get(name.projection)
                up = values.get(f"{name.layer}.{name.expert}.{partner}") if partner else None
                if up is not None and _differ(value, up[0]):
                    shown = f"gate {value:g}, up {up[0]:g}"
                    found.add("global_scale_mismatch", f"{module}.{part}", info.shard, shown)
                continue
            head, _, last = module.rpartition(".")
            for fused in _FUSED:
                if last == fused[0]:
                    others = [values[f"{head}.{one}"][0] for one in fused[1:] if f"{head}.{one}" in values]
                    if any(_differ(value, one) for one in others):
                        shown = ", ".join(f"{one:g}" for one in (value, *others))
                        found.add("fused_scale_mismatch", f"{module}.{part}", info.shard, shown)


def _differ(first: float, second: float) -> bool:
    return math.isfinite(first) and math.isfinite(second) and not math.isclose(first, second, rel_tol=_SAME)
