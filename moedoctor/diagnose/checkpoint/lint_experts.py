"""Checks of which tensors are there: the index against the shards, and experts that are missing or twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from moedoctor.diagnose.checkpoint.checkpoint import INDEX, Checkpoint
from moedoctor.diagnose.checkpoint.lint_missing import (
    EXPERT_NUMBERS,
    check_expert_layers,
    expected_projections,
)
from moedoctor.diagnose.checkpoint.lint_records import Findings
from moedoctor.diagnose.checkpoint.modules import (
    BLOCK,
    SCALES,
    Parts,
    expert_name,
    fused_experts,
    scheme,
    tensor_name,
    text_config,
    whole_number,
)
from moedoctor.diagnose.checkpoint.quantization import Declared
from moedoctor.diagnose.checkpoint.safetensors_header import TensorInfo

_NEEDED = {
    "weight": ("weight_scale", "weight_scale_2"),
    "weight_packed": ("weight_scale", "weight_global_scale"),
}
"""The weight of an NVFP4 module in the two layouts -> the scales that it cannot do without."""


def check_index(checkpoint: Checkpoint, found: Findings) -> None:
    """The index against the shards."""
    held = Counter(checkpoint.weight_map.values())
    for shard in checkpoint.missing_shards:
        found.add("shard_missing", f"{held[shard]} tensors", shard, "no such file")
    for shard in checkpoint.unlisted_shards:
        found.add("index_disagrees", "all of its tensors", shard, "not named in the index")
    if checkpoint.index is None:
        _check_duplicates(checkpoint, found)
        return
    for name in checkpoint.index.repeated:
        line = partial(checkpoint.index.line_of, name)
        found.add("tensor_duplicated", name, INDEX, "twice in the index", line)
    _check_duplicates(checkpoint, found)
    missing = set(checkpoint.missing_shards)
    for name, shard in checkpoint.weight_map.items():
        info, line = checkpoint.tensors.get(name), partial(checkpoint.index.line_of, name)
        if info is None and shard not in missing:
            found.add("index_disagrees", name, shard, "in the index, in no shard", line)
        elif info is not None and info.shard != shard and shard not in checkpoint.duplicates.get(name, ()):
            found.add("index_disagrees", name, info.shard, f"the index says {shard}", line)
    for name, info in checkpoint.tensors.items():
        if name not in checkpoint.weight_map:
            found.add("index_disagrees", name, info.shard, "in the shard, not in the index")


def _check_duplicates(checkpoint: Checkpoint, found: Findings) -> None:
    for name, shards in checkpoint.duplicates.items():
        found.add("tensor_duplicated", name, shards[0], f"also in {', '.join(shards[1:])}")


def check_experts(checkpoint: Checkpoint, modules: Mapping[str, Parts], found: Findings) -> None:
    """Experts and their projections: all there, none too many, all of a layer quantised alike."""
    layers: dict[str, dict[int, dict[str, str]]] = {}
    shards: dict[str, str] = {}
    config = text_config(checkpoint.config.value)
    expected = whole_number(config, *EXPERT_NUMBERS)
    for module, parts in modules.items():
        name = expert_name(module)
        if name is not None:
            kind = scheme(parts)
            if kind is not None:
                shards.setdefault(name.layer, next(iter(parts.values())).shard)
                layers.setdefault(name.layer, {}).setdefault(name.expert, {})[name.projection] = kind
        elif fused_experts(module) and expected and (weight := parts.get("weight")) and weight.shape:
            _check_count(module, weight, expected, found)
    projections = expected_projections(layers, config)
    for layer, experts in layers.items():
        shard = shards[layer]
        count = expected or max(experts) + 1
        if extra := [one for one in experts if one >= count]:
            found.add("expert_extra", f"{layer}.{max(extra)}", shard, f"{count} experts in config.json")
        inside = [one for one in experts if one < count]
        if len(inside) < count:
            lacking = next(one for one in range(count) if one not in experts)
            found.add(
                "expert_missing", f"{layer}.{lacking}", shard, f"{count - len(inside)} of {count} missing"
            )
        for expert, its in experts.items():
            for one in sorted(projections[layer] - its.keys()):
                found.add("expert_missing", f"{layer}.{expert}.{one}", shard, "no weight")
        _check_alike(layer, experts, shard, found)
    check_expert_layers(checkpoint, config, found)


def _check_count(module: str, weight: TensorInfo, expected: int, found: Findings) -> None:
    count = weight.shape[0]
    if len(weight.shape) == 3 and count != expected:
        check = "expert_extra" if count > expected else "expert_missing"
        found.add(check, module, weight.shard, f"{count} experts, {expected} in config.json")


def _check_alike(layer: str, experts: Mapping[int, Mapping[str, str]], shard: str, found: Findings) -> None:
    kinds: dict[str, int] = {}
    for its in experts.values():
        for kind in its.values():
            kinds[kind] = kinds.get(kind, 0) + 1
    if len(kinds) > 1:
        usual = max(kinds, key=lambda one: kinds[one])
        for expert, its in sorted(experts.items()):
            for projection, kind in its.items():
                if kind != usual:
                    found.add(
                        "experts_mixed", f"{layer}.{expert}.{projection}", shard, f"{kind}, others {usual}"
                    )


def check_parts(modules: Mapping[str, Parts], declared: Declared | None, found: Findings) -> None:
    """Scales without their weight and weights without their scales; dtypes and shapes that do not fit."""
    for module, parts in modules.items():
        kind = scheme(parts)
        if kind is None:
            for part in sorted(SCALES & parts.keys()):
                found.add(
                    "weight_missing", tensor_name(module, part), parts[part].shard, "no weight beside it"
                )
        elif kind == "nvfp4":
            if _packed_integers(module, parts, declared):
                continue
            _check_nvfp4(module, parts, found)
        elif kind == "fp8":
            _check_fp8(module, parts, declared, found)


def _packed_integers(module: str, parts: Parts, declared: Declared | None) -> bool:
    """Whether the bytes of a weight are integers: ModelOpt's AWQ has two in one as well."""
    rule, scales = declared.rules.of(module) if declared is not None else None, parts.get("weight_scale")
    return rule is not None and rule.scheme == "int" and (scales is None or scales.dtype != "F8_E4M3")


