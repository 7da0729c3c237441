"""A ``config.json`` of Hugging Face's layout -> a `ModelShape`, or an error that names the missing field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moedoctor.models.layer_shape import LayerShape
from moedoctor.models.recurrent import gated_delta_layers, mamba2_layers
from moedoctor.models.shape import AttentionLayers, ExpertLayers, ModelShape, RecurrentLayers

_LARGEST_FILE = 4 << 20
_KINDS = {"M": "mamba", "E": "moe", "*": "full_attention", "-": "mlp"}


class ConfigError(ValueError):
    """A config.json that no shape can be read from; one line says which field and what was expected."""


class Fields:
    """The fields of a config, asked for by any of their names."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, *names: str, default: Any = None) -> Any:
        """The first field of `names` that is there and not null."""
        return next((self.values[one] for one in names if self.values.get(one) is not None), default)

    def integer(self, *names: str, default: int | None = None) -> int:
        """A positive integer; raises ConfigError where there is none and no default."""
        found = self.get(*names, default=default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            said = "is missing" if found is None else f"is {found!r}"
            raise ConfigError(f"{self.where}: {' or '.join(names)} {said}, expected a whole number")
        return found


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
    inner = values.get("text_config") or values.get("llm_config") or values
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{source}: text_config is no object")
    config = Fields(inner, source)
    kinds = _layer_kinds(config)
    hidden = config.integer("hidden_size")
    experts = _experts(config, kinds, hidden)
    return ModelShape(
        name=name,
        source=str(values.get("_source", source)),
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        tied_embeddings=bool(
            config.get("tie_word_embeddings", default=values.get("tie_word_embeddings", False))
        ),
        num_layers=len(kinds),
        attention=_attention(config, kinds, hidden),
        recurrent=_recurrent(config, kinds, hidden),
        experts=experts,
        dense_parameters=_dense_parameters(config, kinds, hidden, experts.count),
        max_context=config.get("max_position_embeddings"),
    )


def _layer_kinds(config: Fields) -> Sequence[str]:
    """What each layer is: full_attention, sliding_attention, linear_attention, mamba, moe or mlp."""
    pattern = config.get("hybrid_override_pattern")
    if pattern is not None:
        unknown = sorted(set(pattern) - set(_KINDS))
        if unknown:
            raise ConfigError(
                f"{config.where}: hybrid_override_pattern holds {unknown[0]!r}, expected {' '.join(_KINDS)}"
            )
        return [_KINDS[one] for one in pattern]
    listed = config.get("layer_types", "layers_block_type")
    if listed is not None:
        names = {"attention": "full_attention", "linear_attention": "linear_attention"}
        return [names.get(str(one), str(one)) for one in listed]
    count = config.integer("num_hidden_layers")
    every = config.get("full_attention_interval")
    if every:
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)]
    sliding = config.get("sliding_window") if config.get("use_sliding_window", default=False) else None
    return ["sliding_attention" if sliding else "full_attention"] * count


def _attention(config: Fields, kinds: Sequence[str], hidden: int) -> tuple[AttentionLayers, ...]:
    full, sliding = kinds.count("full_attention"), kinds.count("sliding_attention")
    if not full and not sliding:
        return ()
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    head_dim = config.integer("head_dim", "attention_head_dim", default=hidden // max(heads, 1))
    gate = bool(config.get("attn_output_gate", default=False))
    layers = []
    if full:
        layers.append(
            AttentionLayers(
                count=full,
                num_heads=heads,
                num_kv_heads=config.integer("num_global_key_value_heads", default=kv_heads),
                head_dim=config.integer("global_head_dim", default=head_dim),
                output_gate=gate,
                shared_kv=bool(config.get("attention_k_eq_v", default=False)),
            )
        )
    if sliding:
        window = config.integer("sliding_window")
        layers.append(AttentionLayers(sliding, heads, kv_heads, head_dim, window, gate))
    return tuple(layers)


def _recurrent(config: Fields, kinds: Sequence[str], hidden: int) -> RecurrentLayers | None:
    if count := kinds.count("mamba"):
        return mamba2_layers(config, count, hidden)
    if count := kinds.count("linear_attention"):
        return gated_delta_layers(config, count, hidden)
    return None


def _experts(config: Fields, kinds: Sequence[str], hidden: int) -> ExpertLayers:
    number = config.integer("num_experts", "n_routed_experts", "num_local_experts")
    own_layers = "moe" in kinds
    count = kinds.count("moe") if own_layers else len(kinds) - len(_dense_layers(config, kinds))
    latent = config.integer("moe_latent_size", default=0)
    activation = str(config.get("mlp_hidden_act", "hidden_act", "hidden_activation", default="silu"))
    shared = config.get("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=0)
    intermediate = config.integer("moe_intermediate_size", "intermediate_size")
    if not shared and config.get("n_shared_experts"):
        shared = intermediate * config.integer("n_shared_experts")
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


def _dense_layers(config: Fields, kinds: Sequence[str]) -> Sequence[int]:
    """Indices of the layers that have a dense MLP in place of experts."""
    first = config.get("first_k_dense_replace", default=0)
    only = config.get("mlp_only_layers", default=())
    step = config.get("decoder_sparse_step", default=1) or 1
    return [i for i in range(len(kinds)) if i < first or i in only or (i + 1) % step]


def _dense_parameters(config: Fields, kinds: Sequence[str], hidden: int, moe_layers: int) -> int:
    if "moe" in kinds:
        return kinds.count("mlp") * 2 * hidden * config.integer("intermediate_size", default=0)
    dense = len(_dense_layers(config, kinds))
    if config.get("enable_moe_block"):  # a dense MLP beside the experts in every layer
        dense += moe_layers
    return dense * 3 * hidden * config.integer("intermediate_size", default=0) if dense else 0
