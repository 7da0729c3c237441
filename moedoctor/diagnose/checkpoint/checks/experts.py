"""Checks of which tensors are there: the index against the shards, and experts that are missing or extra."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

from moedoctor.diagnose.checkpoint.checkpoint import INDEX, Checkpoint
from moedoctor.diagnose.checkpoint.findings import Lint
from moedoctor.diagnose.checkpoint.modules import find_whole_number
from moedoctor.models.config import list_dense_layers, list_layer_kinds
from moedoctor.models.config_fields import ConfigError, Fields, find_text_config

_EXPERT_NUMBERS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_LAYER_NUMBERS = ("num_hidden_layers", "num_layers", "n_layers")
_ACTIVATIONS = ("mlp_hidden_act", "hidden_act", "hidden_activation")
_MOST_LAYERS = 10_000
_EXPERTS = "experts"
_FAMILIES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down, by the names that checkpoints use."""
_KNOWN = frozenset({"gate_up_proj", *(name for names in _FAMILIES for name in names)})
"""Every name of an expert's projection that a model of vLLM 0.21.0 or 0.33.0 reads."""
_ONE_EXPERT = re.compile(r".+\.experts\.\d{1,9}\.(.+)", re.ASCII)
_ALL_EXPERTS = re.compile(
    r".+\.experts\.(?!(?:(?:gate|up|down|gate_up)_proj|w13|w[123]|fc[12])"
    r"(?:[._](?:weight|bias|blocks|scales?|input|packed|global)\w*)?$)[A-Za-z]\w*(?:\.weight)?",
    re.ASCII,
)
"""A tensor of all experts with another name than those that vLLM reads."""
_OTHER_SIZES = re.compile(r"(?!.*(?:shared|latent))(?:moe|expert|ffn)\w*_(?:size|dim)", re.ASCII)
"""Fields that may hold the width of experts in place of ``intermediate_size``."""
_LAYER = re.compile(r"(?P<head>(?:[\w.]{0,200}?\.)?layers)\.(?P<number>\d{1,6})\.(?P<rest>.+)", re.ASCII)
_DIGITS = re.compile(r"\d+", re.ASCII)

Experts = dict[int, dict[str, str]]
"""Expert -> projection -> its kind."""


def check_index(checked: Lint) -> None:
    """Find differences between the index and the shards, and tensors that are there twice."""
    checkpoint, index = checked.checkpoint, checked.checkpoint.index
    named = Counter(checkpoint.weight_map.values())
    for shard in checkpoint.missing_shards:
        checked.add("shard_missing", f"{named[shard]} tensors", shard, "no such file")
    for shard in checkpoint.unlisted_shards:
        checked.add("index_disagrees", "all of its tensors", shard, "not named in the index")
    for name in index.repeated if index else ():
        checked.add("tensor_duplicated", name, INDEX, "twice in the index", index, name)
    for name, shards in checkpoint.duplicates.items():
        checked.add("tensor_duplicated", name, shards[0], f"also in {', '.join(shards[1:])}")
    if index is None:
        return
    missing = set(checkpoint.missing_shards)
    for name, shard in checkpoint.weight_map.items():
        info = checkpoint.tensors.get(name)
        if info is None and shard not in missing:
            checked.add("index_disagrees", name, shard, "in the index, in no shard", index, name)
        elif info is not None and info.shard != shard and shard not in checkpoint.duplicates.get(name, ()):
            checked.add("index_disagrees", name, info.shard, f"the index says {shard}", index, name)
    for name, info in checkpoint.tensors.items():
        if name not in checkpoint.weight_map:
            checked.add("index_disagrees", name, info.shard, "in the shard, not in the index")


