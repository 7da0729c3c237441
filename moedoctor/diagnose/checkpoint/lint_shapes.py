"""Checks of the shapes of experts and quantised layers: whether they divide for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from moedoctor.diagnose.checkpoint.checkpoint import Checkpoint
from moedoctor.diagnose.checkpoint.lint_records import Findings
from moedoctor.diagnose.checkpoint.modules import (
    BLOCK,
    PAIRS,
    Parts,
    expert_name,
    scheme,
    shape_of,
    text_config,
    whole_number,
)
from moedoctor.diagnose.checkpoint.quantization import Declared

TP_SIZES = tuple(range(1, 9))
_USUAL = (1, 2, 4, 8)
_DOWN = ("down_proj", "w2", "o_proj")
_UP = ("up_proj", "w3")


def check_shapes(
    checkpoint: Checkpoint, modules: Mapping[str, Parts], declared: Declared | None, found: Findings
) -> None:
    """Halves of different shapes, and sizes that do not divide for a TP that the attention heads allow.

    A size that the heads forbid is none that the layers could be asked for.
    """
    config = text_config(checkpoint.config.value)
    heads = whole_number(config, "num_attention_heads")
    sizes = [one for one in TP_SIZES if (heads % one == 0 if heads else one in _USUAL)]
    seen: set[tuple[str, str, tuple[int, int]]] = set()
    for module, parts in modules.items():
        name, shape, kind = expert_name(module), shape_of(parts), scheme(parts)
        if shape is None or kind is None or (name is None and kind == "none"):
            continue
        head, _, projection = module.rpartition(".")
        weight = parts.get("weight_packed") or parts["weight"]
        if projection in PAIRS:
            up = modules.get(f"{head}.{PAIRS[projection]}")
            if up is not None and shape_of(up) not in (None, shape):
                found.add("shape_mismatch", module, weight.shard, f"{list(shape)}, up is {shape_of(up)}")
        key = (projection, kind, shape)
        if key in seen:
            continue
        seen.add(key)
        _check_size(module, weight.shard, projection, kind, shape, declared, sizes, found)


def _check_size(
    module: str,
    shard: str,
    projection: str,
    kind: str,
    shape: tuple[int, int],
    declared: Declared | None,
    sizes: list[int],
    found: Findings,
) -> None:
    rows, columns = shape
    if kind == "nvfp4" and columns % BLOCK:
        found.add("block_incomplete", module, shard, f"{columns} columns are no multiple of {BLOCK}")
        return
    row_unit, column_unit = _units(module, kind, declared)
    # Gate and up are cut by rows, down and the attention's output by columns. q, k and v are cut by heads.
    if projection in _DOWN:
        size, unit, what = columns, column_unit, "columns"
    elif projection in PAIRS or projection in _UP:
        size, unit, what = rows, row_unit, "rows"
    else:
        return
    wrong = [one for one in sizes if size % one or (one > 1 and size // one % unit)]
    if wrong:
        fits = ", ".join(str(one) for one in sizes if one not in wrong) or "none"
        value = f"{size} {what} in units of {unit}: not for TP {', '.join(map(str, wrong))} (fits: {fits})"
        found.add("does_not_tile", module, shard, value)


def _units(module: str, kind: str, declared: Declared | None) -> tuple[int, int]:
    """Rows and columns that share a scale and must stay together."""
    if kind == "nvfp4":
        return 1, BLOCK
    rule = declared.rules.of(module) if kind == "fp8" and declared is not None else None
    if rule is not None and rule.block is not None:
        return rule.block
    return 1, 1
