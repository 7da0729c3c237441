"""Checks of the scales' values: the only tensors of a checkpoint that are read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moedoctor.diagnose.checkpoint.findings import Findings, Inspection
from moedoctor.diagnose.checkpoint.modules import GLOBAL_SCALES, INPUT_SCALES, KV_SCALES, PAIRS, Module
from moedoctor.diagnose.checkpoint.safetensors_header import TensorInfo
from moedoctor.diagnose.checkpoint.values import FULL_BYTES, SMALLEST_NORMAL, SMALLEST_NORMAL_F32, Reader

_READABLE = frozenset({"F32", "F64", "F16", "BF16"})
_MOST_VALUES = 1 << 20
_SAME = 1e-5
_SUBNORMAL_SHARE = 5e-4
_LARGEST_F32 = 3.4028235e38
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_SPREAD = 1e3
"""Between the largest weights of two matrices of one layer. An estimate, not a measurement: trained matrices
have a standard deviation of about 0.005 to 0.1 and largest weights 5 to 20 times that, 0.025 to 2, a factor
of 80 apart at most; a healthy layer stays ten times below the limit."""
_INPUT_SPREAD = 1e4
_LARGEST_CODE = {"nvfp4": 6.0, "fp8": 448.0}
"""The largest values of E2M1 and E4M3: the largest weights with a scale of 1."""

Singles = dict[str, dict[str, tuple[float, TensorInfo]]]
"""Part (``weight_scale_2``) -> module -> its only value, and its tensor."""


@dataclass(frozen=True)
class ScaleValues:
    """The scales that were read."""

    singles: Singles
    largest: Mapping[str, tuple[float, str, TensorInfo]]
    """Module -> the largest scale of its weight's blocks or rows, without a global scale, and its tensor."""
    share_read: float
    """The share of the block scales that was read, 0 to 1."""


def check_values(checked: Inspection, reader: Reader) -> ScaleValues:
    """Find scales that are zero, NaN, negative or subnormal. Return what was read."""
    scales = sorted(_scales(checked.modules), key=lambda item: (item[2].shard, item[2].start))
    total = sum(info.size for _, _, info in scales if info.dtype == "F8_E4M3")
    whole, total_read = total <= FULL_BYTES, 0
    singles: Singles = {}
    largest: dict[str, tuple[float, str, TensorInfo]] = {}
    for module, part, info in scales:
        name = module.tensor(part)
        if info.dtype == "F8_E4M3":
            most, read = _check_block_scales(reader, name, module, info, whole, checked.findings)
            total_read += read
        elif info.dtype in _READABLE and 0 < info.elements <= _MOST_VALUES:
            values = reader.floats(info)
            _check_floats(name, part, info, values, checked.findings)
            if len(values) == 1:
                singles.setdefault(part, {})[module.name] = (values[0], info)
            most = max(values)
        else:
            continue
        if part in ("weight_scale", "weight_scale_inv"):
            largest[module.name] = (most, name, info)
    return ScaleValues(singles, largest, total_read / total if total else 1.0)


def _scales(modules: Mapping[str, Module]) -> Iterator[tuple[Module, str, TensorInfo]]:
    for module in modules.values():
        for part, info in module.parts.items():
            if part.endswith(("scale", "scale_2", "scale_inv")):
                yield module, part, info


def _check_block_scales(
    reader: Reader, name: str, module: Module, info: TensorInfo, whole: bool, findings: Findings
) -> tuple[float, int]:
    """Check one tensor of block scales. Return its largest scale and how many were read."""
    counts = reader.block_scales(info, whole)
    if counts.nan:
        findings.add("scale_nan", name, info.shard, f"{counts.nan} of {counts.read} are NaN")
    if counts.negative:
        findings.add("scale_negative", name, info.shard, f"{counts.negative} of {counts.read} are negative")
    if counts.zero and module.weight is not None:
        lost = reader.zero_blocks(info, module.weight, whole)
        if lost:
            value = f"{counts.zero} of {counts.read} are 0, {lost} or more of them over weights that are not"
            findings.add("scale_zero", name, info.shard, value)
    usable = counts.read - counts.zero - counts.nan - counts.negative
    if usable and (counts.subnormal > _SUBNORMAL_SHARE * counts.read or 0 < counts.largest < SMALLEST_NORMAL):
        value = f"{counts.subnormal} of {counts.read} are below {SMALLEST_NORMAL:g}"
        findings.add("scale_subnormal", name, info.shard, value)
    return counts.largest, counts.read


def _check_floats(
    name: str, part: str, info: TensorInfo, values: tuple[float, ...], findings: Findings
) -> None:
    wild = next((value for value in values if not math.isfinite(value)), None)
    if wild is not None:
        findings.add("scale_nan", name, info.shard, str(wild))
        return
    least = min(values)
    check = None
    if least < 0:
        check = "scale_negative"
    elif part in INPUT_SCALES and (least == 0 or 1 / least > _LARGEST_F32):
        check = "input_scale_zero"
    elif least == 0:
        # An engine treats a zero KV scale as a missing one, or stops.
        check = "kv_scales_missing" if part in KV_SCALES else "scale_zero"
    elif least < SMALLEST_NORMAL_F32:
        check = "scale_subnormal"
    elif len(values) == 1 and (
        (part == "weight_scale_2" and least > 1) or (part == "weight_global_scale" and least < 1)
    ):
        check = "scale_inverted"
    if check is not None:
        findings.add(check, name, info.shard, least)


