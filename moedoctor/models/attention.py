"""The attention layers of a config: keys and values for each head, or one latent vector for all (MLA)."""

from __future__ import annotations

from collections.abc import Sequence

from moedoctor.models.config_fields import ConfigError, Fields
from moedoctor.models.shape import AttentionLayers, LatentAttentionLayers

_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe")
"""Types of models whose layers vLLM 0.21.0 runs as MLA, and whose cache holds nothing beside the latents."""


def attention_layers(
    config: Fields, kinds: Sequence[str], hidden: int
) -> tuple[AttentionLayers | LatentAttentionLayers, ...]:
    """The attention layers, one entry a size; empty where there are none. Raises ConfigError."""
    full, sliding = kinds.count("full_attention"), kinds.count("sliding_attention")
    if not full and not sliding:
        return ()
    heads = config.integer("num_attention_heads")
    if "kv_lora_rank" in config:
        return (_latent(config, kinds, heads),)
    kv_heads = config.integer("num_key_value_heads", default=heads)
    head_dim = config.integer("head_dim", "attention_head_dim", default=hidden // heads)
    gate = config.flag("attn_output_gate")
    layers = []
    if full:
        layers.append(
            AttentionLayers(
                count=full,
                num_heads=heads,
                num_kv_heads=config.integer("num_global_key_value_heads", default=kv_heads),
                head_dim=config.integer("global_head_dim", default=head_dim),
                output_gate=gate,
                shared_kv=config.flag("attention_k_eq_v"),
            )
        )
    if sliding:
        window = config.integer("sliding_window")
        layers.append(AttentionLayers(sliding, heads, kv_heads, head_dim, window, gate))
    return tuple(layers)


def _latent(config: Fields, kinds: Sequence[str], heads: int) -> LatentAttentionLayers:
    named = config.text("model_type", default=_LATENT[0])
    if named not in _LATENT:
        raise config.error(
            "model_type", named, f"{', '.join(_LATENT)} of a model with kv_lora_rank (latent attention)"
        )
    # An indexer, compressed blocks and Kimi Delta Attention keep more, or less, than a latent a token.
    for name in ("index_topk", "compress_ratios", "linear_attn_config"):
        if name in config:
            raise config.error(name, config.values[name], "latent attention alone, without it")
    if set(kinds) != {"full_attention"}:
        raise ConfigError(
            f"{config.where}: kv_lora_rank (latent attention) beside layers of other kinds, "
            "expected full_attention alone"
        )
    return LatentAttentionLayers(
        count=len(kinds),
        num_heads=heads,
        kv_rank=config.integer("kv_lora_rank"),
        rope_dim=config.integer("qk_rope_head_dim"),
        nope_dim=config.integer("qk_nope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        query_rank=config.optional("q_lora_rank"),
    )
