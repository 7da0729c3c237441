"""Checks of what the JSON files declare, against each other and against the tensors."""

from __future__ import annotations

from moedoctor.diagnose.checkpoint.findings import Lint
from moedoctor.diagnose.checkpoint.modules import BLOCK, KV_SCALES
from moedoctor.diagnose.checkpoint.quantization import ALGOS, METHODS, UNCLEAR, Declared, Rule

_ATTENTION = ("k_proj", "qkv_proj", "kv_proj", "kv_a_proj_with_mqa", "query_key_value")
_COMPARED = ("nvfp4", "fp8")


def check_algo(checked: Lint) -> None:
    """Find an unknown, missing or contradicted `quant_algo` or `quant_method`."""
    kinds = {module.kind for module in checked.modules.values()} - {None, "none"}
    shown = ", ".join(sorted(map(str, kinds)))
    if not checked.declared and kinds:
        checked.add("quant_algo_missing", shown, "config.json", "no quantization_config")
    for declared in checked.declared:
        file, scheme = declared.file, declared.scheme
        if declared.method is None or declared.method not in METHODS:
            key = "quant_method" if file.find_line("quant_method") else "quant_algo"
            checked.add("quant_algo_unknown", "quant_method", file.name, declared.method, file, key)
        elif declared.method.startswith("modelopt") and (declared.algo is None or declared.algo not in ALGOS):
            check = "quant_algo_missing" if declared.algo is None else "quant_algo_unknown"
            checked.add(check, "quant_algo", file.name, declared.algo, file, "quant_algo")
        elif _has_unknown_groups(declared):
            key = "config_groups"
            checked.add("quant_algo_unknown", key, file.name, declared.algo, file, key)
        elif not declared.judged:
            continue
        elif scheme in _COMPARED and scheme not in kinds:
            value = f"tensors are {shown or 'not quantized'}"
            checked.add("quant_algo_tensors", f"{scheme} declared", file.name, value, file, "quant_algo")
        elif scheme in (*_COMPARED, "mixed"):
            _check_layers(checked, declared)


def _has_unknown_groups(declared: Declared) -> bool:
    """Return True if `config_groups` decides how modules are quantized and has no known scheme."""
    if declared.method != "compressed-tensors" and (
        declared.scheme != "mixed" or declared.rules.layers is not None
    ):
        return False
    groups = declared.rules.groups
    return not groups or any(rule.scheme is None for rule in groups)


def _check_layers(checked: Lint, declared: Declared) -> None:
    """Find modules that are quantized in another way than declared, and lists that leave modules out."""
    layers, file = declared.rules.layers, declared.file
    key = "quant_algo" if layers is None else "quantized_layers"
    if layers is not None and not layers:
        checked.add("quant_algo_missing", key, file.name, f"{declared.algo} without a list", file, key)
        return
    for name, rule in (layers or {}).items():
        if rule.scheme is None:
            check = "quant_algo_missing" if rule.name is None else "quant_algo_unknown"
            checked.add(check, name, file.name, rule.name, file, key)
    excluded = declared.excluded_patterns
    for module in checked.modules.values():
        if module.kind is None:
            continue
        wrong = None
        if module.kind == "none":
            # The targets of a group may name more than is quantized; the list of excluded modules decides.
            listed = (layers or {}).get(module.name)
            if listed is not None and listed.scheme in _COMPARED:
                wrong = f"not quantized, declared {listed.name}"
        else:
            module_rule = declared.rules.find(module.name)
            # Excluded modules that are quantized have their own check.
            if module_rule is not None or not excluded.match(module.name):
                wrong = _describe_difference(module.kind, module_rule, layers is not None)
        if wrong is not None:
            checked.add("quant_algo_tensors", module.name, module.stored.shard, wrong, file, key)


def _describe_difference(kind: str, rule: Rule | None, listed: bool) -> str | None:
    """Return how a quantized module differs from its rule, or None if it does not."""
    if rule is None:
        return f"{kind}, not in quantized_layers" if listed else f"{kind}, a target of no group"
    if rule.scheme not in _COMPARED or rule.scheme == kind:
        return None
    return f"{kind}, declared {rule.scheme}"


