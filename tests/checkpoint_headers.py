"""Checkpoints of ten architectures as names, types and shapes: headers in files with holes.

`SOUND` are as their publishers write them; `PLANTED` each have one mistake. Sizes are small unless a builder
gets its own, and everything that a release asks to be divisible by 128 is, for eight ranks, too.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4, "I64": 8}
Tensors = dict[str, tuple[str, tuple[int, ...]]]
Linear = Callable[[str, int, int], Tensors]


@dataclass(frozen=True)
class Size:
    """The sizes of a model. Heads divide by 8, so that eight ranks can share it."""

    layers: int = 2
    experts: int = 8
    top_k: int = 2
    hidden: int = 256
    width: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head: int = 128
    vocab: int = 512


@dataclass(frozen=True)
class Built:
    """A checkpoint: its config.json and its tensors."""

    config: Mapping[str, Any]
    tensors: Tensors
    seeds: Mapping[str, str] = field(default_factory=dict)
    """Tensor -> the name whose values it has, for tensors that were renamed."""

    def rename(self, *pairs: tuple[str, str]) -> Built:
        def change(name: str) -> str:
            for old, new in pairs:
                name = name.replace(old, new)
            return name

        tensors = {change(name): entry for name, entry in self.tensors.items()}
        return replace(self, tensors=tensors, seeds={change(name): name for name in self.tensors})

    def drop(self, *parts: str) -> Built:
        kept = {n: entry for n, entry in self.tensors.items() if not any(part in n for part in parts)}
        assert len(kept) < len(self.tensors)
        return replace(self, tensors=kept)

    def reshape(self, part: str, shape: tuple[int, ...], dtype: str = "") -> Built:
        assert any(part in name for name in self.tensors)
        return self.add(
            **{n: (dtype or old, shape) for n, (old, _) in self.tensors.items() if part in n},
        )

    def add(self, **tensors: tuple[str, tuple[int, ...]]) -> Built:
        return replace(self, tensors={**self.tensors, **tensors})

    def set(self, **config: Any) -> Built:
        return replace(self, config={**self.config, **config})

    def quantize(self, **config: Any) -> Built:
        return self.set(quantization_config={**self.config["quantization_config"], **config})


# How a linear layer of (out, in) is stored, and what config.json says of it.


def plain(name: str, out: int, into: int) -> Tensors:
    return {f"{name}.weight": ("BF16", (out, into))}


def fp8_block(name: str, out: int, into: int) -> Tensors:
    scales = (-(-out // 128), -(-into // 128))
    return {f"{name}.weight": ("F8_E4M3", (out, into)), f"{name}.weight_scale_inv": ("F32", scales)}


def fp8_channel(name: str, out: int, into: int) -> Tensors:
    return {f"{name}.weight": ("F8_E4M3", (out, into)), f"{name}.weight_scale": ("F32", (out, 1))}


def modelopt_nvfp4(name: str, out: int, into: int) -> Tensors:
    scalars = {f"{name}.{scale}": ("F32", ()) for scale in ("weight_scale_2", "input_scale")}
    packed = {
        f"{name}.weight": ("U8", (out, into // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (out, into // 16)),
    }
    return {**packed, **scalars}


def ct_nvfp4(name: str, out: int, into: int) -> Tensors:
    scalars = {f"{name}.{scale}_global_scale": ("F32", (1,)) for scale in ("weight", "input")}
    packed = {f"{name}.weight_packed": ("U8", (out, into // 2))}
    return {**packed, f"{name}.weight_scale": ("F8_E4M3", (out, into // 16)), **scalars}


def ct_w4a16(name: str, out: int, into: int) -> Tensors:
    packed = {f"{name}.weight_packed": ("I32", (out, into // 8)), f"{name}.weight_shape": ("I64", (2,))}
    return {**packed, f"{name}.weight_scale": ("BF16", (out, into // 128))}


def gptq(name: str, out: int, into: int) -> Tensors:
    groups = into // 128
    return {
        f"{name}.qweight": ("I32", (into // 8, out)),
        f"{name}.qzeros": ("I32", (groups, out // 8)),
        f"{name}.scales": ("BF16", (groups, out)),
        f"{name}.g_idx": ("I32", (into,)),
    }


def _group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, form: str) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    method = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**method, "config_groups": {"group_0": group}}


_FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_OPT = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
FORMATS: Mapping[str, tuple[Linear, Mapping[str, Any] | None, str]] = {
    "bf16": (plain, None, ""),
    "fp8-block": (
        fp8_block,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
        "modules_to_not_convert",
    ),
    "fp8-channel": (
        fp8_channel,
        _group(
            {**_FP8, "strategy": "channel", "dynamic": False},
            {**_FP8, "strategy": "token", "dynamic": True},
            "float-quantized",
        ),
        "ignore",
    ),
    "modelopt-nvfp4": (
        modelopt_nvfp4,
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "producer": {"name": "modelopt", "version": "0.40.0"},
            "config_groups": {
                "group_0": {"input_activations": _OPT, "weights": _OPT, "targets": ["Linear"]},
            },
        },
        "ignore",
    ),
    "ct-nvfp4": (
        ct_nvfp4,
        _group({**_FP4, "dynamic": False}, {**_FP4, "dynamic": "local"}, "nvfp4-pack-quantized"),
        "ignore",
    ),
    "ct-w4a16": (ct_w4a16, _group({**_INT4, "dynamic": False}, None, "pack-quantized"), "ignore"),
    "gptq": (
        gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "desc_act": False,
            "lm_head": False,
        },
        "",
    ),
}
"""Name -> (how a layer is stored, quantization_config, the key of layers that are not quantized)."""


def _common(size: Size, architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": size.hidden,
        "vocab_size": size.vocab,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _finish(config: dict[str, Any], tensors: Tensors, form: str, bare: list[str], size: Size) -> Built:
    _, quantization, key = FORMATS[form]
    if quantization is not None:
        config["quantization_config"] = {**quantization, **({key: ["lm_head", *bare]} if key else {})}
    ends = {"model.norm.weight": ("BF16", (size.hidden,)), **plain("lm_head", size.vocab, size.hidden)}
    return Built(config, {**plain("model.embed_tokens", size.vocab, size.hidden), **tensors, **ends})


def _norms(prefix: str, size: Size, *names: str) -> Tensors:
    return {f"{prefix}{name}.weight": ("BF16", (size.hidden,)) for name in names}


def _attention(
    prefix: str, size: Size, linear: Linear, *, norms: bool = False, whole: bool = False
) -> Tensors:
    rows = {"q": size.heads * size.head, "k": size.kv_heads * size.head, "v": size.kv_heads * size.head}
    made: Tensors = {}
    for name, out in rows.items():
        made |= linear(f"{prefix}{name}_proj", out, size.hidden)
    made |= linear(f"{prefix}o_proj", size.hidden, rows["q"])
    for name in ("q", "k") if norms else ():
        made[f"{prefix}{name}_norm.weight"] = ("BF16", (rows[name] if whole else size.head,))
    return made


def _mlp(
    prefix: str, width: int, size: Size, linear: Linear, names: str = "gate_proj up_proj down_proj"
) -> Tensors:
    gate, up, down = names.split()
    sides = {**linear(prefix + gate, width, size.hidden), **linear(prefix + up, width, size.hidden)}
    return {**sides, **linear(prefix + down, size.hidden, width)}


def _experts(prefix: str, size: Size, linear: Linear, names: str = "gate_proj up_proj down_proj") -> Tensors:
    made: Tensors = {}
    for expert in range(size.experts):
        made |= _mlp(f"{prefix}{expert}.", size.width, size, linear, names)
    return made


def qwen3(form: str = "bf16", size: Size = Size()) -> Built:
    linear = FORMATS[form][0]
    config = _common(
        size,
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        num_experts=size.experts,
        num_experts_per_tok=size.top_k,
        moe_intermediate_size=size.width,
        intermediate_size=size.width,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    tensors: Tensors = {}
    for layer in range(size.layers):
        at = f"model.layers.{layer}."
        tensors |= _norms(at, size, "input_layernorm", "post_attention_layernorm")
        tensors |= _attention(f"{at}self_attn.", size, linear, norms=True)
        tensors |= plain(f"{at}mlp.gate", size.experts, size.hidden)
        tensors |= _experts(f"{at}mlp.experts.", size, linear)
    return _finish(config, tensors, form, [f"model.layers.{n}.mlp.gate" for n in range(size.layers)], size)


def mixtral(form: str = "bf16", size: Size = Size()) -> Built:
    linear = FORMATS[form][0]
    sizes = {
        "num_local_experts": size.experts,
        "num_experts_per_tok": size.top_k,
        "intermediate_size": size.width,
    }
    config = _common(size, "MixtralForCausalLM", "mixtral", **sizes)
    tensors: Tensors = {}
    for layer in range(size.layers):
        at = f"model.layers.{layer}."
        tensors |= _norms(at, size, "input_layernorm", "post_attention_layernorm")
        tensors |= _attention(f"{at}self_attn.", size, linear)
        tensors |= plain(f"{at}block_sparse_moe.gate", size.experts, size.hidden)
        tensors |= _experts(f"{at}block_sparse_moe.experts.", size, linear, "w1 w3 w2")
    bare = [f"model.layers.{n}.block_sparse_moe.gate" for n in range(size.layers)]
    return _finish(config, tensors, form, bare, size)


def minimax_m2(form: str = "bf16", size: Size = Size()) -> Built:
    made = mixtral(form, size)
    tensors = dict(made.tensors)
    for layer in range(size.layers):
        at = f"model.layers.{layer}."
        tensors |= _attention(f"{at}self_attn.", size, FORMATS[form][0], norms=True, whole=True)
        tensors[f"{at}block_sparse_moe.e_score_correction_bias"] = ("F32", (size.experts,))
    return Built(
        {
            **made.config,
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "rotary_dim": size.head // 2,
            "use_qk_norm": True,
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
        },
        tensors,
    )


def glm4(form: str = "bf16", size: Size = Size(layers=3)) -> Built:
    linear = FORMATS[form][0]
    config = _common(
        size,
        "Glm4MoeForCausalLM",
        "glm4_moe",
        n_routed_experts=size.experts,
        num_experts_per_tok=size.top_k,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        moe_intermediate_size=size.width,
        intermediate_size=2 * size.width,
        first_k_dense_replace=1,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        num_nextn_predict_layers=0,
    )
    tensors: Tensors = {}
    for layer in range(size.layers):
        at = f"model.layers.{layer}."
        tensors |= _norms(at, size, "input_layernorm", "post_attention_layernorm")
        tensors |= _attention(f"{at}self_attn.", size, linear, norms=True)
        tensors |= _sparse_or_dense(at, layer, size, linear)
    return _finish(config, tensors, form, [f"model.layers.{n}.mlp.gate" for n in range(1, size.layers)], size)


def _sparse_or_dense(at: str, layer: int, size: Size, linear: Linear) -> Tensors:
    """The first layer is dense, the others have a shared expert and a bias of the router."""
    if layer == 0:
        return _mlp(f"{at}mlp.", 2 * size.width, size, linear)
    bias = {f"{at}mlp.gate.e_score_correction_bias": ("F32", (size.experts,))}
    shared = _mlp(f"{at}mlp.shared_experts.", size.width, size, linear)
    routed = _experts(f"{at}mlp.experts.", size, linear)
    return {**plain(f"{at}mlp.gate", size.experts, size.hidden), **bias, **shared, **routed}


def deepseek_v3(form: str = "fp8-block", size: Size = Size(layers=3), draft: int = 0) -> Built:
    linear = FORMATS[form][0]
    nope, rope, value, rank_q, rank_kv = 128, 64, 128, 256, 512
    config = _common(
        size,
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        n_routed_experts=size.experts,
        num_experts_per_tok=size.top_k,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        moe_intermediate_size=size.width,
        intermediate_size=2 * size.width,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        q_lora_rank=rank_q,
        kv_lora_rank=rank_kv,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        num_nextn_predict_layers=draft,
    )
    del config["head_dim"]
    tensors: Tensors = {}
    for layer in range(size.layers + draft):
        at, attention = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        tensors |= _norms(at, size, "input_layernorm", "post_attention_layernorm")
        tensors[f"{attention}q_a_layernorm.weight"] = ("BF16", (rank_q,))
        tensors[f"{attention}kv_a_layernorm.weight"] = ("BF16", (rank_kv,))
        tensors |= linear(f"{attention}q_a_proj", rank_q, size.hidden)
        tensors |= linear(f"{attention}q_b_proj", size.heads * (nope + rope), rank_q)
        tensors |= linear(f"{attention}kv_a_proj_with_mqa", rank_kv + rope, size.hidden)
        tensors |= linear(f"{attention}kv_b_proj", size.heads * (nope + value), rank_kv)
        tensors |= linear(f"{attention}o_proj", size.hidden, size.heads * value)
        tensors |= _sparse_or_dense(at, layer, size, linear)
        if layer >= size.layers:
            tensors |= _norms(at, size, "enorm", "hnorm", "shared_head.norm")
            tensors |= plain(f"{at}eh_proj", size.hidden, 2 * size.hidden)
            for name in ("shared_head.head", "embed_tokens"):
                tensors |= plain(f"{at}{name}", size.vocab, size.hidden)
    bare = [f"model.layers.{n}.mlp.gate" for n in range(1, size.layers + draft)]
    return _finish(config, tensors, form, bare, size)


def qwen3_next(form: str = "bf16", size: Size = Size(layers=4)) -> Built:
    linear = FORMATS[form][0]
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(size.layers)]
    key_heads, value_heads, head = 8, 16, 128
    config = _common(
        size,
        "Qwen3NextForCausalLM",
        "qwen3_next",
        num_experts=size.experts,
        num_experts_per_tok=size.top_k,
        moe_intermediate_size=size.width,
        shared_expert_intermediate_size=size.width,
        intermediate_size=size.width,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        layer_types=kinds,
        full_attention_interval=4,
        partial_rotary_factor=0.25,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=head,
        linear_value_head_dim=head,
        linear_conv_kernel_dim=4,
    )
    keys, values = key_heads * head, value_heads * head
    tensors: Tensors = {}
    for layer, kind in enumerate(kinds):
        at = f"model.layers.{layer}."
        tensors |= _norms(at, size, "input_layernorm", "post_attention_layernorm")
        if kind == "full_attention":
            attention = f"{at}self_attn."
            tensors |= _attention(attention, size, linear, norms=True)
            tensors |= linear(f"{attention}q_proj", 2 * size.heads * size.head, size.hidden)
        else:
            attention = f"{at}linear_attn."
            tensors |= linear(f"{attention}in_proj_qkvz", 2 * keys + 2 * values, size.hidden)
            tensors |= plain(f"{attention}in_proj_ba", 2 * value_heads, size.hidden)
            tensors |= linear(f"{attention}out_proj", size.hidden, values)
            tensors[f"{attention}conv1d.weight"] = ("BF16", (2 * keys + values, 1, 4))
            tensors |= {f"{attention}{name}": ("BF16", (value_heads,)) for name in ("A_log", "dt_bias")}
            tensors[f"{attention}norm.weight"] = ("BF16", (head,))
        tensors |= plain(f"{at}mlp.gate", size.experts, size.hidden)
        tensors |= plain(f"{at}mlp.shared_expert_gate", 1, size.hidden)
        tensors |= _mlp(f"{at}mlp.shared_expert.", size.width, size, linear)
        tensors |= _experts(f"{at}mlp.experts.", size, linear)
    names = ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_ba", "linear_attn.conv1d")
    bare = [f"model.layers.{n}.{name}" for n in range(size.layers) for name in names]
    return _finish(config, tensors, form, bare, size)


def llama4(form: str = "bf16", size: Size = Size()) -> Built:
    config = _common(
        size,
        "Llama4ForCausalLM",
        "llama4_text",
        num_local_experts=size.experts,
        num_experts_per_tok=1,
        intermediate_size=size.width,
        intermediate_size_mlp=2 * size.width,
        interleave_moe_layer_step=1,
        moe_layers=list(range(size.layers)),
        no_rope_layers=[1] * size.layers,
        attention_chunk_size=2048,
        use_qk_norm=True,
        attn_temperature_tuning=False,
    )
    tensors: Tensors = {}
    for layer in range(size.layers):
        at = f"model.layers.{layer}."
        tensors |= _norms(at, size, "input_layernorm", "post_attention_layernorm")
        tensors |= _attention(f"{at}self_attn.", size, plain)
        tensors |= plain(f"{at}feed_forward.router", size.experts, size.hidden)
        tensors |= _mlp(f"{at}feed_forward.shared_expert.", size.width, size, plain)
        experts = f"{at}feed_forward.experts."
        tensors[f"{experts}gate_up_proj"] = ("BF16", (size.experts, size.hidden, 2 * size.width))
        tensors[f"{experts}down_proj"] = ("BF16", (size.experts, size.width, size.hidden))
    return _finish(config, tensors, form, [], size)


def gpt_oss(form: str = "mxfp4", size: Size = Size(experts=8)) -> Built:
    config = _common(
        size,
        "GptOssForCausalLM",
        "gpt_oss",
        num_local_experts=size.experts,
        num_experts_per_tok=size.top_k,
        experts_per_token=size.top_k,
        intermediate_size=size.width,
        layer_types=["sliding_attention", "full_attention"] * (size.layers // 2),
        sliding_window=128,
        swiglu_limit=7.0,
        attention_bias=True,
        initial_context_length=4096,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    )
    tensors: Tensors = {}
    for layer in range(size.layers):
        at, experts = f"model.layers.{layer}.", f"model.layers.{layer}.mlp.experts."
        tensors |= _norms(at, size, "input_layernorm", "post_attention_layernorm")
        attention = _attention(f"{at}self_attn.", size, plain)
        tensors |= attention
        tensors |= {n.replace("weight", "bias"): ("BF16", shape[:1]) for n, (_, shape) in attention.items()}
        tensors[f"{at}self_attn.sinks"] = ("BF16", (size.heads,))
        tensors[f"{at}mlp.router.weight"] = ("BF16", (size.experts, size.hidden))
        tensors[f"{at}mlp.router.bias"] = ("BF16", (size.experts,))
        for name, out, into in (("gate_up", 2 * size.width, size.hidden), ("down", size.hidden, size.width)):
            blocks = (size.experts, out, into // 32)
            if form == "mxfp4":
                tensors[f"{experts}{name}_proj_blocks"] = ("U8", (*blocks, 16))
                tensors[f"{experts}{name}_proj_scales"] = ("U8", blocks)
            else:
                tensors[f"{experts}{name}_proj"] = ("BF16", (size.experts, into, out))
            tensors[f"{experts}{name}_proj_bias"] = ("BF16", (size.experts, out))
    built = _finish(config, tensors, "bf16", [], size)
    bare = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": bare}
    return built.set(quantization_config=method) if form == "mxfp4" else built


def gemma4(form: str = "bf16", size: Size = Size(head=256, heads=8)) -> Built:
    wide, kinds = 512, ["sliding_attention", "full_attention"] * (size.layers // 2)
    config = _common(
        size,
        "Gemma4ForCausalLM",
        "gemma4_text",
        layer_types=kinds,
        sliding_window=1024,
        num_global_key_value_heads=size.kv_heads,
        global_head_dim=wide,
        attention_k_eq_v=True,
        hidden_activation="gelu_pytorch_tanh",
        enable_moe_block=True,
        num_experts=size.experts,
        top_k_experts=size.top_k,
        moe_intermediate_size=size.width,
        intermediate_size=2 * size.width,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0,
        num_kv_shared_layers=0,
        tie_word_embeddings=True,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
    )
    root = "model.language_model."
    tensors: Tensors = {f"{root}norm.weight": ("BF16", (size.hidden,))}
    tensors |= plain(f"{root}embed_tokens", size.vocab, size.hidden)
    for layer, kind in enumerate(kinds):
        at, head = f"{root}layers.{layer}.", wide if kind == "full_attention" else size.head
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        tensors |= _norms(at, size, *(f"{name}_layernorm" for name in names))
        more = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        tensors |= _norms(at, size, *more)
        tensors |= _attention(f"{at}self_attn.", replace(size, head=head), plain, norms=True)
        if kind == "full_attention":
            del tensors[f"{at}self_attn.v_proj.weight"]
        tensors[f"{at}layer_scalar"] = ("BF16", (1,))
        tensors[f"{at}router.scale"] = ("BF16", (size.hidden,))
        tensors[f"{at}router.per_expert_scale"] = ("BF16", (size.experts,))
        tensors |= plain(f"{at}router.proj", size.experts, size.hidden)
        tensors |= _mlp(f"{at}mlp.", 2 * size.width, size, plain)
        tensors[f"{at}experts.gate_up_proj"] = ("BF16", (size.experts, 2 * size.width, size.hidden))
        tensors[f"{at}experts.down_proj"] = ("BF16", (size.experts, size.hidden, size.width))
    return Built(config, tensors)


def nemotron_h(form: str = "bf16", size: Size = Size(), pattern: str = "MEM*E") -> Built:
    linear = FORMATS[form][0]
    kinds = {"M": "mamba", "E": "moe", "*": "attention"}
    heads, head, groups, state = 16, 64, 8, 128
    inner, convolved = heads * head, heads * head + 2 * groups * state
    config = _common(
        size,
        "NemotronHForCausalLM",
        "nemotron_h",
        num_hidden_layers=len(pattern),
        hybrid_override_pattern=pattern,
        layers_block_type=[kinds[kind] for kind in pattern],
        mlp_hidden_act="relu2",
        mamba_hidden_act="silu",
        mamba_num_heads=heads,
        mamba_head_dim=head,
        n_groups=groups,
        ssm_state_size=state,
        conv_kernel=4,
        chunk_size=128,
        mamba_ssm_cache_dtype="float32",
        n_routed_experts=size.experts,
        num_experts_per_tok=size.top_k,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=size.width,
        moe_shared_expert_intermediate_size=size.width,
        intermediate_size=size.width,
        use_conv_bias=True,
        use_bias=False,
        mlp_bias=False,
        mamba_proj_bias=False,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        layer_norm_epsilon=1e-05,
        norm_eps=1e-05,
        time_step_floor=0.0001,
        time_step_max=0.1,
        time_step_min=0.001,
    )
    tensors: Tensors = {
        "backbone.embeddings.weight": ("BF16", (size.vocab, size.hidden)),
        "backbone.norm_f.weight": ("BF16", (size.hidden,)),
        **plain("lm_head", size.vocab, size.hidden),
    }
    bare = ["lm_head"]
    for layer, kind in enumerate(pattern):
        at = f"backbone.layers.{layer}.mixer."
        tensors[f"backbone.layers.{layer}.norm.weight"] = ("BF16", (size.hidden,))
        if kind == "M":
            tensors |= plain(f"{at}in_proj", inner + convolved + heads, size.hidden)
            tensors |= plain(f"{at}out_proj", size.hidden, inner)
            tensors[f"{at}conv1d.weight"] = ("BF16", (convolved, 1, 4))
            tensors[f"{at}conv1d.bias"] = ("BF16", (convolved,))
            tensors |= {f"{at}{name}": ("BF16", (heads,)) for name in ("A_log", "D", "dt_bias")}
            tensors[f"{at}norm.weight"] = ("BF16", (inner,))
            bare += [f"{at}{name}" for name in ("in_proj", "out_proj", "conv1d")]
        elif kind == "*":
            tensors |= _attention(at, size, plain)
            bare += [f"{at}{name}_proj" for name in "qkvo"]
        else:
            tensors |= plain(f"{at}gate", size.experts, size.hidden)
            tensors[f"{at}gate.e_score_correction_bias"] = ("F32", (size.experts,))
            bare.append(f"{at}gate")
            places = [f"{at}shared_experts.", *(f"{at}experts.{expert}." for expert in range(size.experts))]
            for place in places:
                tensors |= linear(f"{place}up_proj", size.width, size.hidden)
                tensors |= linear(f"{place}down_proj", size.hidden, size.width)
    _, quantization, key = FORMATS[form]
    if quantization is not None:
        config["quantization_config"] = {**quantization, key: bare}
    return Built(config, tensors)


_EVERY = tuple(FORMATS)
ARCHITECTURES: Mapping[str, tuple[Callable[..., Built], tuple[str, ...]]] = {
    "qwen3": (qwen3, _EVERY),
    "mixtral": (mixtral, _EVERY),
    "minimax-m2": (minimax_m2, _EVERY[:6]),
    "glm4": (glm4, _EVERY[:6]),
    "deepseek-v3": (deepseek_v3, ("bf16", "fp8-block", "ct-w4a16")),
    "qwen3-next": (qwen3_next, ("bf16", "fp8-block", "ct-w4a16")),
    "llama4": (llama4, ("bf16",)),
    "gpt-oss": (gpt_oss, ("mxfp4", "bf16")),
    "gemma4": (gemma4, ("bf16",)),
    "nemotron-h": (nemotron_h, ("bf16", "modelopt-nvfp4")),
}
SOUND: Mapping[str, Callable[[], Built]] = {
    f"{name}-{form}": (lambda build=build, form=form: build(form))
    for name, (build, forms) in ARCHITECTURES.items()
    for form in forms
}


@dataclass(frozen=True)
class Planted:
    """A checkpoint or command line with one mistake, and what must be said of it."""

    built: Callable[[], Built]
    names: str
    """What the answer must name: a tensor, a flag or a key."""
    flags: tuple[str, ...] = ()


def _fused(built: Built, *, swapped: bool = False) -> Built:
    """Keep all experts in two tensors a layer, as transformers 5 saves them."""
    size, kept = Size(), {name: entry for name, entry in built.tensors.items() if ".experts." not in name}
    for layer in range(size.layers):
        at = f"model.layers.{layer}.mlp.experts."
        up, down = (2 * size.width, size.hidden), (size.hidden, size.width)
        kept[f"{at}gate_up_proj"] = ("BF16", (size.experts, *(up[::-1] if swapped else up)))
        kept[f"{at}down_proj"] = ("BF16", (size.experts, *(down[::-1] if swapped else down)))
    return replace(built, tensors=kept)


def _quantized_router(form: str) -> Built:
    """Store the router as the other layers are, although config.json takes it out."""
    built, size = qwen3(form).drop("mlp.gate."), Size()
    for layer in range(size.layers):
        built = built.add(**FORMATS[form][0](f"model.layers.{layer}.mlp.gate", size.experts, size.hidden))
    return built


_PROJECTIONS = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))
_EXPERT_7 = "experts.7.down_proj"
PLANTED: Mapping[str, Planted] = {
    # Names and layouts.
    "experts-as-mixtral": Planted(lambda: qwen3().rename(*_PROJECTIONS), "w13_weight"),
    "experts-container": Planted(lambda: qwen3().rename((".experts.", ".moe_experts.")), "moe_experts"),
    "gate-proj-renamed": Planted(lambda: qwen3().rename((".gate_proj.", ".w1_proj.")), "w1_proj"),
    "router-renamed": Planted(lambda: qwen3().rename((".mlp.gate.", ".mlp.router.")), "router"),
    "attention-renamed": Planted(lambda: qwen3().rename((".self_attn.", ".attention.")), "attention"),
    "prefix": Planted(lambda: qwen3().rename(("model.", "language_model.model.")), "language_model"),
    "no-final-norm": Planted(lambda: qwen3().drop("model.norm."), "norm"),
    "no-lm-head": Planted(lambda: qwen3().drop("lm_head"), "lm_head"),
    "fused-swapped": Planted(lambda: _fused(qwen3(), swapped=True), "experts"),
    "fused-foreign": Planted(
        lambda: _fused(qwen3()).rename(
            (".gate_up_proj", ".w13_stacked"), (".experts.down_proj", ".experts.w2_stacked")
        ),
        "stacked",
    ),
    "llama4-split": Planted(lambda: llama4().rename(("gate_up_proj", "w13_merged")), "w13_merged"),
    "gpt-oss-blocks-renamed": Planted(lambda: gpt_oss().rename(("_blocks", "_packed")), "packed"),
    # Experts.
    "expert-missing": Planted(lambda: qwen3().drop(_EXPERT_7), "w2_weight"),
    "more-experts-in-config": Planted(lambda: qwen3().set(num_experts=16), "gate"),
    "fewer-experts-in-config": Planted(lambda: qwen3().set(num_experts=4), "gate"),
    "deepseek-expert-missing": Planted(
        lambda: deepseek_v3().drop("layers.2.mlp.experts.3.up_proj.weight"), "w13_weight"
    ),
    # Scales.
    "fp8-no-scales": Planted(
        lambda: qwen3("fp8-block").drop("down_proj.weight_scale_inv"), "w2_weight_scale_inv"
    ),
    "fp8-scale-renamed": Planted(
        lambda: qwen3("fp8-block").rename(("weight_scale_inv", "weight_scale")), "weight_scale"
    ),
    "nvfp4-no-global-scale": Planted(
        lambda: qwen3("modelopt-nvfp4").drop("experts.3.up_proj.weight_scale_2"),
        "weight_scale_2",
    ),
    "nvfp4-no-block-scale": Planted(
        lambda: mixtral("modelopt-nvfp4").drop(".w2.weight_scale"), "w2_weight_scale"
    ),
    "ct-nvfp4-no-global-scale": Planted(
        lambda: qwen3("ct-nvfp4").drop("down_proj.weight_global_scale"), "global_scale"
    ),
    "w4a16-no-scales": Planted(lambda: qwen3("ct-w4a16").drop("down_proj.weight_scale"), "scale"),
    "channel-no-scales": Planted(
        lambda: glm4("fp8-channel").drop("experts.5.gate_proj.weight_scale"), "weight_scale"
    ),
    # Shapes.
    "expert-too-small": Planted(lambda: qwen3().reshape(_EXPERT_7, (256, 960)), "w2_weight"),
    "expert-too-large": Planted(lambda: qwen3().reshape(_EXPERT_7, (256, 1280)), _EXPERT_7),
    "k-proj-too-large": Planted(lambda: qwen3().reshape("k_proj", (2048, 256)), "k_proj"),
    "other-width-in-config": Planted(lambda: qwen3().set(moe_intermediate_size=768), "experts"),
    "q-proj-other-hidden": Planted(lambda: qwen3().reshape("q_proj", (2048, 512)), "q_proj"),
    "other-hidden-in-config": Planted(lambda: mixtral().set(hidden_size=512), "model.embed_tokens"),
    "fewer-words": Planted(lambda: qwen3().reshape("lm_head", (384, 256)), "lm_head"),
    "fp8-scales-of-other-blocks": Planted(
        lambda: qwen3("fp8-block").reshape("experts.1.up_proj.weight_scale_inv", (16, 4)), "up_proj"
    ),
    # Types.
    "fp8-not-declared": Planted(
        lambda: replace(
            made := qwen3("fp8-block"),
            config={key: value for key, value in made.config.items() if key != "quantization_config"},
        ),
        "weight",
    ),
    "bf16-declared-fp8": Planted(
        lambda: qwen3().set(quantization_config=qwen3("fp8-block").config["quantization_config"]),
        "scale",
    ),
    # Blocks, groups and sizes that do not divide.
    "block-at-tp": Planted(
        lambda: qwen3("fp8-block", Size(heads=8, head=64)), "64", flags=("--tensor-parallel-size", "8")
    ),
    "group-at-tp": Planted(
        lambda: qwen3("ct-w4a16", Size(heads=8, head=64)), "64", flags=("--tensor-parallel-size", "8")
    ),
    "heads-at-tp": Planted(qwen3, "3", flags=("--tensor-parallel-size", "3")),
    "stages": Planted(qwen3, "", flags=("--pipeline-parallel-size", "4")),
    # Ignore lists and methods.
    "ignore-list-empty": Planted(lambda: qwen3("modelopt-nvfp4").quantize(ignore=["lm_head"]), "mlp.gate"),
    "router-quantized": Planted(lambda: _quantized_router("modelopt-nvfp4"), "mlp.gate"),
    "gptq-expert-plain": Planted(
        lambda: qwen3("gptq").drop(_EXPERT_7).add(**plain(f"model.layers.0.mlp.{_EXPERT_7}", 256, 1024)),
        _EXPERT_7,
    ),
    "unknown-method": Planted(
        lambda: qwen3().set(quantization_config={"quant_method": "hqq_next"}), "hqq_next"
    ),
    "unknown-architecture": Planted(lambda: qwen3().set(architectures=["Qwen9MoeForCausalLM"]), "Qwen9Moe"),
    "unknown-model-type": Planted(lambda: qwen3().set(model_type="qwen9_moe"), "qwen9_moe"),
    "method-of-another": Planted(qwen3, "awq", flags=("--quantization", "awq")),
    # Drafts and flags.
    "draft-head-missing": Planted(
        lambda: deepseek_v3(draft=1).drop("model.layers.3."),
        "layer 3",
        flags=("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}'),
    ),
    "draft-experts-missing": Planted(
        lambda: deepseek_v3(draft=1).drop("model.layers.3.mlp.experts.2."),
        "w13_weight",
        flags=("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}'),
    ),
    "misspelt-flag": Planted(qwen3, "--tensor-paralel", flags=("--tensor-paralel", "2")),
    "unknown-backend": Planted(qwen3, "cutlas", flags=("--moe-backend", "cutlas")),
    "length": Planted(qwen3, "max_model_len", flags=("--max-model-len", "100000")),
}


def write_headers(folder: Path, built: Built) -> Path:
    """Write config.json and one safetensors file whose data is a hole of its true size."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("config.json").write_text(json.dumps(built.config, indent=1))
    entries, at = {}, 0
    for name, (dtype, shape) in built.tensors.items():
        size = math.prod(shape) * BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    with folder.joinpath("model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return folder
