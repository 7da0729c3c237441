"""Writes tiny Qwen3-MoE checkpoints, so that a real engine starts without downloaded weights.

The tensors are random and the model's text is nonsense, but it depends on every weight: the embedding has
unit size, each layer adds about as much as comes in, and greedy tokens change as soon as one layer is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from moedoctor.reference.fp8 import E4M3_MAX
from moedoctor.reference.nvfp4 import quantize

Scheme = Literal["bf16", "nvfp4", "fp8", "fp8_modelopt", "fp8_compressed"]
Tensors = dict[str, torch.Tensor]
"""Name in the checkpoint -> tensor."""
Change = Callable[[Tensors, dict[str, Any]], None]
"""Breaks a checkpoint: changes tensors and config.json in place before they are written."""

_HEAD = 64
_BLOCK = 128
_LARGEST_INPUT = 8.0
"""The largest activation that input scales are made for."""
_IN_BF16 = ("lm_head", "*self_attn*", "*mlp.gate")
"""Modules that are not quantized, as ModelOpt names them."""
_SPECIAL = ("<unk>", "<s>", "</s>")


def write_qwen3_moe(
    folder: Path,
    *,
    scheme: Scheme = "bf16",
    layers: int = 2,
    hidden: int = 256,
    intermediate: int = 128,
    experts: int = 8,
    top_k: int = 2,
    vocab: int = 512,
    seed: int = 0,
    change: Change | None = None,
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into `folder`, which is created; return the folder.

    Only the experts are quantized: `nvfp4` as ModelOpt does (packed weights [N, K/2], scales [N, K/16], two
    global scales), `fp8` in blocks of 128 × 128 as in Qwen's own FP8 checkpoints, `fp8_modelopt` with a scale
    a matrix and one for its input, `fp8_compressed` as compressed-tensors does with a scale a row. Attention,
    router and head are BF16. `change` may break what is written. Raises ValueError for sizes that no engine
    would load.
    """
    unit = _BLOCK if scheme == "fp8" else _HEAD
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size < unit or size % unit:
            raise ValueError(f"{name}: {size} is not a multiple of {unit}, which {scheme} needs")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k: {top_k}, expected 1 to experts {experts}")
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator)  # [rows, columns]
        return drawn.mul(gain / math.sqrt(columns))  # [rows, columns]

    heads, kv_heads = hidden // _HEAD, max(1, hidden // _HEAD // 2)
    ones = torch.ones(hidden, dtype=torch.bfloat16)  # [H]
    tensors: Tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator).bfloat16(),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": draw(vocab, hidden, 4.0).bfloat16(),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            ("q_proj", heads * _HEAD, hidden),
            ("k_proj", kv_heads * _HEAD, hidden),
            ("v_proj", kv_heads * _HEAD, hidden),
            ("o_proj", hidden, heads * _HEAD),
        ):
            tensors[f"{prefix}.self_attn.{name}.weight"] = draw(rows, columns).bfloat16()
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = torch.ones(_HEAD, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = ones.clone()
        tensors[f"{prefix}.mlp.gate.weight"] = draw(experts, hidden).bfloat16()
        for expert in range(experts):
            # The larger gain of down makes up for SiLU and the weighted mean over experts.
            gate, up = draw(intermediate, hidden), draw(intermediate, hidden)  # [I, H] each
            down = draw(hidden, intermediate, 3.0)  # [H, I]
            for name, tensor in make_expert_tensors(scheme, {"gate": gate, "up": up, "down": down}).items():
                tensors[f"{prefix}.mlp.experts.{expert}.{name}"] = tensor
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "decoder_sparse_step": 1,
        "eos_token_id": 2,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 2048,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab,
        **make_quantization_fields(scheme, layers),
    }
    if change is not None:
        change(tensors, config)
    return write_checkpoint(folder, config, tensors)


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into `folder`, which is created; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_expert_tensors(scheme: Scheme, weights: Mapping[str, torch.Tensor]) -> Tensors:
    """Return one expert's tensors by the end of their names.

    `weights`: ``gate`` if the activation has one, ``up`` [I, H], ``down`` [H, I].
    """
    if scheme == "bf16":
        return {f"{name}_proj.weight": weight.bfloat16() for name, weight in weights.items()}
    tensors: Tensors = {}
    if scheme == "fp8":
        for name, weight in weights.items():
            weight_and_scale = f"{name}_proj.weight", f"{name}_proj.weight_scale_inv"
            tensors |= dict(zip(weight_and_scale, _quantize_blocks(weight), strict=True))
        return tensors
    if scheme in ("fp8_modelopt", "fp8_compressed"):
        for name, weight in weights.items():
            # Up's scale is four times as large, so that it shows if gate's is taken for it.
            most = weight.abs().amax(1, keepdim=True) if scheme == "fp8_compressed" else weight.abs().amax()
            scale = (most * (4 if name == "up" else 1) / E4M3_MAX).clamp_min(1e-12)  # [N, 1], or []
            tensors[f"{name}_proj.weight"] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_proj.weight_scale"] = scale
            if scheme == "fp8_modelopt":
                tensors[f"{name}_proj.input_scale"] = torch.tensor(_LARGEST_INPUT / E4M3_MAX)
        return tensors
    # gate and up are one matrix for the kernels, so they share a global scale, as ModelOpt exports them.
    largest = max(float(weight.abs().amax()) for name, weight in weights.items() if name != "down")
    shared = torch.tensor(largest) / (E4M3_MAX * 6.0)
    for name, weight in weights.items():
        quantized = quantize(weight, None if name == "down" else shared)
        tensors[f"{name}_proj.weight"] = quantized.packed
        tensors[f"{name}_proj.weight_scale"] = quantized.block_scales
        tensors[f"{name}_proj.weight_scale_2"] = quantized.global_scale.reshape(())
        tensors[f"{name}_proj.input_scale"] = torch.tensor(_LARGEST_INPUT / (E4M3_MAX * 6.0))
    return tensors


