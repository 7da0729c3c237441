"""Writes tiny checkpoints of the two architectures whose experts have another activation than SiLU.

Gemma-4 has gated GELU, Nemotron-H squared ReLU without a gate. As in `moedoctor.reference.checkpoints` the
tensors are random and the text is nonsense, but each layer adds about as much as comes in, so that greedy
tokens change as soon as one layer is wrong. Only experts are quantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from moedoctor.reference.checkpoints import Scheme, Tensors, make_expert_tensors, write_checkpoint

_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
Draw = Callable[..., torch.Tensor]
"""``draw(rows, columns, gain)``: BF16 [rows, columns] with a deviation of ``gain / sqrt(columns)``."""

GEMMA: Mapping[str, Any] = {
    "hidden_size": 256,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 64,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
}
"""The fields of Gemma-4's config.json that make it tiny. Its own embedding is also its head, which would
repeat the last token."""
NEMOTRON: Mapping[str, Any] = {
    "hidden_size": 256,
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "ME*E",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 64,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_latent_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "intermediate_size": 256,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 2048,
}
"""The same of Nemotron-H, with the latent of Nemotron-3-Super: its experts see half of the hidden size."""


def write_gemma4(folder: Path, config: Mapping[str, Any], scheme: Scheme = "bf16", seed: int = 0) -> Path:
    """Write a checkpoint of Gemma-4's text model with this config.json; return the folder."""
    draw, generator = _make_draw(seed)
    hidden, experts, width = (
        config[name] for name in ("hidden_size", "num_experts", "moe_intermediate_size")
    )
    heads, kv_heads, head = (config[name] for name in _HEADS)
    ones = torch.ones(hidden, dtype=torch.bfloat16)  # [H]
    # The model multiplies its embedding by sqrt(hidden).
    tensors: Tensors = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden)}
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        attention = {"q": heads, "k": kv_heads, "v": kv_heads}
        if kind == "full_attention":
            del attention["v"]  # keys are its values, too
        for name, count in attention.items():
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = draw(count * head, hidden)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = draw(hidden, heads * head)
        # Attention has no scale of its own: norms of one would let it look at one token only.
        tensors[f"{prefix}.self_attn.q_norm.weight"] = torch.full((head,), head**-0.5, dtype=torch.bfloat16)
        tensors[f"{prefix}.self_attn.k_norm.weight"] = torch.ones(head, dtype=torch.bfloat16)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
        ):
            tensors[f"{prefix}.{name}.weight"] = ones.clone()
        for name in ("gate", "up"):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = draw(config["intermediate_size"], hidden)
        tensors[f"{prefix}.mlp.down_proj.weight"] = draw(hidden, config["intermediate_size"])
        # The router's input is normalized and divided by sqrt(hidden); its scale makes up for that.
        tensors[f"{prefix}.router.scale"] = torch.full((hidden,), hidden**0.5, dtype=torch.bfloat16)
        spread = torch.rand(experts, generator=generator) + 0.5  # [E]
        tensors[f"{prefix}.router.per_expert_scale"] = spread.bfloat16()
        tensors[f"{prefix}.router.proj.weight"] = draw(experts, hidden)
        for expert in range(experts):
            sizes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
            weights = {name: draw(*size).float() for name, size in sizes.items()}
            for name, tensor in make_expert_tensors(scheme, weights).items():
                tensors[f"{prefix}.experts.{expert}.{name}"] = tensor
    tensors |= {"model.norm.weight": ones, "lm_head.weight": draw(config["vocab_size"], hidden, 4.0)}
    return write_checkpoint(folder, config, tensors)


def write_nemotron_h(folder: Path, config: Mapping[str, Any], scheme: Scheme = "bf16", seed: int = 0) -> Path:
    """Write a checkpoint of a Nemotron-H model with this config.json; return the folder.

    Raises ValueError for a layer in the pattern that is neither Mamba (M), MoE (E) nor attention (*).
    """
    draw, generator = _make_draw(seed)
    hidden = config["hidden_size"]
    layers = {"M": _draw_mamba, "E": _draw_moe, "*": _draw_attention}
    tensors: Tensors = {"backbone.embeddings.weight": draw(config["vocab_size"], hidden, math.sqrt(hidden))}
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        if kind not in layers:
            raise ValueError(f"hybrid_override_pattern: got {kind!r}, expected M, E or *")
        prefix = f"backbone.layers.{layer}"
        tensors[f"{prefix}.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, tensor in layers[kind](config, scheme, draw, generator).items():
            tensors[f"{prefix}.mixer.{name}"] = tensor
    tensors["backbone.norm_f.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["lm_head.weight"] = draw(config["vocab_size"], hidden, 4.0)
    return write_checkpoint(folder, config, tensors)


def _draw_mamba(config: Mapping[str, Any], scheme: Scheme, draw: Draw, generator: torch.Generator) -> Tensors:
    heads, hidden = config["mamba_num_heads"], config["hidden_size"]
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    return {
        "in_proj.weight": draw(inner + channels + heads, hidden),
        "conv1d.weight": draw(channels, config["conv_kernel"])[:, None],  # [channels, 1, kernel]
        "conv1d.bias": torch.zeros(channels, dtype=torch.bfloat16),
        "A_log": torch.rand(heads, generator=generator),
        "D": torch.ones(heads),
        "dt_bias": torch.rand(heads, generator=generator) - 2.0,
        "norm.weight": torch.ones(inner, dtype=torch.bfloat16),
        "out_proj.weight": draw(hidden, inner),
    }


def _draw_moe(config: Mapping[str, Any], scheme: Scheme, draw: Draw, generator: torch.Generator) -> Tensors:
    hidden, latent, width = (
        config[name] for name in ("hidden_size", "moe_latent_size", "moe_intermediate_size")
    )
    experts, shared = config["n_routed_experts"], config["moe_shared_expert_intermediate_size"]
    tensors: Tensors = {
        "gate.weight": draw(experts, hidden),
        "gate.e_score_correction_bias": torch.randn(experts, generator=generator) * 0.1,
        "fc1_latent_proj.weight": draw(latent, hidden),
        "fc2_latent_proj.weight": draw(hidden, latent),
        "shared_experts.up_proj.weight": draw(shared, hidden),
        "shared_experts.down_proj.weight": draw(hidden, shared, 0.5),
    }
    for expert in range(experts):
        weights = {"up": draw(width, latent).float(), "down": draw(latent, width).float()}
        for name, tensor in make_expert_tensors(scheme, weights).items():
            tensors[f"experts.{expert}.{name}"] = tensor
    return tensors


def _draw_attention(
    config: Mapping[str, Any], scheme: Scheme, draw: Draw, generator: torch.Generator
) -> Tensors:
    heads, kv_heads, head = (config[name] for name in _HEADS)
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    tensors = {
        f"{name}_proj.weight": draw(count * head, config["hidden_size"]) for name, count in counts.items()
    }
    return {**tensors, "o_proj.weight": draw(config["hidden_size"], heads * head)}


def _make_draw(seed: int) -> tuple[Draw, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator)  # [rows, columns]
        return drawn.mul(gain / math.sqrt(columns)).bfloat16()  # [rows, columns]

    return draw, generator
