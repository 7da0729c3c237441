"""From a ``config.json`` of Hugging Face's layout to a `ModelShape`, or an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moedoctor.models.config_fields import TEXT_CONFIGS, ConfigError, Fields, find_text_config, shorten_value
from moedoctor.models.layer_shape import LayerShape
from moedoctor.models.shape import (
    AttentionLayers,
    ExpertLayers,
    LatentAttentionLayers,
    ModelShape,
    RecurrentLayers,
)
from moedoctor.text import TextFileError, read_text

_LARGEST_FILE = 4 << 20
_MOST_LAYERS = 10_000
_PATTERN = {"M": "mamba", "E": "moe", "*": "full_attention", "-": "mlp"}
_NAMES = {
    "attention": "full_attention",
    "full_attention": "full_attention",
    "sliding_attention": "sliding_attention",
    "linear_attention": "linear_attention",
    "mamba": "mamba",
    "moe": "moe",
    "mlp": "mlp",
}
"""Names in configs -> ours. The memory of chunked attention and of convolutions is not known."""
_OTHER_PATTERNS = (
    "attention_chunk_size",
    "attn_layer_period",
    "attn_type_list",
    "hybrid_layer_pattern",
    "sliding_window_pattern",
)
"""Other fields that say which layers see less than the whole context; they are not read here."""
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe")
"""Models that vLLM 0.21.0 runs with MLA and whose cache holds only the latents."""
_ACTIVATIONS = {"relu2": "relu2", "gelu": "gelu_tanh"}
"""Beginning of an activation's name in configs -> ours."""
_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def read_config(path: Path) -> ModelShape:
    """Return the shape of the model whose ``config.json`` is `path`. Raises ConfigError."""
    try:
        values = json.loads(read_text(path, _LARGEST_FILE))
    except TextFileError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected an object with the model's fields")
    return shape_of(values, path.parent.resolve().name, str(path))


def shape_of(values: Mapping[str, Any], name: str, source: str) -> ModelShape:
    """Return the shape that the fields `values` of a config describe. Raises ConfigError."""
    outer = Fields(values, source)
    for key in TEXT_CONFIGS:
        if key in outer and not isinstance(outer.values[key], Mapping):
            raise ConfigError(f"{source}: {key} is not an object, expected the language model's fields")
    config = Fields(find_text_config(values), source)
    kinds = list_layer_kinds(config)
    hidden = config.read_integer("hidden_size")
    experts = _read_experts(config, kinds, hidden)
    return ModelShape(
        name=name,
        source=outer.read_text("_source", default=source),
        hidden_size=hidden,
        vocab_size=config.read_integer("vocab_size"),
        tied_embeddings=config.read_flag(
            "tie_word_embeddings", default=outer.read_flag("tie_word_embeddings")
        ),
        num_layers=len(kinds),
        attention=_read_attention(config, kinds, hidden),
        recurrent=_read_recurrent(config, kinds, hidden),
        experts=experts,
        dense_parameters=_count_dense_parameters(config, kinds, hidden, experts.count),
        max_context=config.read_optional("max_position_embeddings"),
    )


def list_layer_kinds(config: Fields) -> Sequence[str]:
    """Return the kind of each layer: full_attention, sliding_attention, linear_attention, mamba, moe or mlp.

    Raises ConfigError, also for an unknown kind: a plan without that layer would be wrong.
    """
    name = "hybrid_override_pattern"
    if name in config:
        pattern = config.read_text(name, default="")
        kinds = _translate_kinds(config, name, pattern, _PATTERN)
        if "moe" not in kinds:
            raise config.make_error(name, pattern, "at least one E, a layer of experts")
        return kinds
    for name in ("layer_types", "layers_block_type"):
        if name in config:
            return _translate_kinds(config, name, config.read_texts(name), _NAMES)
    other = next((name for name in _OTHER_PATTERNS if name in config), None)
    if other is not None:
        raise config.make_error(other, config.values[other], "layer_types beside it, a name for every layer")
    count = config.read_integer("num_hidden_layers", most=_MOST_LAYERS)
    every = config.read_integer("full_attention_interval", default=0, least=0)
    if every:
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)]
    slides = config.read_flag("use_sliding_window") and config.read_integer(
        "sliding_window", default=0, least=0
    )
    return ["sliding_attention" if slides else "full_attention"] * count


