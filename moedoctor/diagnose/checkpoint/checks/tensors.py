"""Checks of each module's tensors: scales beside their weight, dtypes, shapes, and tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moedoctor.diagnose.checkpoint.findings import Lint
from moedoctor.diagnose.checkpoint.modules import (
    BLOCK,
    GLOBAL_SCALES,
    INPUT_SCALES,
    PAIRS,
    SCALES,
    Module,
    find_whole_number,
)
from moedoctor.diagnose.checkpoint.safetensors_header import TensorInfo
from moedoctor.models.config_fields import find_text_config

TP_SIZES = tuple(range(1, 9))
_USUAL = (1, 2, 4, 8)
_CUT_BY_COLUMNS = ("down_proj", "w2", "o_proj")
_CUT_BY_ROWS = (*PAIRS, *PAIRS.values())
_LEAST_BLOCK = 32
"""The smallest block that vLLM 0.29.0 and later split FP8 blocks into."""


def check_parts(checked: Lint) -> None:
    """Find scales without a weight, weights without scales, and dtypes and shapes that do not fit."""
    for module in checked.modules.values():
        if module.kind is None:
            for part in sorted(SCALES & module.parts.keys()):
                shard = module.parts[part].shard
                checked.add("weight_missing", module.name_tensor(part), shard, "no weight beside it")
        elif module.weight is None:
            continue
        elif module.kind == "nvfp4":
            rule, scales = checked.find_rule(module), module.parts.get("weight_scale")
            # ModelOpt's AWQ has two integers in a byte as well.
            is_float = rule is None or rule.scheme != "int" or (scales and scales.dtype == "F8_E4M3")
            if is_float:
                _check_nvfp4(checked, module, module.weight)
        elif module.kind == "fp8":
            _check_fp8(checked, module, module.weight)


def _check_nvfp4(checked: Lint, module: Module, weight: TensorInfo) -> None:
    global_scale = "weight_global_scale" if "weight_packed" in module.parts else "weight_scale_2"
    for part in ("weight_scale", global_scale):
        if part not in module.parts:
            checked.add("scale_missing", module.name_tensor(part), weight.shard, "not in the checkpoint")
    for part in ("weight_scale", *GLOBAL_SCALES, *INPUT_SCALES):
        info, name = module.parts.get(part), module.name_tensor(part)
        if info is None:
            continue
        dtype = "F8_E4M3" if part == "weight_scale" else "F32"
        if info.dtype != dtype:
            checked.add("dtype_mismatch", name, info.shard, f"{info.dtype}, not {dtype}")
        if part != "weight_scale":
            if info.elements != 1 and len(weight.shape) == 2:
                value = f"{list(info.shape)}, expected one value"
                checked.add("shape_mismatch", name, info.shard, value)
            continue
        # A byte of U8 holds two weights; the shape of an F4 tensor counts weights.
        per_element = 2 if weight.dtype == "U8" else 1
        expected = (*weight.shape[:-1], weight.shape[-1] * per_element // BLOCK) if weight.shape else ()
        fits = [expected]
        if len(weight.shape) == 3:  # experts that are stored as [experts, K, N], as in Llama 4
            experts, inner, outer = weight.shape
            fits.append((experts, inner * per_element // BLOCK, outer))
        if info.shape not in fits:
            value = f"{list(info.shape)}, expected {list(expected)}"
            checked.add("shape_mismatch", name, info.shard, value)


def _check_fp8(checked: Lint, module: Module, weight: TensorInfo) -> None:
    parts, rule = module.parts, checked.find_rule(module)
    inverse = parts.get("weight_scale_inv")
    scales = inverse or parts.get("weight_scale") or parts.get("scale_inv") or parts.get("scale")
    has_blocks = rule is not None and rule.name == "fp8" and rule.block is not None
    name = module.name_tensor("weight_scale_inv" if inverse or has_blocks else "weight_scale")
    if scales is None:
        checked.add("scale_missing", name, weight.shard, "not in the checkpoint")
        return
    if scales.dtype not in ("F32", "BF16", "F16", "F8_E8M0", "U8"):
        checked.add("dtype_mismatch", name, scales.shard, scales.dtype)
    if len(weight.shape) != 2:
        return
    if inverse is not None:
        block = rule.block if rule is not None else None
        expected = [-(-size // unit) for size, unit in zip(weight.shape, block or (1, 1), strict=True)]
        if block is not None and list(inverse.shape) != expected:
            value = f"{list(inverse.shape)}, expected {expected}"
            checked.add("shape_mismatch", name, inverse.shard, value)
    # MXFP8 has a scale for each 32 values.
    elif scales.elements not in (1, weight.shape[0]) and scales.dtype not in ("F8_E8M0", "U8"):
        value = f"{list(scales.shape)}, expected one value or one for each of {weight.shape[0]} rows"
        checked.add("shape_mismatch", name, scales.shard, value)


def check_shapes(checked: Lint) -> None:
    """Find halves of different shapes, and sizes that a tensor parallelism (TP) does not divide.

    Only TP sizes that the attention heads allow are tried.
    """
    heads = find_whole_number(find_text_config(checked.checkpoint.config.value), "num_attention_heads")
    tp_sizes = [tp for tp in TP_SIZES if (heads % tp == 0 if heads else tp in _USUAL)]
    checked_shapes: set[tuple[str, str, tuple[int, int]]] = set()
    untiled = []
    for module in checked.modules.values():
        shape, weight, kind = module.shape, module.weight, module.kind
        if shape is None or weight is None or kind is None or (module.expert is None and kind == "none"):
            continue
        head, _, projection = module.name.rpartition(".")
        up = checked.modules.get(f"{head}.{PAIRS[projection]}") if projection in PAIRS else None
        if up is not None and up.shape not in (None, shape):
            checked.add("shape_mismatch", module.name, weight.shard, f"{list(shape)}, up is {up.shape}")
        if (projection, kind, shape) in checked_shapes:
            continue
        checked_shapes.add((projection, kind, shape))
        # The rows and columns that must stay together, since they share a scale.
        rule = checked.find_rule(module)
        block = rule.block if kind == "fp8" and rule is not None else None
        units = (1, BLOCK) if kind == "nvfp4" else block or (1, 1)
        if kind == "nvfp4" and shape[1] % BLOCK:
            value = f"{shape[1]} columns are no multiple of {BLOCK}"
            checked.add("block_incomplete", module.name, weight.shard, value)
        elif up is not None and shape[0] % units[0]:
            sizes = tp_sizes if module.expert is not None and block is not None else ()
            fits = ", ".join(str(tp) for tp in sizes if _is_split(shape, units, tp)) or "none"
            value = (
                f"{shape[0]} rows in units of {units[0]}, up begins in the same block (experts fit: {fits})"
            )
            checked.add("block_shared", module.name, weight.shard, value)
        elif wrong := _find_untiled(projection, shape, units, tp_sizes):
            untiled.append((module.expert, (module.name, weight.shard, wrong)))
    shared = any(finding.check == "block_shared" for finding in checked.findings)
    for expert, place in untiled:
        if expert is None or not shared:  # other sizes help experts, whose blocks the release splits
            checked.add("does_not_tile", *place)


def _is_split(shape: tuple[int, int], units: tuple[int, int], tp: int) -> bool:
    """Return True if vLLM 0.29.0 to 0.33.0 split the blocks of gate [rows, columns] so that each part fits.

    `refine_fp8_moe_block_shape` chooses the block; the loader repeats the scales and cuts them by ranks. If
    the last block is not full, the repeated scales of a rank can be more than its parameter has.
    """
    rows, part = shape[0], shape[0] // tp
    unit = math.gcd(*units, part, shape[1])
    if rows % tp or unit < _LEAST_BLOCK:
        return False
    repeated = -(-rows // units[0]) * (units[0] // unit)
    return repeated // tp == part // unit


def _find_untiled(
    projection: str, shape: tuple[int, int], units: tuple[int, int], tp_sizes: Sequence[int]
) -> str | None:
    """Return for which TP sizes a weight cannot be cut, or None.

    Gate and up are cut by rows, down and the attention's output by columns, q, k and v by heads.
    """
    if projection not in (*_CUT_BY_COLUMNS, *_CUT_BY_ROWS):
        return None
    axis, what = (1, "columns") if projection in _CUT_BY_COLUMNS else (0, "rows")
    size, unit = shape[axis], units[axis]
    wrong = [tp for tp in tp_sizes if size % tp or (tp > 1 and size // tp % unit)]
    fits = ", ".join(str(tp) for tp in tp_sizes if tp not in wrong) or "none"
    shown = f"{size} {what} in units of {unit}: not for TP {', '.join(map(str, wrong))} (fits: {fits})"
    return shown if wrong else None