def _quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `weight` as E4M3 [N, K], and its scales, float32 [N/128, K/128]."""
    rows, columns = weight.shape[0] // _BLOCK, weight.shape[1] // _BLOCK
    blocks = weight.reshape(rows, _BLOCK, columns, _BLOCK)  # [N/128, 128, K/128, 128]
    scales = (blocks.abs().amax((1, 3), keepdim=True) / E4M3_MAX).clamp_min(1e-12)  # [N/128, 1, K/128, 1]
    quantized = (blocks / scales).to(torch.float8_e4m3fn).reshape(weight.shape)  # [N, K]
    return quantized, scales.reshape(rows, columns).contiguous()


def make_quantization_fields(scheme: Scheme, layers: int) -> dict[str, Any]:
    """Return the fields of config.json that say how the experts are quantized."""
    if scheme == "bf16":
        return {}
    quantization: dict[str, Any]
    if scheme in ("nvfp4", "fp8_modelopt"):
        algorithm = {"quant_algo": "NVFP4", "group_size": 16} if scheme == "nvfp4" else {"quant_algo": "FP8"}
        quantization = {"quant_method": "modelopt", **algorithm, "ignore": [*_IN_BF16]}
    elif scheme == "fp8_compressed":
        eight = {"num_bits": 8, "type": "float", "symmetric": True}
        quantization = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**eight, "strategy": "channel", "dynamic": False},
                    "input_activations": {**eight, "strategy": "token", "dynamic": True},
                }
            },
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        }
    else:
        parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate")
        bf16 = [f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts]
        quantization = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": ["lm_head", *bf16],
        }
    return {"quantization_config": quantization}


def write_tokenizer(folder: Path, vocab: int) -> Path:
    """Write ``tokenizer.json`` and its config into the `folder` of a checkpoint; return the folder.

    Token 7 is the word ``t7``, so that an engine can be asked in text. The first three tokens are unknown
    words, the beginning and the end of a text, as in the config of `write_qwen3_moe`. Raises ValueError for a
    vocabulary without words.
    """
    if vocab <= len(_SPECIAL):
        raise ValueError(f"vocab: {vocab}, expected more than {len(_SPECIAL)}")
    words = [*_SPECIAL, *(f"t{token}" for token in range(len(_SPECIAL), vocab))]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": _SPECIAL[0],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(("unk_token", "bos_token", "eos_token"), _SPECIAL, strict=True)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
