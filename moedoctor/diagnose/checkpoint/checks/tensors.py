"""Checks of each module's tensors: scales beside their weight, dtypes, shapes, and tensor parallelism."""

from __future__ import annotations

from moedoctor.diagnose.checkpoint.findings import Findings, Inspection
from moedoctor.diagnose.checkpoint.modules import (
    BLOCK,
    GLOBAL_SCALES,
    INPUT_SCALES,
    PAIRS,
    SCALES,
    Module,
    whole_number,
)
from moedoctor.diagnose.checkpoint.quantization import Rule
from moedoctor.diagnose.checkpoint.safetensors_header import TensorInfo
from moedoctor.models.config_fields import text_config

TP_SIZES = tuple(range(1, 9))
_USUAL = (1, 2, 4, 8)
_CUT_BY_COLUMNS = ("down_proj", "w2", "o_proj")
_CUT_BY_ROWS = (*PAIRS, *PAIRS.values())


def check_parts(checked: Inspection) -> None:
    """Find scales without a weight, weights without scales, and dtypes and shapes that do not fit."""
    for module in checked.modules.values():
        if module.kind is None:
            for part in sorted(SCALES & module.parts.keys()):
                shard = module.parts[part].shard
                checked.findings.add("weight_missing", module.tensor(part), shard, "no weight beside it")
        elif module.weight is None:
            continue
        elif module.kind == "nvfp4" and not _packed_integers(module, checked.rule(module)):
            _check_nvfp4(module, module.weight, checked.findings)
        elif module.kind == "fp8":
            _check_fp8(module, module.weight, checked.rule(module), checked.findings)


def _packed_integers(module: Module, rule: Rule | None) -> bool:
    """Return whether the bytes of a weight are integers: ModelOpt's AWQ has two in a byte as well."""
    scales = module.parts.get("weight_scale")
    return rule is not None and rule.scheme == "int" and (scales is None or scales.dtype != "F8_E4M3")


