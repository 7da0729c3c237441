"""Checks of what the JSON files declare, against each other and against the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from moedoctor.diagnose.checkpoint.checkpoint import Checkpoint
from moedoctor.diagnose.checkpoint.lint_layers import check_layers
from moedoctor.diagnose.checkpoint.lint_records import Findings
from moedoctor.diagnose.checkpoint.modules import KV_SCALES, Parts, is_projection, scheme
from moedoctor.diagnose.checkpoint.name_patterns import Patterns
from moedoctor.diagnose.checkpoint.quantization import ALGOS, METHODS, Declared
from moedoctor.diagnose.checkpoint.rules import UNCLEAR, Rule

_KEYS = ("k_proj", "qkv_proj", "kv_proj", "kv_a_proj_with_mqa", "query_key_value")


def check_algo(
    checkpoint: Checkpoint, modules: Mapping[str, Parts], declared: tuple[Declared, ...], found: Findings
) -> None:
    """Unknown, missing or contradicted `quant_algo` and `quant_method`."""
    seen = {kind for kind in map(scheme, modules.values()) if kind is not None and kind != "none"}
    if not declared and seen:
        found.add("quant_algo_missing", ", ".join(sorted(seen)), "config.json", "no quantization_config")
    for one in declared:
        name, line = one.file.name, one.file.line_of("quant_algo")
        if one.method is None or one.method not in METHODS:
            found.add(
                "quant_algo_unknown",
                "quant_method",
                name,
                one.method,
                one.file.line_of("quant_method") or line,
            )
        elif one.method.startswith("modelopt") and (one.algo is None or one.algo not in ALGOS):
            check = "quant_algo_missing" if one.algo is None else "quant_algo_unknown"
            found.add(check, "quant_algo", name, one.algo, line)
        elif _unknown_groups(one):
            place = "config_groups"
            found.add("quant_algo_unknown", place, name, one.algo, one.file.line_of(place))
        elif not one.judged:
            continue
        elif one.scheme in ("nvfp4", "fp8") and one.scheme not in seen:
            found.add(
                "quant_algo_tensors", f"{one.scheme} declared", name, f"tensors are {_names(seen)}", line
            )
        elif one.scheme in ("nvfp4", "fp8", "mixed"):
            check_layers(modules, one, found)


def _unknown_groups(one: Declared) -> bool:
    """Whether `config_groups` is what says how modules are quantised, and says nothing that is known."""
    if one.method != "compressed-tensors" and (one.scheme != "mixed" or one.rules.layers is not None):
        return False
    return not one.rules.groups or any(rule.scheme is None for rule in one.rules.groups)


def _names(seen: set[str]) -> str:
    return ", ".join(sorted(seen)) or "not quantised"


def check_agreement(config: Declared | None, hf_quant: Declared | None, found: Findings) -> None:
    """hf_quant_config.json against config.json."""
    if config is None or hf_quant is None:
        return
    for key, here, there in (
        ("quant_algo", config.algo, hf_quant.algo),
        ("kv_cache_quant_algo", config.kv, hf_quant.kv),
        ("group_size", config.group_size, hf_quant.group_size),
    ):
        if here != there and not (key == "group_size" and None in (here, there)):
            value = f"{there} in hf_quant_config.json, {here} in config.json"
            found.add("config_disagrees", key, hf_quant.file.name, value, hf_quant.file.line_of(key))
    _check_layers_agree(config, hf_quant, found)
    ours, theirs = frozenset(config.excluded), frozenset(hf_quant.excluded)
    for name in sorted(ours ^ theirs):
        only = config if name in ours else hf_quant
        line = partial(only.file.line_of, only.exclude_key)
        found.add("config_disagrees", name, only.file.name, f"excluded in {only.file.name} only", line)


def _check_layers_agree(config: Declared, hf_quant: Declared, found: Findings) -> None:
    here, there = config.rules.layers, hf_quant.rules.layers
    if here is None or there is None:
        return
    line = partial(hf_quant.file.line_of, "quantized_layers")
    for module in sorted(here.keys() | there.keys()):
        ours, theirs = here.get(module), there.get(module)
        if ours != theirs:
            value = f"{_said(theirs)} in hf_quant_config.json, {_said(ours)} in config.json"
            found.add("config_disagrees", module, hf_quant.file.name, value, line)


def _said(rule: Rule | None) -> str:
    if rule is None:
        return "not listed"
    size = f" in groups of {rule.group_size}" if rule.group_size is not None else ""
    return f"{rule.name}{size}"


def check_excluded(modules: Mapping[str, Parts], declared: Declared, found: Findings) -> tuple[str, ...]:
    """Excluded modules that are quantised and the reverse; the patterns that were not understood."""
    patterns = Patterns(declared.excluded, substrings=declared.method != "compressed-tensors")
    if patterns.not_read or not declared.judged:
        return tuple(patterns.not_read)
    line = partial(declared.file.line_of, declared.exclude_key)
    for module, parts in modules.items():
        kind = scheme(parts)
        if kind is None:
            continue
        weight = parts.get("weight_packed") or parts.get("weight") or parts["qweight"]
        excluded = patterns.match(module)
        if excluded and kind != "none":
            found.add(
                "excluded_quantised", module, weight.shard, f"{weight.dtype} {list(weight.shape)}", line
            )
        elif kind == "none" and not excluded and is_projection(module) and len(weight.shape) == 2:
            if declared.rules.of(module) in (None, UNCLEAR):
                continue
            found.add("unquantised_not_excluded", module, weight.shard, weight.dtype, line)
    return ()


def check_kv(modules: Mapping[str, Parts], declared: tuple[Declared, ...], found: Findings) -> None:
    """MD012: an FP8 KV cache without the scales for it, layer by layer."""
    asking = next((one for one in declared if one.kv == "FP8"), None)
    if asking is None:
        return
    scaled: dict[str, set[str]] = {}
    attention: dict[str, str] = {}
    for module, parts in modules.items():
        head, _, last = module.rpartition(".")
        if last in _KEYS and (weight := parts.get("weight") or parts.get("weight_packed")):
            attention[head] = weight.shard
        for part in KV_SCALES & parts.keys():
            # k_scale may stand at k_proj, at the attention module or at an `attn` below it.
            for owner in (module, head):
                scaled.setdefault(owner, set()).add(part)
    key = "kv_cache_quant_algo" if asking.file.line_of("kv_cache_quant_algo") else "kv_cache_scheme"
    for head, shard in sorted(attention.items()):
        has = scaled.get(head, set())
        if "kv_scale" in has or has >= {"k_scale", "v_scale"}:
            continue
        lacking = ", ".join(sorted({"k_scale", "v_scale"} - has))
        found.add("kv_scales_missing", head, shard, f"no {lacking}", partial(asking.file.line_of, key))
