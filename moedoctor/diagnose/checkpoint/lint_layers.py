"""Checks of each module's tensors against what the JSON files say of just this module."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from moedoctor.diagnose.checkpoint.lint_records import Findings
from moedoctor.diagnose.checkpoint.modules import BLOCK, Parts, block_of, scheme
from moedoctor.diagnose.checkpoint.name_patterns import Patterns
from moedoctor.diagnose.checkpoint.quantization import Declared
from moedoctor.diagnose.checkpoint.rules import UNCLEAR, Rule

_COMPARED = ("nvfp4", "fp8")


def check_layers(modules: Mapping[str, Parts], one: Declared, found: Findings) -> None:
    """Modules that are quantised otherwise than declared, and lists of modules that leave some out."""
    layers, file = one.rules.layers, one.file.name
    line = partial(one.file.line_of, "quant_algo" if layers is None else "quantized_layers")
    if layers is not None and not layers:
        found.add("quant_algo_missing", "quantized_layers", file, f"{one.algo} without a list", line)
        return
    for module, rule in (layers or {}).items():
        if rule.scheme is None:
            check = "quant_algo_missing" if rule.name is None else "quant_algo_unknown"
            found.add(check, module, file, rule.name, line)
    excluded = Patterns(one.excluded, substrings=one.method != "compressed-tensors")
    for module, parts in modules.items():
        kind = scheme(parts)
        if kind is None:
            continue
        shard = (parts.get("weight_packed") or parts.get("weight") or parts["qweight"]).shard
        if kind == "none":
            # The targets of a group may name more than is quantised; the list of excluded modules says which.
            said = (layers or {}).get(module)
            if said is not None and said.scheme in _COMPARED:
                found.add("quant_algo_tensors", module, shard, f"not quantised, declared {said.name}", line)
            continue
        value = _wrong(kind, one.rules.of(module), layers is not None)
        # What is excluded and quantised has its own check.
        if value is not None and (one.rules.of(module) is not None or not excluded.match(module)):
            found.add("quant_algo_tensors", module, shard, value, line)


def _wrong(kind: str, rule: Rule | None, listed: bool) -> str | None:
    """What is wrong with a quantised module of scheme `kind`; None where nothing is."""
    if rule is None:
        return f"{kind}, not in quantized_layers" if listed else f"{kind}, a target of no group"
    if rule is UNCLEAR or rule.scheme not in _COMPARED or rule.scheme == kind:
        return None
    return f"{kind}, declared {rule.scheme}"


def check_group_size(modules: Mapping[str, Parts], declared: tuple[Declared, ...], found: Findings) -> None:
    """A declared `group_size` that is not the number of weights that share a block scale.

    The first file that says one counts; another in the second is a disagreement of the two.
    """
    named: set[tuple[str, int]] = set()
    for module, parts in modules.items():
        block = block_of(parts) if scheme(parts) == "nvfp4" else None
        if block is None:
            continue
        said = ((one.file, one.rules.of(module)) for one in declared if one.judged)
        file, size = next(
            ((file, rule.group_size) for file, rule in said if rule is not None and rule.group_size),
            (None, BLOCK),
        )
        # A tensor of scales that was damaged makes no right declaration wrong.
        if file is None or size in (block, BLOCK) or (file.name, size) in named:
            continue
        named.add((file.name, size))
        value = f"{size}, but {module} has a scale for each {block:g} weights"
        found.add("group_size_tensors", "group_size", file.name, value, partial(file.line_of, "group_size"))