def check_group_size(checked: Lint) -> None:
    """Find a declared `group_size` that is not the number of weights that share a block scale.

    The first file with one counts. Another size in the second file is a disagreement of the two.
    """
    reported: set[tuple[str, int]] = set()
    judged = [declared for declared in checked.declared if declared.judged]
    for module in checked.modules.values():
        block = module.block
        if block is None:
            continue
        rules = ((declared.file, declared.rules.find(module.name)) for declared in judged)
        sizes = ((file, rule.group_size) for file, rule in rules if rule is not None and rule.group_size)
        file, size = next(sizes, (None, BLOCK))
        # A damaged tensor of scales does not make a right declaration wrong.
        if file is None or size in (block, BLOCK) or (file.name, size) in reported:
            continue
        reported.add((file.name, size))
        value = f"{size}, but {module.name} has a scale for each {block:g} weights"
        checked.add("group_size_tensors", "group_size", file.name, value, file, "group_size")


def check_agreement(checked: Lint) -> None:
    """Find differences between hf_quant_config.json and config.json."""
    config, hf_quant = checked.config, checked.hf_quant
    if config is None or hf_quant is None:
        return

    def disagree(what: str, here: object, there: object, key: str) -> None:
        value = f"{there} in hf_quant_config.json, {here} in config.json"
        checked.add("config_disagrees", what, hf_quant.file.name, value, hf_quant.file, key)

    for key, here, there in (
        ("quant_algo", config.algo, hf_quant.algo),
        ("kv_cache_quant_algo", config.kv, hf_quant.kv),
        ("group_size", config.group_size, hf_quant.group_size),
    ):
        if here != there and not (key == "group_size" and None in (here, there)):
            disagree(key, here, there, key)
    ours, theirs = config.rules.layers, hf_quant.rules.layers
    if ours is not None and theirs is not None:
        for module in sorted(ours.keys() | theirs.keys()):
            if ours.get(module) != theirs.get(module):
                disagree(module, _show(ours.get(module)), _show(theirs.get(module)), "quantized_layers")
    excluded = frozenset(config.excluded)
    for name in sorted(excluded ^ frozenset(hf_quant.excluded)):
        only = config if name in excluded else hf_quant
        value = f"excluded in {only.file.name} only"
        checked.add("config_disagrees", name, only.file.name, value, only.file, only.exclude_key)


def _show(rule: Rule | None) -> str:
    if rule is None:
        return "not listed"
    return f"{rule.name}{'' if rule.group_size is None else f' in groups of {rule.group_size}'}"


def check_excluded(checked: Lint) -> None:
    """Find excluded modules that are quantized, and the reverse."""
    if not checked.declared:
        return
    declared = checked.declared[0]
    patterns, file, key = declared.excluded_patterns, declared.file, declared.exclude_key
    if patterns.not_read or not declared.judged:
        return
    for module in checked.modules.values():
        if module.kind is None:
            continue
        weight, name = module.stored, module.name
        excluded = patterns.match(name)
        if excluded and module.kind != "none":
            value = f"{weight.dtype} {list(weight.shape)}"
            checked.add("excluded_quantised", name, weight.shard, value, file, key)
        elif (
            module.kind == "none"
            and not excluded
            and module.is_projection
            and len(weight.shape) == 2
            and declared.rules.find(name) not in (None, UNCLEAR)
        ):
            checked.add("unquantised_not_excluded", name, weight.shard, weight.dtype, file, key)


def check_kv(checked: Lint) -> None:
    """MD012: find attention layers without the scales that a declared FP8 KV cache needs."""
    declared = next((declared for declared in checked.declared if declared.kv == "FP8"), None)
    if declared is None:
        return
    scaled: dict[str, set[str]] = {}
    attention: dict[str, str] = {}
    for name, module in checked.modules.items():
        head, _, last = name.rpartition(".")
        if last in _ATTENTION and module.weight is not None:
            attention[head] = module.weight.shard
        for part in KV_SCALES & module.parts.keys():
            # k_scale may be at k_proj, at the attention module or at an `attn` below it.
            for owner in (name, head):
                scaled.setdefault(owner, set()).add(part)
    key = "kv_cache_quant_algo" if declared.file.find_line("kv_cache_quant_algo") else "kv_cache_scheme"
    for head, shard in sorted(attention.items()):
        scales = scaled.get(head, set())
        if "kv_scale" not in scales and not scales >= {"k_scale", "v_scale"}:
            lacking = ", ".join(sorted({"k_scale", "v_scale"} - scales))
            checked.add("kv_scales_missing", head, shard, f"no {lacking}", declared.file, key)