def list_dense_layers(config: Fields, kinds: Sequence[str]) -> Sequence[int]:
    """Return the layers that have a dense MLP instead of experts. Raises ConfigError."""
    first = config.read_integer("first_k_dense_replace", default=0, least=0)
    every = config.read_integer("moe_layer_freq", default=1)
    only = set(config.read_indices("mlp_only_layers"))
    step = config.read_integer("decoder_sparse_step", default=1)
    for name in ("interleave_moe_layer_step", "expert_layer_period"):
        if config.read_integer(name, default=1) != 1:
            raise config.make_error(name, config.values[name], "1: experts in every layer")
    return [i for i in range(len(kinds)) if i < first or i % every or i in only or (i + 1) % step]


def _translate_kinds(
    config: Fields, name: str, listed: Sequence[str], known: Mapping[str, str]
) -> Sequence[str]:
    unknown = next((kind for kind in listed if kind not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"{config.where}: {name} holds {shorten_value(unknown)}, expected {', '.join(known)}"
        )
    layers = config.read_integer("num_hidden_layers", default=len(listed), most=_MOST_LAYERS)
    if len(listed) != layers:
        raise ConfigError(
            f"{config.where}: {name} has {len(listed)} layers and num_hidden_layers is {layers}, "
            "expected the same number"
        )
    return [known[kind] for kind in listed]


def _read_experts(config: Fields, kinds: Sequence[str], hidden: int) -> ExpertLayers:
    number = config.read_integer("num_experts", "n_routed_experts", "num_local_experts")
    count = _count_expert_layers(config, kinds)
    latent = config.read_integer("moe_latent_size", default=0, least=0)
    activation = config.read_text("mlp_hidden_act", "hidden_act", "hidden_activation", default="silu")
    # An unknown one is taken for SiLU: only its gate matters.
    ours = next((name for start, name in _ACTIVATIONS.items() if activation.startswith(start)), "silu")
    intermediate = config.read_integer("moe_intermediate_size", "intermediate_size")
    shared = config.read_integer(
        "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=0, least=0
    )
    shared = shared or intermediate * config.read_integer("n_shared_experts", default=0, least=0)
    top_k = config.read_integer("num_experts_per_tok", "top_k_experts")
    try:
        layer = LayerShape(latent or hidden, intermediate, number, top_k, ours)
    except ValueError as error:
        raise ConfigError(f"{config.where}: {error}") from None
    return ExpertLayers(count, layer, 2 * hidden * latent, shared)


def _count_expert_layers(config: Fields, kinds: Sequence[str]) -> int:
    """Return how many layers have experts. Raises ConfigError if there are none."""
    count = kinds.count("moe") if "moe" in kinds else len(kinds) - len(list_dense_layers(config, kinds))
    if not count:
        names = ("first_k_dense_replace", "moe_layer_freq", "mlp_only_layers", "decoder_sparse_step")
        given = " and ".join(f"{key} {shorten_value(config.values[key])}" for key in names if key in config)
        raise ConfigError(
            f"{config.where}: {given} leaves none of {len(kinds)} layers with experts, expected at least one"
        )
    return count


def _count_dense_parameters(config: Fields, kinds: Sequence[str], hidden: int, moe_layers: int) -> int:
    if "moe" in kinds:
        return kinds.count("mlp") * 2 * hidden * config.read_integer("intermediate_size", default=0, least=0)
    dense = len(list_dense_layers(config, kinds))
    if config.read_flag("enable_moe_block"):  # a dense MLP beside the experts in every layer
        dense += moe_layers
    return dense * 3 * hidden * config.read_integer("intermediate_size", default=0, least=0) if dense else 0


def _read_attention(
    config: Fields, kinds: Sequence[str], hidden: int
) -> tuple[AttentionLayers | LatentAttentionLayers, ...]:
    """Return the attention layers, one entry a size."""
    full, sliding = kinds.count("full_attention"), kinds.count("sliding_attention")
    if not full and not sliding:
        return ()
    heads = config.read_integer("num_attention_heads")
    if "kv_lora_rank" in config:
        return (_read_latent(config, kinds, heads),)
    kv_heads = config.read_integer("num_key_value_heads", default=heads)
    head_dim = config.read_integer("head_dim", "attention_head_dim", default=hidden // heads)
    gate = config.read_flag("attn_output_gate")
    layers = []
    if full:
        layers.append(
            AttentionLayers(
                count=full,
                num_heads=heads,
                num_kv_heads=config.read_integer("num_global_key_value_heads", default=kv_heads),
                head_dim=config.read_integer("global_head_dim", default=head_dim),
                output_gate=gate,
                shared_kv=config.read_flag("attention_k_eq_v"),
            )
        )
    if sliding:
        window = config.read_integer("sliding_window")
        layers.append(AttentionLayers(sliding, heads, kv_heads, head_dim, window, gate))
    return tuple(layers)


def _read_latent(config: Fields, kinds: Sequence[str], heads: int) -> LatentAttentionLayers:
    model_type = config.read_text("model_type", default=_LATENT[0])
    if model_type not in _LATENT:
        raise config.make_error(
            "model_type", model_type, f"{', '.join(_LATENT)} of a model with kv_lora_rank (latent attention)"
        )
    # An indexer, compressed blocks and Kimi Delta Attention keep more, or less, than a latent a token.
    for name in ("index_topk", "compress_ratios", "linear_attn_config"):
        if name in config:
            raise config.make_error(name, config.values[name], "latent attention alone, without it")
    if set(kinds) != {"full_attention"}:
        raise ConfigError(
            f"{config.where}: kv_lora_rank (latent attention) beside layers of other kinds, "
            "expected full_attention alone"
        )
    return LatentAttentionLayers(
        count=len(kinds),
        num_heads=heads,
        kv_rank=config.read_integer("kv_lora_rank"),
        rope_dim=config.read_integer("qk_rope_head_dim"),
        nope_dim=config.read_integer("qk_nope_head_dim"),
        value_dim=config.read_integer("v_head_dim"),
        query_rank=config.read_optional("q_lora_rank"),
    )


def _read_recurrent(config: Fields, kinds: Sequence[str], hidden: int) -> RecurrentLayers | None:
    """Return the recurrent layers of a hybrid model, sized as in vLLM's mamba_utils.py.

    In Mamba 2 the convolution sees x, B and C of the last tokens, and the state is [heads, head_dim, state].
    In a gated delta net it sees v, q and k, and the state is [value heads, value dim, key dim].
    """
    mamba, linear = kinds.count("mamba"), kinds.count("linear_attention")
    if mamba and linear:
        raise ConfigError(
            f"{config.where}: has both mamba and linear_attention layers, expected one of the two"
        )
    if not mamba and not linear:
        return None
    types = ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"]
    if mamba:
        heads = gates = config.read_integer("mamba_num_heads")
        inner = heads * config.read_integer("mamba_head_dim")
        groups = config.read_integer("n_groups", "mamba_n_groups")
        state = config.read_integer("ssm_state_size", "mamba_d_state")
        kernel = config.read_integer("conv_kernel", "mamba_d_conv")
    else:
        types.reverse()
        heads = config.read_integer("linear_num_value_heads")
        gates = 2 * heads
        inner = heads * config.read_integer("linear_value_head_dim")
        groups = config.read_integer("linear_num_key_heads")
        state = config.read_integer("linear_key_head_dim")
        kernel = config.read_integer("linear_conv_kernel_dim")
    # vLLM falls back to float32 for the recurrent state: the only type known to be exact enough.
    dtype = config.read_text(*types, default="float32")
    if dtype not in _STATE_BYTES:
        raise config.make_error(" or ".join(types), dtype, ", ".join(_STATE_BYTES))
    conv = inner + 2 * groups * state
    return RecurrentLayers(
        count=mamba or linear,
        conv_elements=conv * (kernel - 1),
        state_elements=inner * state,
        state_bytes=_STATE_BYTES[dtype],
        parameters_each=hidden * (inner + conv + gates) + inner * hidden + conv * kernel,
    )
