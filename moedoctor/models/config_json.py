"""A ``config.json`` of Hugging Face's layout -> a `ModelShape`, or an error that names the missing field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moedoctor.models.attention import attention_layers
from moedoctor.models.config_fields import ConfigError, Fields
from moedoctor.models.layer_kinds import dense_layers, expert_layers, layer_kinds
from moedoctor.models.layer_shape import LayerShape
from moedoctor.models.recurrent import gated_delta_layers, mamba2_layers
from moedoctor.models.shape import ExpertLayers, ModelShape, RecurrentLayers

_LARGEST_FILE = 4 << 20


def read_config(path: Path, name: str | None = None) -> ModelShape:
    """The shape of the model whose ``config.json`` is `path`. Raises ConfigError, OSError."""
    if path.stat().st_size > _LARGEST_FILE:
        raise ConfigError(f"{path}: larger than {_LARGEST_FILE >> 20} MiB, expected a model's config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected an object with the model's fields")
    return shape_of(values, name or path.parent.resolve().name, str(path))


def shape_of(values: Mapping[str, Any], name: str, source: str) -> ModelShape:
    """The shape that the fields `values` of a config describe. Raises ConfigError."""
    outer = Fields(values, source)
    config = _text_part(outer)
    kinds = layer_kinds(config)
    hidden = config.integer("hidden_size")
    experts = _experts(config, kinds, hidden)
    return ModelShape(
        name=name,
        source=outer.text("_source", default=source),
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings", default=outer.flag("tie_word_embeddings")),
        num_layers=len(kinds),
        attention=attention_layers(config, kinds, hidden),
        recurrent=_recurrent(config, kinds, hidden),
        experts=experts,
        dense_parameters=_dense_parameters(config, kinds, hidden, experts.count),
        max_context=config.optional("max_position_embeddings"),
    )


def _text_part(outer: Fields) -> Fields:
    """The part of a multimodal config that describes the language model, else the whole of it."""
    for name in ("text_config", "llm_config"):
        if name in outer:
            inner = outer.values[name]
            if not isinstance(inner, Mapping):
                raise ConfigError(f"{outer.where}: {name} is no object, expected the language model's fields")
            if inner:
                return Fields(inner, outer.where)
    return outer


def _recurrent(config: Fields, kinds: Sequence[str], hidden: int) -> RecurrentLayers | None:
    mamba, linear = kinds.count("mamba"), kinds.count("linear_attention")
    if mamba and linear:
        raise ConfigError(
            f"{config.where}: has both mamba and linear_attention layers, expected one of the two"
        )
    if mamba:
        return mamba2_layers(config, mamba, hidden)
    return gated_delta_layers(config, linear, hidden) if linear else None


def _experts(config: Fields, kinds: Sequence[str], hidden: int) -> ExpertLayers:
    number = config.integer("num_experts", "n_routed_experts", "num_local_experts")
    count = expert_layers(config, kinds)
    latent = config.integer("moe_latent_size", default=0, least=0)
    activation = config.text("mlp_hidden_act", "hidden_act", "hidden_activation", default="silu")
    intermediate = config.integer("moe_intermediate_size", "intermediate_size")
    shared = config.integer(
        "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=0, least=0
    )
    shared = shared or intermediate * config.integer("n_shared_experts", default=0, least=0)
    top_k = config.integer("num_experts_per_tok", "top_k_experts")
    try:
        layer = LayerShape(latent or hidden, intermediate, number, top_k, _activation(activation))
    except ValueError as error:
        raise ConfigError(f"{config.where}: {error}") from None
    return ExpertLayers(count, layer, 2 * hidden * latent, shared)


def _activation(named: str) -> str:
    """The curve by our name for it; of one that we do not know only that it is gated matters."""
    if named.startswith("relu2"):
        return "relu2"
    return "gelu_tanh" if named.startswith("gelu") else "silu"


def _dense_parameters(config: Fields, kinds: Sequence[str], hidden: int, moe_layers: int) -> int:
    if "moe" in kinds:
        return kinds.count("mlp") * 2 * hidden * config.integer("intermediate_size", default=0, least=0)
    dense = len(dense_layers(config, kinds))
    if config.flag("enable_moe_block"):  # a dense MLP beside the experts in every layer
        dense += moe_layers
    return dense * 3 * hidden * config.integer("intermediate_size", default=0, least=0) if dense else 0
