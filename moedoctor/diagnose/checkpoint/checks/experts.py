"""Checks of which tensors are there: the index against the shards, and experts that are missing or extra."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moedoctor.diagnose.checkpoint.checkpoint import INDEX, Checkpoint
from moedoctor.diagnose.checkpoint.findings import Findings, Inspection
from moedoctor.diagnose.checkpoint.modules import whole_number
from moedoctor.models.config import dense_layers, layer_kinds
from moedoctor.models.config_fields import ConfigError, Fields, text_config

_EXPERT_NUMBERS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_LAYER_NUMBERS = ("num_hidden_layers", "num_layers", "n_layers")
_ACTIVATIONS = ("mlp_hidden_act", "hidden_act", "hidden_activation")
_MOST_LAYERS = 10_000
_FAMILIES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down, by the names that checkpoints use."""
_LAYER = re.compile(r"(?P<head>(?:[\w.]{0,200}?\.)?layers)\.(?P<number>\d{1,6})\.(?P<rest>.+)", re.ASCII)
_DIGITS = re.compile(r"\d+", re.ASCII)

Experts = dict[int, dict[str, str]]
"""Expert -> projection -> its kind."""


def check_index(checked: Inspection) -> None:
    """Find differences between the index and the shards, and tensors that are there twice."""
    checkpoint, findings = checked.checkpoint, checked.findings
    named = Counter(checkpoint.weight_map.values())
    for shard in checkpoint.missing_shards:
        findings.add("shard_missing", f"{named[shard]} tensors", shard, "no such file")
    for shard in checkpoint.unlisted_shards:
        findings.add("index_disagrees", "all of its tensors", shard, "not named in the index")
    for name in checkpoint.index.repeated if checkpoint.index else ():
        line = partial(checkpoint.index.line_of, name) if checkpoint.index else None
        findings.add("tensor_duplicated", name, INDEX, "twice in the index", line)
    for name, shards in checkpoint.duplicates.items():
        findings.add("tensor_duplicated", name, shards[0], f"also in {', '.join(shards[1:])}")
    if checkpoint.index is None:
        return
    missing = set(checkpoint.missing_shards)
    for name, shard in checkpoint.weight_map.items():
        info, line = checkpoint.tensors.get(name), partial(checkpoint.index.line_of, name)
        if info is None and shard not in missing:
            findings.add("index_disagrees", name, shard, "in the index, in no shard", line)
        elif info is not None and info.shard != shard and shard not in checkpoint.duplicates.get(name, ()):
            findings.add("index_disagrees", name, info.shard, f"the index says {shard}", line)
    for name, info in checkpoint.tensors.items():
        if name not in checkpoint.weight_map:
            findings.add("index_disagrees", name, info.shard, "in the shard, not in the index")


def check_experts(checked: Inspection) -> None:
    """Find experts and projections that are missing or extra, and layers with mixed quantisation."""
    config, findings = text_config(checked.checkpoint.config.value), checked.findings
    layers: dict[str, Experts] = {}
    shards: dict[str, str] = {}
    expected = whole_number(config, *_EXPERT_NUMBERS)
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
                findings.add(check, module.name, weight.shard, value)
    projections = _expected_projections(layers, config)
    for layer, experts in layers.items():
        shard = shards[layer]
        count = expected or max(experts) + 1
        if extra := [expert for expert in experts if expert >= count]:
            findings.add("expert_extra", f"{layer}.{max(extra)}", shard, f"{count} experts in config.json")
        present = len(experts) - len(extra)
        if present < count:
            lacking = next(expert for expert in range(count) if expert not in experts)
            value = f"{count - present} of {count} missing"
            findings.add("expert_missing", f"{layer}.{lacking}", shard, value)
        for expert, kinds in experts.items():
            for projection in sorted(projections[layer] - kinds.keys()):
                findings.add("expert_missing", f"{layer}.{expert}.{projection}", shard, "no weight")
        _check_mixed(layer, experts, shard, findings)
    _check_expert_layers(checked.checkpoint, config, findings)


def _check_mixed(layer: str, experts: Experts, shard: str, findings: Findings) -> None:
    counts = Counter(kind for kinds in experts.values() for kind in kinds.values())
    if len(counts) < 2:
        return
    usual = counts.most_common(1)[0][0]
    for expert, kinds in sorted(experts.items()):
        for projection, kind in kinds.items():
            if kind != usual:
                value = f"{kind}, others {usual}"
                findings.add("experts_mixed", f"{layer}.{expert}.{projection}", shard, value)