def _check_nvfp4(module: Module, weight: TensorInfo, findings: Findings) -> None:
    global_scale = "weight_global_scale" if "weight_packed" in module.parts else "weight_scale_2"
    for part in ("weight_scale", global_scale):
        if part not in module.parts:
            findings.add("scale_missing", module.tensor(part), weight.shard, "not in the checkpoint")
    scales = module.parts.get("weight_scale")
    if scales is not None:
        name = module.tensor("weight_scale")
        if scales.dtype != "F8_E4M3":
            findings.add("dtype_mismatch", name, scales.shard, f"{scales.dtype}, not F8_E4M3")
        # A byte of U8 holds two weights; the shape of an F4 tensor counts weights.
        per_element = 2 if weight.dtype == "U8" else 1
        expected = (*weight.shape[:-1], weight.shape[-1] * per_element // BLOCK) if weight.shape else ()
        if scales.shape not in (expected, _transposed(weight.shape, per_element)):
            value = f"{list(scales.shape)}, expected {list(expected)}"
            findings.add("shape_mismatch", name, scales.shard, value)
    for part in (*GLOBAL_SCALES, *INPUT_SCALES):
        info = module.parts.get(part)
        if info is None:
            continue
        if info.dtype != "F32":
            findings.add("dtype_mismatch", module.tensor(part), info.shard, f"{info.dtype}, not F32")
        if info.elements != 1 and len(weight.shape) == 2:
            value = f"{list(info.shape)}, expected one value"
            findings.add("shape_mismatch", module.tensor(part), info.shard, value)


def _transposed(shape: tuple[int, ...], per_element: int) -> tuple[int, ...] | None:
    """Return the shape of the scales of experts that are stored as [experts, K, N], as in Llama 4."""
    return (shape[0], shape[1] * per_element // BLOCK, shape[2]) if len(shape) == 3 else None


def _check_fp8(module: Module, weight: TensorInfo, rule: Rule | None, findings: Findings) -> None:
    parts = module.parts
    inverse = parts.get("weight_scale_inv")
    scales = inverse or parts.get("weight_scale") or parts.get("scale_inv") or parts.get("scale")
    name = module.tensor("weight_scale")
    if scales is None:
        findings.add("scale_missing", name, weight.shard, "not in the checkpoint")
        return
    if scales.dtype not in ("F32", "BF16", "F16", "F8_E8M0", "U8"):
        findings.add("dtype_mismatch", name, scales.shard, scales.dtype)
    if len(weight.shape) != 2:
        return
    block = rule.block if rule is not None else None
    if block is not None and inverse is not None:
        expected = [-(-size // unit) for size, unit in zip(weight.shape, block, strict=True)]
        if list(inverse.shape) != expected:
            value = f"{list(inverse.shape)}, expected {expected}"
            findings.add("shape_mismatch", module.tensor("weight_scale_inv"), inverse.shard, value)
    elif (
        inverse is None
        and scales.elements not in (1, weight.shape[0])
        and scales.dtype not in ("F8_E8M0", "U8")  # MXFP8: a scale for each 32 values
    ):
        value = f"{list(scales.shape)}, expected one value or one for each of {weight.shape[0]} rows"
        findings.add("shape_mismatch", name, scales.shard, value)


def check_shapes(checked: Inspection) -> None:
    """Find halves of different shapes, and sizes that a tensor parallelism (TP) does not divide.

    Only TP sizes that the attention heads allow are tried.
    """
    heads = whole_number(text_config(checked.checkpoint.config.value), "num_attention_heads")
    tp_sizes = [tp for tp in TP_SIZES if (heads % tp == 0 if heads else tp in _USUAL)]
    checked_shapes: set[tuple[str, str, tuple[int, int]]] = set()
    for module in checked.modules.values():
        shape, weight, kind = module.shape, module.weight, module.kind
        if shape is None or weight is None or kind is None or (module.expert is None and kind == "none"):
            continue
        head, _, projection = module.name.rpartition(".")
        up = checked.modules.get(f"{head}.{PAIRS[projection]}") if projection in PAIRS else None
        if up is not None and up.shape not in (None, shape):
            value = f"{list(shape)}, up is {up.shape}"
            checked.findings.add("shape_mismatch", module.name, weight.shard, value)
        key = (projection, kind, shape)
        if key not in checked_shapes:
            checked_shapes.add(key)
            _check_tiles(module, weight.shard, shape, checked.rule(module), tp_sizes, checked.findings)


def _check_tiles(
    module: Module,
    shard: str,
    shape: tuple[int, int],
    rule: Rule | None,
    tp_sizes: list[int],
    findings: Findings,
) -> None:
    rows, columns = shape
    if module.kind == "nvfp4" and columns % BLOCK:
        value = f"{columns} columns are no multiple of {BLOCK}"
        findings.add("block_incomplete", module.name, shard, value)
        return
    # Rows and columns that share a scale must stay together.
    block = (1, BLOCK) if module.kind == "nvfp4" else (1, 1)
    if module.kind == "fp8" and rule is not None and rule.block is not None:
        block = rule.block
    # Gate and up are cut by rows, down and the attention's output by columns. q, k and v are cut by heads.
    projection = module.name.rpartition(".")[2]
    if projection in _CUT_BY_COLUMNS:
        size, unit, what = columns, block[1], "columns"
    elif projection in _CUT_BY_ROWS:
        size, unit, what = rows, block[0], "rows"
    else:
        return
    wrong = [tp for tp in tp_sizes if size % tp or (tp > 1 and size // tp % unit)]
    if wrong:
        fits = ", ".join(str(tp) for tp in tp_sizes if tp not in wrong) or "none"
        value = f"{size} {what} in units of {unit}: not for TP {', '.join(map(str, wrong))} (fits: {fits})"
        findings.add("does_not_tile", module.name, shard, value)
