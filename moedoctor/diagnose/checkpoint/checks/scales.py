"""Checks of the scales' values: the only tensors of a checkpoint that are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moedoctor.diagnose.checkpoint.findings import Lint
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


@dataclass(frozen=True)
class _Scale:
    value: float
    """Its largest value; its only value if it has one."""
    module: Module
    tensor: str
    shard: str


Singles = dict[str, dict[str, _Scale]]
"""Part (``weight_scale_2``) -> module -> a tensor with one value."""


def check_values(checked: Lint) -> None:
    """Read the scales. Find those that are zero, NaN, negative, subnormal, or that differ too much."""
    scales = [
        (module, part, info)
        for module in checked.modules.values()
        for part, info in module.parts.items()
        if part.endswith(("scale", "scale_2", "scale_inv"))
    ]
    scales.sort(key=lambda item: (item[2].shard, item[2].start))
    total = sum(info.size for _, _, info in scales if info.dtype == "F8_E4M3")
    whole, total_read = total <= FULL_BYTES, 0
    singles: Singles = {}
    weights: list[_Scale] = []
    with Reader(checked.checkpoint.folder) as reader:
        for module, part, info in scales:
            name = module.name_tensor(part)
            if info.dtype == "F8_E4M3":
                most, read = _check_block_scales(checked, reader, name, module, info, whole)
                total_read += read
            elif info.dtype in _READABLE and 0 < info.elements <= _MOST_VALUES:
                values = reader.read_floats(info)
                _check_floats(checked, name, part, info, values)
                most = max(values)
                if len(values) == 1:
                    singles.setdefault(part, {})[module.name] = _Scale(most, module, name, info.shard)
            else:
                continue
            of_weights = part in ("weight_scale", "weight_scale_inv")
            if of_weights and (info.dtype == "F8_E4M3" or module.kind != "nvfp4"):
                weights.append(_Scale(most, module, name, info.shard))
    checked.block_scales_seen = total_read / total if total else 1.0
    _check_pairs(checked, singles)
    _check_spread(checked, singles, weights)


def _check_block_scales(
    checked: Lint, reader: Reader, name: str, module: Module, info: TensorInfo, whole: bool
) -> tuple[float, int]:
    """Check one tensor of block scales. Return its largest scale and how many were read."""
    counts = reader.count_block_scales(info, whole)
    if counts.nan:
        checked.add("scale_nan", name, info.shard, f"{counts.nan} of {counts.read} are NaN")
    if counts.negative:
        checked.add("scale_negative", name, info.shard, f"{counts.negative} of {counts.read} are negative")
    if counts.zero and module.weight is not None:
        lost = reader.count_zero_blocks(info, module.weight, whole)
        if lost:
            value = f"{counts.zero} of {counts.read} are 0, {lost} or more of them over weights that are not"
            checked.add("scale_zero", name, info.shard, value)
    usable = counts.read - counts.zero - counts.nan - counts.negative
    if usable and (counts.subnormal > _SUBNORMAL_SHARE * counts.read or 0 < counts.largest < SMALLEST_NORMAL):
        value = f"{counts.subnormal} of {counts.read} are below {SMALLEST_NORMAL:g}"
        checked.add("scale_subnormal", name, info.shard, value)
    return counts.largest, counts.read


def _check_floats(checked: Lint, name: str, part: str, info: TensorInfo, values: tuple[float, ...]) -> None:
    wild = next((value for value in values if not math.isfinite(value)), None)
    if wild is not None:
        checked.add("scale_nan", name, info.shard, str(wild))
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
        checked.add(check, name, info.shard, least)


def check_input_scales(checked: Lint) -> None:
    """MD015: find modules without an input scale though their activations are quantized with a stored one."""
    for module in checked.modules.values():
        if module.kind not in ("nvfp4", "fp8") or any(part in module.parts for part in INPUT_SCALES):
            continue
        rules = filter(None, (declared.rules.find(module.name) for declared in checked.declared))
        if any(rule.static_inputs and rule.scheme == module.kind for rule in rules):
            part = "input_global_scale" if "weight_packed" in module.parts else "input_scale"
            shard = module.stored.shard
            checked.add("input_scale_missing", module.name_tensor(part), shard, "not in the checkpoint")


def _check_pairs(checked: Lint, singles: Singles) -> None:
    """MD014: find different global scales of gate and up of an expert, and of other fused layers."""
    for part in GLOBAL_SCALES:
        scales = singles.get(part, {})
        for name, scale in scales.items():
            head, _, projection = name.rpartition(".")
            if scale.module.expert is not None:
                check, names = "global_scale_mismatch", [PAIRS[projection]] if projection in PAIRS else []
            else:
                fused = next((names for names in _FUSED if projection == names[0]), ())
                check, names = "fused_scale_mismatch", list(fused[1:])
            others = [scales[f"{head}.{other}"].value for other in names if f"{head}.{other}" in scales]
            if any(
                math.isfinite(scale.value + other) and not math.isclose(scale.value, other, rel_tol=_SAME)
                for other in others
            ):
                shown = [f"{value:g}" for value in (scale.value, *others)]
                if check == "global_scale_mismatch":
                    shown = [f"gate {shown[0]}", f"up {shown[1]}"]
                checked.add(check, f"{name}.{part}", scale.shard, ", ".join(shown))


def _check_spread(checked: Lint, singles: Singles, weights: Sequence[_Scale]) -> None:
    """Find scales of the experts of one layer that are orders of magnitude apart.

    First each kind of scale of each projection. Then, in layers without such a finding, the largest weights
    over all projections, which block scales and global scales make together.
    """
    reported: set[str] = set()
    for part in (*GLOBAL_SCALES, *INPUT_SCALES, "weight_scale"):
        groups: dict[tuple[str, str], list[_Scale]] = {}
        for scale in singles.get(part, {}).values():
            expert = scale.module.expert
            if expert is not None and SMALLEST_NORMAL_F32 <= scale.value < math.inf:
                groups.setdefault((expert.layer, expert.projection), []).append(scale)
        limit = _INPUT_SPREAD if part in INPUT_SCALES else _SPREAD
        for (layer, _), group in groups.items():
            least, most = min(group, key=_rank), max(group, key=_rank)
            if most.value > limit * least.value:
                shown = f"{least.value:g}, and {most.value:g} in {most.module.name}"
                checked.add("scale_spread", f"{least.module.name}.{part}", least.shard, shown)
                if part not in INPUT_SCALES:
                    reported.add(layer)
    layers: dict[str, list[_Scale]] = {}
    for scale in weights:
        expert, largest = scale.module.expert, _bound_weight(scale, singles)
        if expert is not None and largest is not None and expert.layer not in reported:
            layers.setdefault(expert.layer, []).append(replace(scale, value=largest))
    for scales in layers.values():
        least, most = min(scales, key=_rank), max(scales, key=_rank)
        if most.value > _SPREAD * least.value:
            shown = f"largest weight by its scales {least.value:g}, and {most.value:g} in {most.tensor}"
            checked.add("scale_spread", least.tensor, least.shard, shown)


def _rank(scale: _Scale) -> tuple[float, str]:
    return scale.value, scale.tensor


def _bound_weight(scale: _Scale, singles: Singles) -> float | None:
    """Return the largest weight that a module's scales allow.

    None if another check reports them: they are zero, NaN, negative or subnormal.
    """
    kind, name, global_scale = scale.module.kind, scale.module.name, 1.0
    if kind not in _LARGEST_CODE or (kind == "nvfp4" and scale.value < SMALLEST_NORMAL):
        return None
    if kind == "nvfp4":
        factor = singles.get("weight_scale_2", {}).get(name)
        inverse = singles.get("weight_global_scale", {}).get(name)  # of compressed-tensors
        global_scale = factor.value if factor else math.nan
        if factor is None and inverse and inverse.value:
            global_scale = 1 / inverse.value
    weight = _LARGEST_CODE[kind] * scale.value * global_scale
    return weight if min(scale.value, global_scale) >= SMALLEST_NORMAL_F32 and weight < math.inf else None