def _expected_projections(layers: Mapping[str, Experts], config: Mapping[str, Any]) -> dict[str, set[str]]:
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
            if names and names <= {gate, up, down}:
                names |= {down} if _ungated(config) and len(names - {down}) == 1 else {gate, up, down}
    return {layer: stacks[_DIGITS.sub("#", layer)] for layer in layers}


def _ungated(config: Mapping[str, Any]) -> bool:
    """Return whether experts may have no gate: a squared ReLU is applied to up alone."""
    activation = next((config[key] for key in _ACTIVATIONS if isinstance(config.get(key), str)), "")
    return activation.startswith("relu") or str(config.get("model_type")).startswith("nemotron")


@dataclass
class _Stack:
    """The layers under one name, ``model.layers``."""

    parts: dict[int, set[str]] = field(default_factory=dict)
    """Layer -> its modules outside its experts."""
    experts: set[int] = field(default_factory=set)
    """Layers that have experts."""


def _check_expert_layers(checkpoint: Checkpoint, config: Mapping[str, Any], findings: Findings) -> None:
    """Find layers without any tensor, and layers without the experts that they must have."""
    stacks = _stacks(checkpoint)
    if not stacks:
        return
    head, stack = max(stacks.items(), key=lambda item: len(item[1].experts))
    if not stack.experts:
        return
    numbers = [number for key in _LAYER_NUMBERS if (number := whole_number(config, key)) is not None]
    # Layers after these are for the prediction of several tokens; exporters keep them or leave them out.
    count = min(_MOST_LAYERS, min(numbers, default=max(stack.parts) + 1))
    if min(stack.parts) >= count:  # a draft model: only those layers
        return
    source = INDEX if checkpoint.index is not None else next(iter(checkpoint.tensors.values())).shard
    alike = {part for layer in stack.experts for part in stack.parts[layer]}
    dense = _dense(config)
    for layer in range(count):
        name, parts = f"{head}.{layer}", stack.parts.get(layer)
        if parts is None:
            value = f"no tensor of this layer, {count} layers expected"
            findings.add("expert_missing", name, source, value)
        elif layer in stack.experts:
            continue
        elif routers := [part for part in sorted(parts) if _routes(checkpoint, config, name, part)]:
            router = f"{name}.{routers[0]}"
            shard = checkpoint.tensors[f"{router}.weight"].shard
            findings.add("expert_missing", router, shard, "a router and no experts")
        elif dense is not None and layer not in dense and parts <= alike:
            findings.add("expert_missing", name, source, "neither experts nor a dense layer in their place")


def _stacks(checkpoint: Checkpoint) -> dict[str, _Stack]:
    """Return the stacks of layers by name, also by the index: a missing shard has its own finding."""
    stacks: dict[str, _Stack] = {}
    for name in {**checkpoint.tensors, **checkpoint.weight_map}:
        match = _LAYER.fullmatch(name)
        if match is None:
            continue
        stack, layer = stacks.setdefault(match["head"], _Stack()), int(match["number"])
        module = match["rest"].rpartition(".")[0]
        parts = stack.parts.setdefault(layer, set())
        if "experts" in module.split("."):
            stack.experts.add(layer)
        else:
            parts.add(module)
    return stacks


def _routes(checkpoint: Checkpoint, config: Mapping[str, Any], layer: str, module: str) -> bool:
    """Return whether a module is the router of experts: its weight has a row for each of them."""
    names = module.split(".")
    if "router" not in names and (names[-1] != "gate" or "attn" in module):
        return False
    info = checkpoint.tensors.get(f"{layer}.{module}.weight")
    return info is not None and info.shape[:1] == (whole_number(config, *_EXPERT_NUMBERS),)


def _dense(config: Mapping[str, Any]) -> frozenset[int] | None:
    """Return the layers with a dense MLP by config.json, or None if that is not clear."""
    fields = Fields(config, "config.json")
    if "block_configs" in fields:  # each layer has its own parts
        return None
    try:
        kinds = layer_kinds(fields)
        dense = dense_layers(fields, kinds)
    except ConfigError:
        return None
    return None if {"mamba", "moe", "mlp"} & set(kinds) else frozenset(dense)
