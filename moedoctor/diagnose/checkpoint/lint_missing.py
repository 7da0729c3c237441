"""What experts a checkpoint must have: which projections, and in which layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moedoctor.diagnose.checkpoint.checkpoint import INDEX, Checkpoint
from moedoctor.diagnose.checkpoint.lint_records import Findings
from moedoctor.diagnose.checkpoint.modules import whole_number
from moedoctor.models.config import dense_layers, layer_kinds
from moedoctor.models.config_fields import ConfigError, Fields

EXPERT_NUMBERS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers")
_MOST_LAYERS = 10_000
_FAMILIES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down, by the names that checkpoints use."""
_LAYER = re.compile(r"(?P<head>(?:[\w.]{0,200}?\.)?layers)\.(?P<number>\d{1,6})\.(?P<rest>.+)", re.ASCII)
_DIGITS = re.compile(r"\d+", re.ASCII)
_ACTIVATIONS = ("mlp_hidden_act", "hidden_act", "hidden_activation")


def expected_projections(
    layers: Mapping[str, Mapping[int, Mapping[str, str]]], config: Mapping[str, Any]
) -> dict[str, set[str]]:
    """Layer -> the projections that each of its experts must have.

    All that an expert of the same stack of layers has, and what a multilayer perceptron cannot do without:
    up and down, and gate where the activation has one. Names that are not known stand for themselves.
    """
    stacks: dict[str, set[str]] = {}
    for layer, experts in layers.items():
        its = stacks.setdefault(_DIGITS.sub("#", layer), set())
        for projections in experts.values():
            its.update(projections)
    for its in stacks.values():
        for gate, up, down in _FAMILIES:
            # Names of another family, or gate and up in one tensor, say nothing of these three.
            if its and its <= {gate, up, down}:
                its |= {down} if _ungated(config) and len(its - {down}) == 1 else {gate, up, down}
    return {layer: stacks[_DIGITS.sub("#", layer)] for layer in layers}


def _ungated(config: Mapping[str, Any]) -> bool:
    """Whether experts may have no gate: a squared ReLU is applied to up alone."""
    named = next((config[one] for one in _ACTIVATIONS if isinstance(config.get(one), str)), "")
    return named.startswith("relu") or str(config.get("model_type")).startswith("nemotron")


@dataclass
class _Stack:
    """The layers that stand under one name, ``model.layers``."""

    parts: dict[int, set[str]] = field(default_factory=dict)
    """Layer -> its modules outside its experts."""
    experts: set[int] = field(default_factory=set)
    """Layers that have experts."""


def check_expert_layers(checkpoint: Checkpoint, config: Mapping[str, Any], found: Findings) -> None:
    """Layers of which nothing is there, and layers without the experts that they must have."""
    stacks = _stacks(checkpoint)
    if not stacks:
        return
    head, stack = max(stacks.items(), key=lambda one: len(one[1].experts))
    if not stack.experts:
        return
    numbers = [one for key in _LAYERS if (one := whole_number(config, key)) is not None]
    # Layers after these are for the prediction of several tokens; exporters keep them or leave them out.
    count = min(_MOST_LAYERS, min(numbers, default=max(stack.parts) + 1))
    if min(stack.parts) >= count:  # a draft model: nothing but those layers
        return
    source = INDEX if checkpoint.index is not None else next(iter(checkpoint.tensors.values())).shard
    alike = {part for layer in stack.experts for part in stack.parts[layer]}
    dense = _dense(config)
    for layer in range(count):
        name, parts = f"{head}.{layer}", stack.parts.get(layer)
        if parts is None:
            found.add("expert_missing", name, source, f"no tensor of this layer, {count} layers expected")
        elif layer in stack.experts:
            continue
        elif router := next((one for one in sorted(parts) if _routes(checkpoint, config, name, one)), None):
            info = checkpoint.tensors[f"{name}.{router}.weight"]
            found.add("expert_missing", f"{name}.{router}", info.shard, "a router and no experts")
        elif dense is not None and layer not in dense and parts <= alike:
            found.add("expert_missing", name, source, "neither experts nor a dense layer in their place")


def _stacks(checkpoint: Checkpoint) -> dict[str, _Stack]:
    """By the index too: a shard that is missing has its own finding."""
    stacks: dict[str, _Stack] = {}
    for name in {**checkpoint.tensors, **checkpoint.weight_map}:
        named = _LAYER.fullmatch(name)
        if named is None:
            continue
        stack, layer = stacks.setdefault(named["head"], _Stack()), int(named["number"])
        module = named["rest"].rpartition(".")[0]
        parts = stack.parts.setdefault(layer, set())
        if "experts" in module.split("."):
            stack.experts.add(layer)
        else:
            parts.add(module)
    return stacks


def _routes(checkpoint: Checkpoint, config: Mapping[str, Any], layer: str, module: str) -> bool:
    """Whether a module of a layer is the router of experts: a row of its weight for each of them."""
    names = module.split(".")
    if "router" not in names and (names[-1] != "gate" or "attn" in module):
        return False
    info = checkpoint.tensors.get(f"{layer}.{module}.weight")
    return info is not None and info.shape[:1] == (whole_number(config, *EXPERT_NUMBERS),)


def _dense(config: Mapping[str, Any]) -> frozenset[int] | None:
    """Layers that config.json gives a dense MLP; None where that is not clear, or layers differ more."""
    fields = Fields(config, "config.json")
    if "block_configs" in fields:  # each layer has its own parts
        return None
    try:
        kinds = layer_kinds(fields)
        dense = dense_layers(fields, kinds)
    except ConfigError:
        return None
    return None if {"mamba", "moe", "mlp"} & set(kinds) else frozenset(dense)