def check_experts(checked: Lint) -> None:
    """Find experts and projections that are missing or extra, and layers with mixed quantization."""
    config = find_text_config(checked.checkpoint.config.value)
    layers: dict[str, Experts] = {}
    shards: dict[str, str] = {}
    expected = find_whole_number(config, *_EXPERT_NUMBERS)
    for module in checked.modules.values():
        name, weight = module.expert, module.weight
        if name is not None:
            if module.kind is not None:
                shards.setdefault(name.layer, next(iter(module.parts.values())).shard)
                layers.setdefault(name.layer, {}).setdefault(name.expert, {})[name.projection] = module.kind
        elif module.fused_experts and expected and weight is not None and len(weight.shape) == 3:
            count = weight.shape[0]
            if count != expected and "weight" in module.parts:
                check = "expert_extra" if count > expected else "expert_missing"
                value = f"{count} experts, {expected} in config.json"
                checked.add(check, module.name, weight.shard, value)
    projections = _list_expected_projections(layers, config)
    for layer, experts in layers.items():
        shard = shards[layer]
        count = expected or max(experts) + 1
        if extra := [expert for expert in experts if expert >= count]:
            checked.add("expert_extra", f"{layer}.{max(extra)}", shard, f"{count} experts in config.json")
        present = len(experts) - len(extra)
        if present < count:
            lacking = next(expert for expert in range(count) if expert not in experts)
            value = f"{count - present} of {count} missing"
            checked.add("expert_missing", f"{layer}.{lacking}", shard, value)
        for expert, kinds in experts.items():
            for projection in sorted(projections[layer] - kinds.keys()):
                checked.add("expert_missing", f"{layer}.{expert}.{projection}", shard, "no weight")
        _check_mixed(checked, layer, experts, shard)
    _check_expert_layers(checked, config)


def check_names(checked: Lint) -> None:
    """Find experts, one by one or all in one tensor, under names that no model of vLLM reads."""
    for module in checked.modules.values():
        if (
            module.kind is not None
            and (match := _ONE_EXPERT.fullmatch(module.name))
            and match[1] not in _KNOWN
        ):
            checked.add("expert_names_unknown", module.name, module.stored.shard, list(module.stored.shape))
        for part, info in module.parts.items():
            name = module.name_tensor(part)
            if len(info.shape) == 3 and _ALL_EXPERTS.fullmatch(name):
                checked.add("expert_names_unknown", name, info.shard, list(info.shape))


def check_config_shapes(checked: Lint) -> None:
    """Find experts whose matrices have another shape than config.json says."""
    config = find_text_config(checked.checkpoint.config.value)
    hidden = find_whole_number(config, "moe_latent_size", "hidden_size")
    named = [key for key, value in config.items() if value is not None and _OTHER_SIZES.fullmatch(key)]
    width = find_whole_number(config, "moe_intermediate_size" if named else "intermediate_size")
    if hidden is None or width is None or "block_configs" in config:
        return
    shapes = {"gate_up_proj": (2 * width, hidden)}
    for gate, up, down in _FAMILIES:
        shapes |= {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}
    for module in checked.modules.values():
        weight, projection = module.weight, module.name.rpartition(".")[2]
        expected = shapes.get(projection)
        if weight is None or expected is None or module.kind not in ("none", "fp8", "nvfp4"):
            continue
        fits, shape = [expected], module.shape
        if module.fused_experts and len(weight.shape) == 3:
            rows, columns = expected
            columns //= 2 if weight.dtype == "U8" else 1
            fits, shape = [(rows, columns), (columns, rows)], (weight.shape[1], weight.shape[2])
        elif module.expert is None:
            continue
        if shape is not None and shape not in fits:
            value = f"{list(shape)}, expected {list(fits[0])} by config.json"
            checked.add("config_shape_mismatch", module.name, weight.shard, value)


def _check_mixed(checked: Lint, layer: str, experts: Experts, shard: str) -> None:
    counts = Counter(kind for kinds in experts.values() for kind in kinds.values())
    if len(counts) < 2:
        return
    usual = counts.most_common(1)[0][0]
    for expert, kinds in sorted(experts.items()):
        for projection, kind in kinds.items():
            if kind != usual:
                value = f"{kind}, others {usual}"
                checked.add("experts_mixed", f"{layer}.{expert}.{projection}", shard, value)


def _list_expected_projections(
    layers: Mapping[str, Experts], config: Mapping[str, Any]
) -> dict[str, set[str]]:
    """Return the projections that each expert of a layer must have, by layer.

    These are all that any expert of the same stack of layers has, and up and down, and gate if the activation
    has one. Of unknown names only those that exist are expected.
    """
    stacks: dict[str, set[str]] = {}
    for layer, experts in layers.items():
        names = stacks.setdefault(_DIGITS.sub("#", layer), set())
        for kinds in experts.values():
            names.update(kinds)
    for names in stacks.values():
        for gate, up, down in _FAMILIES:
            # Another family, or gate and up in one tensor, do not need these three.
            if names >= {gate, up, down}:  # others are no parts that an expert must have
                names &= {gate, up, down}
            elif names and names <= {gate, up, down}:
                names |= {down} if _may_lack_gate(config) and len(names - {down}) == 1 else {gate, up, down}
    return {layer: stacks[_DIGITS.sub("#", layer)] for layer in layers}