def check_input_scales(checked: Inspection) -> None:
    """MD015: find modules without an input scale though their activations are quantised with a stored one."""
    for module in checked.modules.values():
        if module.kind not in ("nvfp4", "fp8") or any(part in module.parts for part in INPUT_SCALES):
            continue
        rules = [
            rule for declared in checked.declared if (rule := declared.rules.of(module.name)) is not None
        ]
        if any(rule.static_inputs and rule.scheme == module.kind for rule in rules):
            part = "input_global_scale" if "weight_packed" in module.parts else "input_scale"
            shard = module.stored.shard
            checked.findings.add("input_scale_missing", module.tensor(part), shard, "not in the checkpoint")


def check_pairs(checked: Inspection, singles: Singles) -> None:
    """MD014: find different global scales of gate and up of an expert, and of other fused layers."""
    for part in GLOBAL_SCALES:
        scales = singles.get(part, {})
        for name, (value, info) in scales.items():
            expert = checked.modules[name].expert
            head, _, projection = name.rpartition(".")
            if expert is not None:
                up = scales.get(f"{head}.{PAIRS[projection]}") if projection in PAIRS else None
                if up is not None and _differ(value, up[0]):
                    shown = f"gate {value:g}, up {up[0]:g}"
                    checked.findings.add("global_scale_mismatch", f"{name}.{part}", info.shard, shown)
                continue
            for first, *others in _FUSED:
                if projection == first:
                    names = [f"{head}.{other}" for other in others]
                    values = [scales[other][0] for other in names if other in scales]
                    if any(_differ(value, other) for other in values):
                        shown = ", ".join(f"{scale:g}" for scale in (value, *values))
                        checked.findings.add("fused_scale_mismatch", f"{name}.{part}", info.shard, shown)


def _differ(first: float, second: float) -> bool:
    return math.isfinite(first) and math.isfinite(second) and not math.isclose(first, second, rel_tol=_SAME)


def check_spread(checked: Inspection, values: ScaleValues) -> None:
    """Find scales of the experts of one layer that are orders of magnitude apart.

    First each kind of scale of each projection. Then, in layers without such a finding, the largest weights
    over all projections, which block scales and global scales make together.
    """
    findings = checked.findings
    reported: set[str] = set()
    for part in (*GLOBAL_SCALES, *INPUT_SCALES, "weight_scale"):
        groups: dict[tuple[str, str], list[tuple[float, str, str]]] = {}
        for name, (value, info) in values.singles.get(part, {}).items():
            expert = checked.modules[name].expert
            if expert is not None and SMALLEST_NORMAL_F32 <= value < math.inf:
                groups.setdefault((expert.layer, expert.projection), []).append((value, name, info.shard))
        limit = _INPUT_SPREAD if part in INPUT_SCALES else _SPREAD
        for (layer, _), group in groups.items():
            least, most = min(group), max(group)
            if most[0] > limit * least[0]:
                shown = f"{least[0]:g}, and {most[0]:g} in {most[1]}"
                findings.add("scale_spread", f"{least[1]}.{part}", least[2], shown)
                if part not in INPUT_SCALES:
                    reported.add(layer)
    layers: dict[str, list[tuple[float, str, str]]] = {}
    for layer, weight in _largest_weights(values, checked.modules):
        layers.setdefault(layer, []).append(weight)
    for layer, weights in layers.items():
        least, most = min(weights), max(weights)
        if layer not in reported and most[0] > _SPREAD * least[0]:
            shown = f"largest weight by its scales {least[0]:g}, and {most[0]:g} in {most[1]}"
            findings.add("scale_spread", least[1], least[2], shown)


def _largest_weights(
    values: ScaleValues, modules: Mapping[str, Module]
) -> Iterator[tuple[str, tuple[float, str, str]]]:
    """Yield (layer, (the largest weight that a module's scales allow, the tensor of its scales, its file)).

    Scales that other checks report (zero, NaN, negative, subnormal) are left out.
    """
    for name, (scale, tensor, info) in values.largest.items():
        expert, kind = modules[name].expert, modules[name].kind
        if expert is None or kind not in _LARGEST_CODE:
            continue
        global_scale = 1.0
        if kind == "nvfp4":
            if info.dtype != "F8_E4M3" or scale < SMALLEST_NORMAL:
                continue
            global_scale = _global_scale(values, name)
        weight = _LARGEST_CODE[kind] * scale * global_scale
        if min(scale, global_scale) >= SMALLEST_NORMAL_F32 and weight < math.inf:
            yield expert.layer, (weight, tensor, info.shard)


def _global_scale(values: ScaleValues, module: str) -> float:
    """Return the factor of a module's block scales, or NaN if there is none."""
    for part in GLOBAL_SCALES:
        if module in values.singles.get(part, {}):
            value = values.singles[part][module][0]
            # compressed-tensors stores the reciprocal.
            return value if part == "weight_scale_2" else 1 / value if value else math.nan
    return math.nan