def _check_nvfp4(module: str, parts: Parts, found: Findings) -> None:
    weight_part = "weight_packed" if "weight_packed" in parts else "weight"
    weight = parts[weight_part]
    for part in _NEEDED[weight_part]:
        if part not in parts:
            found.add("scale_missing", tensor_name(module, part), weight.shard, "not in the checkpoint")
    scales = parts.get("weight_scale")
    if scales is not None:
        if scales.dtype != "F8_E4M3":
            found.add(
                "dtype_mismatch",
                tensor_name(module, "weight_scale"),
                scales.shard,
                f"{scales.dtype}, not F8_E4M3",
            )
        # A byte of U8 holds two weights; the shape of an F4 tensor counts weights.
        per_element = 2 if weight.dtype == "U8" else 1
        expected = (*weight.shape[:-1], weight.shape[-1] * per_element // BLOCK) if weight.shape else ()
        if scales.shape not in (expected, _transposed(weight.shape, per_element)):
            value = f"{list(scales.shape)}, expected {list(expected)}"
            found.add("shape_mismatch", tensor_name(module, "weight_scale"), scales.shard, value)
    for part in ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale"):
        info = parts.get(part)
        if info is None:
            continue
        if info.dtype != "F32":
            found.add("dtype_mismatch", tensor_name(module, part), info.shard, f"{info.dtype}, not F32")
        if info.elements != 1 and len(weight.shape) == 2:
            found.add(
                "shape_mismatch",
                tensor_name(module, part),
                info.shard,
                f"{list(info.shape)}, expected one value",
            )


def _transposed(shape: tuple[int, ...], per_element: int) -> tuple[int, ...] | None:
    """Shape of the scales of experts that are stored as (experts, K, N), as Llama 4 has them."""
    return (shape[0], shape[1] * per_element // BLOCK, shape[2]) if len(shape) == 3 else None


def _check_fp8(module: str, parts: Parts, declared: Declared | None, found: Findings) -> None:
    weight = parts["weight"]
    inverse = parts.get("weight_scale_inv")
    scales = inverse or parts.get("weight_scale") or parts.get("scale_inv") or parts.get("scale")
    if scales is None:
        found.add("scale_missing", tensor_name(module, "weight_scale"), weight.shard, "not in the checkpoint")
        return
    if scales.dtype not in ("F32", "BF16", "F16", "F8_E8M0", "U8"):
        found.add("dtype_mismatch", tensor_name(module, "weight_scale"), scales.shard, scales.dtype)
    rule = declared.rules.of(module) if declared is not None else None
    block = rule.block if rule is not None else None
    if block is not None and inverse is not None and len(weight.shape) == 2:
        expected = tuple(-(-size // unit) for size, unit in zip(weight.shape, block, strict=True))
        if inverse.shape != expected:
            value = f"{list(inverse.shape)}, expected {list(expected)}"
            found.add("shape_mismatch", tensor_name(module, "weight_scale_inv"), inverse.shard, value)
    elif inverse is None and len(weight.shape) == 2 and scales.elements not in (1, weight.shape[0]):
        known = scales.dtype in ("F8_E8M0", "U8")  # MXFP8: a scale for each 32 values
        if not known:
            value = f"{list(scales.shape)}, expected one value or one for each of {weight.shape[0]} rows"
            found.add("shape_mismatch", tensor_name(module, "weight_scale"), scales.shard, value)