def _may_lack_gate(config: Mapping[str, Any]) -> bool:
    """Return True if experts may have no gate: a squared ReLU is applied to up alone."""
    activation = next((config[key] for key in _ACTIVATIONS if isinstance(config.get(key), str)), "")
    return activation.startswith("relu") or str(config.get("model_type")).startswith("nemotron")


def _check_expert_layers(checked: Lint, config: Mapping[str, Any]) -> None:
    """Find layers without any tensor, and layers without the experts that they must have."""
    checkpoint = checked.checkpoint
    stacks = _group_layers(checkpoint)
    head = max(stacks, key=lambda head: sum(_EXPERTS in parts for parts in stacks[head].values()), default="")
    stack = stacks.get(head, {})
    with_experts = [parts for parts in stack.values() if _EXPERTS in parts]
    if not with_experts:
        _check_routers(checked, config, stacks)
        return
    numbers = [number for key in _LAYER_NUMBERS if (number := find_whole_number(config, key)) is not None]
    # Layers after these are for the prediction of several tokens; exporters keep them or leave them out.
    count = min(_MOST_LAYERS, min(numbers, default=max(stack) + 1))
    if min(stack) >= count:  # a draft model: only those layers
        return
    source = INDEX if checkpoint.index is not None else next(iter(checkpoint.tensors.values())).shard
    alike = set[str]().union(*with_experts)
    dense = _find_dense_layers(config)
    for layer in range(count):
        name, parts = f"{head}.{layer}", stack.get(layer)
        if parts is None:
            value = f"no tensor of this layer, {count} layers expected"
            checked.add("expert_missing", name, source, value)
        elif _EXPERTS in parts:
            continue
        elif routers := [part for part in sorted(parts) if _routes(checkpoint, config, name, part)]:
            router = f"{name}.{routers[0]}"
            shard = checkpoint.tensors[f"{router}.weight"].shard
            checked.add("expert_missing", router, shard, "a router and no experts")
        elif dense is not None and layer not in dense and parts <= alike:
            checked.add("expert_missing", name, source, "neither experts nor a dense layer in their place")


def _check_routers(
    checked: Lint, config: Mapping[str, Any], stacks: Mapping[str, Mapping[int, Set[str]]]
) -> None:
    """Find routers in a checkpoint that has nothing below ``experts``."""
    checkpoint = checked.checkpoint
    for head, stack in stacks.items():
        for layer, parts in stack.items():
            if any(part.endswith("input_linear") for part in parts):  # Granite's name for all experts
                continue
            for part in sorted(parts):
                name = f"{head}.{layer}.{part}"
                if _routes(checkpoint, config, f"{head}.{layer}", part):
                    shard = checkpoint.tensors[f"{name}.weight"].shard
                    checked.add("expert_names_unknown", name, shard, "a router, and nothing below experts")


def _group_layers(checkpoint: Checkpoint) -> dict[str, dict[int, set[str]]]:
    """Return name of a stack of layers -> layer -> its modules; all experts are one module.

    Names of the index count too: a missing shard has its own finding.
    """
    stacks: dict[str, dict[int, set[str]]] = {}
    for name in {**checkpoint.tensors, **checkpoint.weight_map}:
        if match := _LAYER.fullmatch(name):
            module = match["rest"].rpartition(".")[0]
            parts = stacks.setdefault(match["head"], {}).setdefault(int(match["number"]), set())
            parts.add(_EXPERTS if _EXPERTS in module.split(".") else module)
    return stacks


def _routes(checkpoint: Checkpoint, config: Mapping[str, Any], layer: str, module: str) -> bool:
    """Return True if a module is the router of experts: its weight has a row for each of them."""
    names = module.split(".")
    if "router" not in names and (names[-1] != "gate" or "attn" in module):
        return False
    info = checkpoint.tensors.get(f"{layer}.{module}.weight")
    return info is not None and info.shape[:1] == (find_whole_number(config, *_EXPERT_NUMBERS),)


def _find_dense_layers(config: Mapping[str, Any]) -> frozenset[int] | None:
    """Return the layers with a dense MLP by config.json, or None if that is not clear."""
    fields = Fields(config, "config.json")
    if "block_configs" in fields:  # each layer has its own parts
        return None
    try:
        kinds = list_layer_kinds(fields)
        dense = list_dense_layers(fields, kinds)
    except ConfigError:
        return None
    return None if {"mamba", "moe", "mlp"} & set(kinds) else frozenset(dense)
