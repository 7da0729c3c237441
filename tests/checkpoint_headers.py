"""Checkpoints of ten architectures as names, types and shapes: headers in files with holes.

`SOUND` are as their publishers write them; `PLANTED` each have one mistake. Sizes are small unless a builder
gets its own, and everything that a release asks to be divisible by 128 is, for eight ranks, too.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


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
        return self.add(**{n: (dtype or old, shape) for n, (old, _) in self.tensors.items() if part in n})

    def add(self, **tensors: tuple[str, tuple[int, ...]]) -> Built:
        return replace(self, tensors={**self.tensors, **tensors})

    def set(self, **config: Any) -> Built:
        return replace(self, config={**self.config, **config})

    def unset(self, key: str) -> Built:
        return replace(self, config={name: value for name, value in self.config.items() if name != key})

    def quantize(self, **config: Any) -> Built:
        return self.set(quantization_config={**self.config["quantization_config"], **config})


def _group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, form: str) -> dict[str, Any]:
    activations = {"input_activations": inputs, "output_activations": None}
    group = {"targets": ["Linear"], "weights": weights, **activations}
    method = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**method, "config_groups": {"group_0": group}}


_FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_MX = {"symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
_OPT = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_FP8_WEIGHTS = {**_FP8, "strategy": "channel", "dynamic": False}
_FP8_INPUTS = {**_FP8, "strategy": "token", "dynamic": True}
_FP8_SCALARS = "F8_E4M3 weight out in\nF32 weight_scale\nF32 input_scale"
_CT_NVFP4 = "U8 weight_packed out in/2\nF8_E4M3 weight_scale out in/16\nF32 weight_global_scale 1"
_MODELOPT_NVFP4 = "U8 weight out in/2\nF8_E4M3 weight_scale out in/16\nF32 weight_scale_2\nF32 input_scale"
_PLAIN = "BF16 weight out in"
FORMATS: Mapping[str, tuple[str, Mapping[str, Any] | None, str]] = {
    "bf16": (_PLAIN, None, ""),
    "fp8-block": ("F8_E4M3 weight out in\nF32 weight_scale_inv out/128 in/128", {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    }, "modules_to_not_convert"),
    "fp8-channel": (
        "F8_E4M3 weight out in\nF32 weight_scale out 1",
        _group(_FP8_WEIGHTS, _FP8_INPUTS, "float-quantized"), "ignore",
    ),
    "modelopt-nvfp4": (_MODELOPT_NVFP4, {
        "quant_method": "modelopt", "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.40.0"},
        "config_groups": {"group_0": {"input_activations": _OPT, "weights": _OPT, "targets": ["Linear"]}},
    }, "ignore"),
    "ct-nvfp4": (
        f"{_CT_NVFP4}\nF32 input_global_scale 1",
        _group({**_FP4, "dynamic": False}, {**_FP4, "dynamic": "local"}, "nvfp4-pack-quantized"), "ignore",
    ),
    "ct-w4a16": (
        "I32 weight_packed out in/8\nI64 weight_shape 2\nBF16 weight_scale out in/128",
        _group({**_INT4, "dynamic": False}, None, "pack-quantized"), "ignore",
    ),
    "gptq": ("I32 qweight in/8 out\nI32 qzeros in/128 out/8\nBF16 scales in/128 out\nI32 g_idx in", {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
        "lm_head": False,
    }, ""),
    "modelopt-fp8": (_FP8_SCALARS, {
        "quant_method": "modelopt", "quant_algo": "FP8",
        "producer": {"name": "modelopt", "version": "0.40.0"},
    }, "ignore"),
    "ct-w8a8": ("I8 weight out in\nBF16 weight_scale out 1", _group(
        {**_INT8, "strategy": "channel", "dynamic": False}, {**_INT8, "strategy": "token", "dynamic": True},
        "int-quantized",
    ), "ignore"),
    "fp8-static": (_FP8_SCALARS, {"quant_method": "fp8", "activation_scheme": "static"}, "ignored_layers"),
    "ct-fp8-block": ("F8_E4M3 weight out in\nBF16 weight_scale out/128 in/128", _group(
        {**_FP8, "strategy": "block", "block_structure": [128, 128], "dynamic": False},
        {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True}, "float-quantized",
    ), "ignore"),
    "ct-w8a16": ("I32 weight_packed out in/4\nI64 weight_shape 2\nBF16 weight_scale out 1", _group(
        {**_INT8, "strategy": "channel", "group_size": -1, "dynamic": False}, None, "pack-quantized",
    ), "ignore"),
    "ct-nvfp4a16": (_CT_NVFP4, _group({**_FP4, "dynamic": False}, None, "nvfp4-pack-quantized"), "ignore"),
    "ct-mxfp4": (
        "U8 weight_packed out in/2\nU8 weight_scale out in/32",
        _group({"num_bits": 4, "type": "float", **_MX}, None, "mxfp4-pack-quantized"), "ignore",
    ),
    "modelopt-mxfp8": ("F8_E4M3 weight out in\nU8 weight_scale out in/32", {
        "quant_method": "modelopt", "quant_algo": "MXFP8",
        "producer": {"name": "modelopt", "version": "0.40.0"},
    }, "ignore"),
    "awq": ("I32 qweight in out/8\nI32 qzeros in/128 out/8\nBF16 scales in/128 out", {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
    }, "modules_to_not_convert"),
}  # fmt: skip
"""Name -> (the tensors of a linear layer, quantization_config, the key of layers that are not quantized)."""

# Tensors are rows of text: a kind, a name in which `*` is each expert, and sizes. The kind is a type, `norm`
# of the hidden size, `plain` or `linear` for a matrix (out, in), or the projections of an MLP.

_MLP = {
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "w1w3w2": ("w1", "w3", "w2"),
    "up-down": ("up_proj", "down_proj"),
}
_NORMS = "norm input_layernorm\nnorm post_attention_layernorm\n"
_ATTENTION = """
    linear self_attn.q_proj heads*head hidden
    linear self_attn.k_proj kv_heads*head hidden
    linear self_attn.v_proj kv_heads*head hidden
    linear self_attn.o_proj hidden heads*head
"""
_HEAD_NORMS = """
    BF16 self_attn.q_norm.weight head
    BF16 self_attn.k_norm.weight head
"""
_EXPERTS = """
    plain mlp.gate experts hidden
    mlp mlp.experts.* width
"""
_DENSE_FIRST = {
    "dense": "mlp mlp 2*width",
    "sparse": """
        plain mlp.gate experts hidden
        F32 mlp.gate.e_score_correction_bias experts
        mlp mlp.shared_experts width
        mlp mlp.experts.* width
    """,
}
"""The first layer is dense, the others have a shared expert and a bias of the router."""


def _number(text: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a sum of products, such as ``2*width+head``; a quotient is rounded up."""
    total = 0
    for term in text.split("+"):
        product, _, divisor = term.partition("/")
        value = math.prod(sizes[part] if part in sizes else int(part) for part in product.split("*"))
        total += -(-value // int(divisor or 1))
    return total


def _tensors(rows: str, at: str, sizes: Mapping[str, int], linear: str = _PLAIN) -> Tensors:
    """Return the tensors of rows, with `at` before their names; `linear` are the rows of a linear layer."""
    made: Tensors = {}
    for kind, name, *texts in filter(None, map(str.split, rows.splitlines())):
        shape = tuple(_number(text, sizes) for text in texts)
        for expert in range(sizes["experts"] if "*" in name else 1):
            full = at + name.replace("*", str(expert))
            if kind in BYTES:
                made[full] = (kind, shape)
            elif kind == "norm":
                made[f"{full}.weight"] = ("BF16", (sizes["hidden"],))
            elif kind in _MLP:
                *sides, down = _MLP[kind]
                for side in sides:
                    made |= _store(linear, f"{full}.{side}", *shape, sizes["hidden"])
                made |= _store(linear, f"{full}.{down}", sizes["hidden"], *shape)
            else:
                made |= _store(linear if kind == "linear" else _PLAIN, full, *shape)
    return made


def _store(linear: str, name: str, out: int, into: int) -> Tensors:
    return _tensors(linear, f"{name}.", {"out": out, "in": into})


def _common(size: Size, architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": model_type, "hidden_size": size.hidden,
        "vocab_size": size.vocab, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.head, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False, "bos_token_id": 1,
        "eos_token_id": 2, **more,
    }  # fmt: skip


def _build(
    config: dict[str, Any],
    form: str,
    size: Size,
    kinds: Sequence[str],
    rows: Mapping[str, str],
    bare: Mapping[str, str],
    *,
    first: str = "plain model.embed_tokens vocab hidden",
    at: str = "model.layers.",
    last: str = "norm model.norm\nplain lm_head vocab hidden",
    **more: int,
) -> Built:
    """Return the model whose layers are of these `kinds`.

    Args:
        rows: the rows of each kind of layer.
        bare: the modules of each kind of layer that are not quantized.
        first: rows before the layers, which are below `at`, and `last` after them.
        more: sizes that only these rows have.
    """
    linear, quantization, key = FORMATS.get(form, FORMATS["bf16"])
    sizes = {**vars(size), **more}
    tensors = _tensors(first, "", sizes, linear)
    for layer, kind in enumerate(kinds):
        tensors |= _tensors(rows[kind], f"{at}{layer}.", sizes, linear)
    if quantization is not None:
        names = [f"{at}{n}.{name}" for n, kind in enumerate(kinds) for name in bare.get(kind, "").split()]
        config["quantization_config"] = {**quantization, **({key: ["lm_head", *names]} if key else {})}
    return Built(config, tensors | _tensors(last, "", sizes, linear))


def qwen3(form: str = "bf16", size: Size = Size()) -> Built:
    config = _common(
        size, "Qwen3MoeForCausalLM", "qwen3_moe", num_experts=size.experts, num_experts_per_tok=size.top_k,
        moe_intermediate_size=size.width, intermediate_size=size.width, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    rows = _NORMS + _ATTENTION + _HEAD_NORMS + _EXPERTS
    return _build(config, form, size, ["moe"] * size.layers, {"moe": rows}, {"moe": "mlp.gate"})


def mixtral(form: str = "bf16", size: Size = Size()) -> Built:
    config = _common(
        size, "MixtralForCausalLM", "mixtral", num_local_experts=size.experts, num_experts_per_tok=size.top_k,
        intermediate_size=size.width,
    )  # fmt: skip
    rows = f"""{_NORMS}{_ATTENTION}
        plain block_sparse_moe.gate experts hidden
        w1w3w2 block_sparse_moe.experts.* width
    """
    return _build(config, form, size, ["moe"] * size.layers, {"moe": rows}, {"moe": "block_sparse_moe.gate"})


def minimax_m2(form: str = "bf16", size: Size = Size()) -> Built:
    made, tensors = mixtral(form, size), {}
    rows = """
        BF16 self_attn.q_norm.weight heads*head
        BF16 self_attn.k_norm.weight kv_heads*head
        F32 block_sparse_moe.e_score_correction_bias experts
    """
    for layer in range(size.layers):
        tensors |= _tensors(rows, f"model.layers.{layer}.", vars(size))
    return made.add(**tensors).set(
        architectures=["MiniMaxM2ForCausalLM"], model_type="minimax_m2", rotary_dim=size.head // 2,
        use_qk_norm=True, use_routing_bias=True, scoring_func="sigmoid",
    )  # fmt: skip


def glm4(form: str = "bf16", size: Size = Size(layers=3)) -> Built:
    config = _common(
        size, "Glm4MoeForCausalLM", "glm4_moe", n_routed_experts=size.experts, num_experts_per_tok=size.top_k,
        n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=True,
        moe_intermediate_size=size.width, intermediate_size=2 * size.width, first_k_dense_replace=1,
        use_qk_norm=True, partial_rotary_factor=0.5, num_nextn_predict_layers=0,
    )  # fmt: skip
    rows = {kind: _NORMS + _ATTENTION + _HEAD_NORMS + mlp for kind, mlp in _DENSE_FIRST.items()}
    kinds = ["dense", *["sparse"] * (size.layers - 1)]
    return _build(config, form, size, kinds, rows, {"sparse": "mlp.gate"})


def deepseek_v3(form: str = "fp8-block", size: Size = Size(layers=3), draft: int = 0) -> Built:
    ranks = {"nope": 128, "rope": 64, "value": 128, "rank_q": 256, "rank_kv": 512}
    config = _common(
        size, "DeepseekV3ForCausalLM", "deepseek_v3", n_routed_experts=size.experts,
        num_experts_per_tok=size.top_k, n_shared_experts=1, n_group=2, topk_group=1, topk_method="noaux_tc",
        scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
        moe_intermediate_size=size.width, intermediate_size=2 * size.width, first_k_dense_replace=1,
        moe_layer_freq=1, q_lora_rank=ranks["rank_q"], kv_lora_rank=ranks["rank_kv"],
        qk_nope_head_dim=ranks["nope"], qk_rope_head_dim=ranks["rope"], v_head_dim=ranks["value"],
        num_nextn_predict_layers=draft,
    )  # fmt: skip
    del config["head_dim"]
    attention = """
        BF16 self_attn.q_a_layernorm.weight rank_q
        BF16 self_attn.kv_a_layernorm.weight rank_kv
        linear self_attn.q_a_proj rank_q hidden
        linear self_attn.q_b_proj heads*nope+heads*rope rank_q
        linear self_attn.kv_a_proj_with_mqa rank_kv+rope hidden
        linear self_attn.kv_b_proj heads*nope+heads*value rank_kv
        linear self_attn.o_proj hidden heads*value
    """
    rows = {kind: f"{_NORMS}{attention}{mlp}" for kind, mlp in _DENSE_FIRST.items()}
    rows["draft"] = f"""{rows["sparse"]}
        norm enorm
        norm hnorm
        norm shared_head.norm
        plain eh_proj hidden 2*hidden
        plain shared_head.head vocab hidden
        plain embed_tokens vocab hidden
    """
    kinds = ["dense", *["sparse"] * (size.layers - 1), *["draft"] * draft]
    bare = dict.fromkeys(("sparse", "draft"), "mlp.gate")
    return _build(config, form, size, kinds, rows, bare, **ranks)


def qwen3_next(form: str = "bf16", size: Size = Size(layers=4)) -> Built:
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(size.layers)]
    config = _common(
        size, "Qwen3NextForCausalLM", "qwen3_next", num_experts=size.experts, num_experts_per_tok=size.top_k,
        moe_intermediate_size=size.width, shared_expert_intermediate_size=size.width,
        intermediate_size=size.width, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        layer_types=kinds, full_attention_interval=4, partial_rotary_factor=0.25, linear_num_key_heads=8,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )  # fmt: skip
    linear_attention = """
        linear linear_attn.in_proj_qkvz 2*keys+2*values hidden
        plain linear_attn.in_proj_ba 32 hidden
        linear linear_attn.out_proj hidden values
        BF16 linear_attn.conv1d.weight 2*keys+values 1 4
        BF16 linear_attn.A_log 16
        BF16 linear_attn.dt_bias 16
        BF16 linear_attn.norm.weight 128
    """
    moe = """
        plain mlp.gate experts hidden
        plain mlp.shared_expert_gate 1 hidden
        mlp mlp.shared_expert width
        mlp mlp.experts.* width
    """
    full_attention = _ATTENTION.replace("q_proj ", "q_proj 2*") + _HEAD_NORMS
    rows = {"full_attention": full_attention, "linear_attention": linear_attention}
    bare = "mlp.gate mlp.shared_expert_gate linear_attn.in_proj_ba linear_attn.conv1d"
    return _build(
        config, form, size, kinds, {kind: _NORMS + attention + moe for kind, attention in rows.items()},
        dict.fromkeys(rows, bare), keys=8 * 128, values=16 * 128,
    )  # fmt: skip


def llama4(form: str = "bf16", size: Size = Size()) -> Built:
    config = _common(
        size, "Llama4ForCausalLM", "llama4_text", num_local_experts=size.experts, num_experts_per_tok=1,
        intermediate_size=size.width, intermediate_size_mlp=2 * size.width, interleave_moe_layer_step=1,
        moe_layers=list(range(size.layers)), no_rope_layers=[1] * size.layers, attention_chunk_size=2048,
        use_qk_norm=True, attn_temperature_tuning=False,
    )  # fmt: skip
    fused = """
        BF16 feed_forward.experts.gate_up_proj experts hidden 2*width
        BF16 feed_forward.experts.down_proj experts width hidden
    """
    # vLLM turns q_proj and k_proj, and cannot turn the scales of blocks: publishers leave attention as it is.
    rows = f"""{_NORMS}{_ATTENTION.replace("linear", "plain")}
        plain feed_forward.router experts hidden
        mlp feed_forward.shared_expert width
        {fused if form == "bf16" else "mlp feed_forward.experts.* width"}
    """
    bare = " ".join(f"self_attn.{side}_proj" for side in "qkvo")
    return _build(
        config, form, size, ["moe"] * size.layers, {"moe": rows}, {"moe": f"feed_forward.router {bare}"}
    )


def gpt_oss(form: str = "mxfp4", size: Size = Size(experts=8)) -> Built:
    yarn = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    config = _common(
        size, "GptOssForCausalLM", "gpt_oss", num_local_experts=size.experts, num_experts_per_tok=size.top_k,
        experts_per_token=size.top_k, intermediate_size=size.width,
        layer_types=["sliding_attention", "full_attention"] * (size.layers // 2), sliding_window=128,
        swiglu_limit=7.0, attention_bias=True, initial_context_length=4096, rope_scaling=yarn,
    )  # fmt: skip
    bf16 = "BF16 mlp.experts.{0}_proj experts {2} {1}"
    mxfp4 = """
        U8 mlp.experts.{0}_proj_blocks experts {1} {2}/32 16
        U8 mlp.experts.{0}_proj_scales experts {1} {2}/32
    """
    experts = (mxfp4 if form == "mxfp4" else bf16) + "\nBF16 mlp.experts.{0}_proj_bias experts {1}\n"
    rows = f"""{_NORMS}{_ATTENTION}
        BF16 self_attn.q_proj.bias heads*head
        BF16 self_attn.k_proj.bias kv_heads*head
        BF16 self_attn.v_proj.bias kv_heads*head
        BF16 self_attn.o_proj.bias hidden
        BF16 self_attn.sinks heads
        BF16 mlp.router.weight experts hidden
        BF16 mlp.router.bias experts
        {experts.format("gate_up", "2*width", "hidden")}
        {experts.format("down", "hidden", "width")}
    """
    built = _build(config, form, size, ["moe"] * size.layers, {"moe": rows}, {})
    bare = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": bare}
    return built.set(quantization_config=method) if form == "mxfp4" else built


def gemma4(form: str = "bf16", size: Size = Size(head=256, heads=8)) -> Built:
    kinds = ["sliding_attention", "full_attention"] * (size.layers // 2)
    long = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": long}
    config = _common(
        size, "Gemma4ForCausalLM", "gemma4_text", layer_types=kinds, sliding_window=1024,
        num_global_key_value_heads=size.kv_heads, global_head_dim=512, attention_k_eq_v=True,
        hidden_activation="gelu_pytorch_tanh", enable_moe_block=True, num_experts=size.experts,
        top_k_experts=size.top_k, moe_intermediate_size=size.width, intermediate_size=2 * size.width,
        hidden_size_per_layer_input=0, final_logit_softcapping=30.0, num_kv_shared_layers=0,
        tie_word_embeddings=True, rope_parameters=rope,
    )  # fmt: skip
    norms = """
        norm input_layernorm
        norm post_attention_layernorm
        norm pre_feedforward_layernorm
        norm post_feedforward_layernorm
        norm post_feedforward_layernorm_1
        norm post_feedforward_layernorm_2
        norm pre_feedforward_layernorm_2
    """
    full_attention = """
        linear self_attn.q_proj heads*512 hidden
        linear self_attn.k_proj kv_heads*512 hidden
        linear self_attn.o_proj hidden heads*512
        BF16 self_attn.q_norm.weight 512
        BF16 self_attn.k_norm.weight 512
    """
    fused = """
        BF16 experts.gate_up_proj experts 2*width hidden
        BF16 experts.down_proj experts hidden width
    """
    moe = f"""
        BF16 layer_scalar 1
        BF16 router.scale hidden
        BF16 router.per_expert_scale experts
        plain router.proj experts hidden
        mlp mlp 2*width
        {fused if form == "bf16" else "mlp experts.* width"}
    """
    rows = {"sliding_attention": _ATTENTION + _HEAD_NORMS, "full_attention": full_attention}
    root = "model.language_model."
    return _build(
        config, form, size, kinds, {kind: norms + attention + moe for kind, attention in rows.items()},
        dict.fromkeys(rows, "router.proj"), first=f"norm {root}norm\nplain {root}embed_tokens vocab hidden",
        at=f"{root}layers.", last="",
    )  # fmt: skip


def nemotron_h(form: str = "bf16", size: Size = Size(), pattern: str = "MEM*E") -> Built:
    names = {"M": "mamba", "E": "moe", "*": "attention"}
    config = _common(
        size, "NemotronHForCausalLM", "nemotron_h", num_hidden_layers=len(pattern),
        hybrid_override_pattern=pattern, layers_block_type=[names[kind] for kind in pattern],
        mlp_hidden_act="relu2", mamba_hidden_act="silu", mamba_num_heads=16, mamba_head_dim=64, n_groups=8,
        ssm_state_size=128, conv_kernel=4, chunk_size=128, mamba_ssm_cache_dtype="float32",
        n_routed_experts=size.experts, num_experts_per_tok=size.top_k, n_shared_experts=1, n_group=1,
        topk_group=1, moe_intermediate_size=size.width, moe_shared_expert_intermediate_size=size.width,
        intermediate_size=size.width, use_conv_bias=True, use_bias=False, mlp_bias=False,
        mamba_proj_bias=False, norm_topk_prob=True, routed_scaling_factor=2.5, layer_norm_epsilon=1e-05,
        norm_eps=1e-05, time_step_floor=0.0001, time_step_max=0.1, time_step_min=0.001,
    )  # fmt: skip
    rows = {
        "M": """
            norm norm
            plain mixer.in_proj inner+convolved+16 hidden
            plain mixer.out_proj hidden inner
            BF16 mixer.conv1d.weight convolved 1 4
            BF16 mixer.conv1d.bias convolved
            BF16 mixer.A_log 16
            BF16 mixer.D 16
            BF16 mixer.dt_bias 16
            BF16 mixer.norm.weight inner
        """,
        "*": "norm norm\n" + _ATTENTION.replace("linear self_attn.", "plain mixer."),
        "E": """
            norm norm
            plain mixer.gate experts hidden
            F32 mixer.gate.e_score_correction_bias experts
            up-down mixer.shared_experts width
            up-down mixer.experts.* width
        """,
    }
    bare = {
        "M": "mixer.in_proj mixer.out_proj mixer.conv1d",
        "*": "mixer.q_proj mixer.k_proj mixer.v_proj mixer.o_proj",
        "E": "mixer.gate",
    }
    first = """
        BF16 backbone.embeddings.weight vocab hidden
        norm backbone.norm_f
        plain lm_head vocab hidden
    """
    return _build(
        config, form, size, pattern, rows, bare, first=first, at="backbone.layers.", last="",
        inner=16 * 64, convolved=16 * 64 + 2 * 8 * 128,
    )  # fmt: skip


_EVERY = tuple(FORMATS)[:7]
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
_NEVER_READ = {"gpt-oss": tuple(FORMATS), "gemma4": ("gptq",)}
"""Formats of these that no release reads for an architecture."""
MORE: Mapping[str, Callable[[], Built]] = {
    f"{name}-{form}": (lambda build=build, form=form: build(form))
    for name, (build, forms) in ARCHITECTURES.items()
    for form in FORMATS
    if form not in (*forms, *_NEVER_READ.get(name, ()))
}
"""Sound checkpoints in further formats, which only preflight is asked about."""
SINCE: Mapping[str, str] = {
    "llama4-awq": "0.27.1",
    "modelopt-mxfp8": "0.27.1",
    "llama4-ct-w8a16": "0.27.1",
    **{f"nemotron-h-{form}": "0.30.0" for form in ("fp8-block", "gptq", "fp8-static", "ct-mxfp4", "awq")},
    **{
        f"deepseek-v3-{form}": "0.19.1" for form in FORMATS if form == "fp8-channel" or form.startswith("ct-")
    },
}
"""End of a name -> the first of the asked releases that reads it at every size.

0.17.1 finds no scheme of compressed-tensors for DeepSeek's fused projection. 0.21.0 raises for experts in
MXFP8, and for Llama 4 in AWQ with expert parallelism. Up to 0.27.1 some methods keep half of the memory of
Nemotron-H's experts for a gate that these do not have.
"""


@dataclass(frozen=True)
class Planted:
    """A checkpoint or command line with one mistake, and what must be said of it."""

    built: Callable[[], Built]
    names: str
    """A regular expression of what the answer must name: a tensor, a flag or a key."""
    flags: tuple[str, ...] = ()


def _fused(built: Built, *, swapped: bool = False) -> Built:
    """Keep all experts in two tensors a layer, as transformers 5 saves them."""
    kept: Tensors = {}
    for name, entry in built.tensors.items():
        at, inside, rest = name.partition(".experts.")
        if not inside:
            kept[name] = entry
        elif rest in ("0.gate_proj.weight", "0.w1.weight"):
            width, hidden = entry[1]
            experts = len({each.split(".")[-3] for each in built.tensors if each.startswith(f"{at}{inside}")})
            up, down = (2 * width, hidden), (hidden, width)
            kept[f"{at}.experts.gate_up_proj"] = ("BF16", (experts, *(up[::-1] if swapped else up)))
            kept[f"{at}.experts.down_proj"] = ("BF16", (experts, *(down[::-1] if swapped else down)))
    return replace(built, tensors=kept)


FUSED: Mapping[str, Callable[[], Built]] = {
    f"{name}-fused": (lambda name=name: _fused(SOUND[f"{name}-bf16"]()))
    for name in ("qwen3", "mixtral", "minimax-m2", "glm4", "deepseek-v3", "qwen3-next")
}
"""A layout that some releases read, and others skip or refuse."""


def _quantized_router(form: str) -> Built:
    """Store the router as the other layers are, although config.json takes it out."""
    built, size = qwen3(form).drop("mlp.gate."), Size()
    for layer in range(size.layers):
        name = f"model.layers.{layer}.mlp.gate"
        built = built.add(**_store(FORMATS[form][0], name, size.experts, size.hidden))
    return built


_PROJECTIONS = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))
_STACKED = ((".gate_up_proj", ".w13_stacked"), (".experts.down_proj", ".experts.w2_stacked"))
_EXPERT_7 = "experts.7.down_proj"
_WHOLE_EXPERT_7 = _store(_PLAIN, f"model.layers.0.mlp.{_EXPERT_7}", 256, 1024)
_DECLARED_FP8 = qwen3("fp8-block").config["quantization_config"]
_NARROW, _EIGHT_RANKS = Size(heads=8, head=64), ("--tensor-parallel-size", "8")
_DRAFT = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}')
_ROWS: Mapping[str, tuple[Any, ...]] = {
    # Names and layouts.
    "experts-as-mixtral": (lambda: qwen3().rename(*_PROJECTIONS), "w13_weight|w1.weight"),
    "experts-container": (lambda: qwen3().rename((".experts.", ".moe_experts.")), "moe_experts"),
    "gate-proj-renamed": (lambda: qwen3().rename((".gate_proj.", ".w1_proj.")), "w1_proj"),
    "router-renamed": (lambda: qwen3().rename((".mlp.gate.", ".mlp.router.")), "router"),
    "attention-renamed": (lambda: qwen3().rename((".self_attn.", ".attention.")), "attention"),
    "prefix": (lambda: qwen3().rename(("model.", "language_model.model.")), "language_model"),
    "no-final-norm": (lambda: qwen3().drop("model.norm."), "norm"),
    "no-lm-head": (lambda: qwen3().drop("lm_head"), "lm_head"),
    "fused-swapped": (lambda: _fused(qwen3(), swapped=True), "experts"),
    "fused-foreign": (lambda: _fused(qwen3()).rename(*_STACKED), "stacked"),
    "llama4-split": (lambda: llama4().rename(("gate_up_proj", "w13_merged")), "w13_merged"),
    "gpt-oss-blocks-renamed": (lambda: gpt_oss().rename(("_blocks", "_packed")), "packed"),
    # Experts.
    "expert-missing": (lambda: qwen3().drop(_EXPERT_7), "w2_weight"),
    "more-experts-in-config": (lambda: qwen3().set(num_experts=16), "gate"),
    "fewer-experts-in-config": (lambda: qwen3().set(num_experts=4), "gate"),
    "deepseek-expert-missing": (lambda: deepseek_v3().drop("2.mlp.experts.3.up_proj.weight"), "w13_weight"),
    # Scales.
    "fp8-no-scales": (lambda: qwen3("fp8-block").drop("down_proj.weight_scale_"), "w2_weight_scale_inv"),
    "fp8-scale-renamed": (lambda: qwen3("fp8-block").rename(("_scale_inv", "_scale")), "weight_scale"),
    "nvfp4-no-global-scale": (
        lambda: qwen3("modelopt-nvfp4").drop("experts.3.up_proj.weight_scale_2"), "weight_scale_2",
    ),
    "nvfp4-no-block-scale": (lambda: mixtral("modelopt-nvfp4").drop(".w2.weight_scale"), "w2_weight_scale"),
    "ct-nvfp4-no-global-scale": (
        lambda: qwen3("ct-nvfp4").drop("down_proj.weight_global_scale"), "global_scale",
    ),
    "w4a16-no-scales": (lambda: qwen3("ct-w4a16").drop("down_proj.weight_scale"), "scale"),
    "channel-no-scales": (
        lambda: glm4("fp8-channel").drop("experts.5.gate_proj.weight_scale"), "weight_scale",
    ),
    # Shapes.
    "expert-too-small": (lambda: qwen3().reshape(_EXPERT_7, (256, 960)), "w2_weight|7.down_proj"),
    "expert-too-large": (lambda: qwen3().reshape(_EXPERT_7, (256, 1280)), _EXPERT_7),
    "k-proj-too-large": (lambda: qwen3().reshape("k_proj", (2048, 256)), "k_proj"),
    "other-width-in-config": (lambda: qwen3().set(moe_intermediate_size=768), "experts"),
    "q-proj-other-hidden": (lambda: qwen3().reshape("q_proj", (2048, 512)), "q_proj"),
    "other-hidden-in-config": (lambda: mixtral().set(hidden_size=512), "lm_head"),
    "fewer-words": (lambda: qwen3().reshape("lm_head", (384, 256)), "lm_head"),
    "fp8-scales-of-other-blocks": (
        lambda: qwen3("fp8-block").reshape("experts.1.up_proj.weight_scale_inv", (16, 4)), "up_proj",
    ),
    # Types.
    "fp8-not-declared": (lambda: qwen3("fp8-block").unset("quantization_config"), "weight"),
    "bf16-declared-fp8": (lambda: qwen3().set(quantization_config=_DECLARED_FP8), "scale"),
    # Blocks, groups and sizes that do not divide.
    "block-at-tp": (lambda: qwen3("fp8-block", _NARROW), "self_attn.o_proj", *_EIGHT_RANKS),
    "group-at-tp": (lambda: qwen3("ct-w4a16", _NARROW), "self_attn.o_proj", *_EIGHT_RANKS),
    "heads-at-tp": (qwen3, "3", "--tensor-parallel-size", "3"),
    "stages": (qwen3, "", "--pipeline-parallel-size", "4"),
    # Ignore lists and methods.
    "ignore-list-empty": (lambda: qwen3("modelopt-nvfp4").quantize(ignore=["lm_head"]), "mlp.gate"),
    "router-quantized": (lambda: _quantized_router("modelopt-nvfp4"), "mlp.gate"),
    "gptq-expert-plain": (lambda: qwen3("gptq").drop(_EXPERT_7).add(**_WHOLE_EXPERT_7), _EXPERT_7),
    "unknown-method": (lambda: qwen3().set(quantization_config={"quant_method": "hqq_next"}), "hqq_next"),
    "unknown-architecture": (lambda: qwen3().set(architectures=["Qwen9MoeForCausalLM"]), "Qwen9Moe"),
    "unknown-model-type": (lambda: qwen3().set(model_type="qwen9_moe"), "qwen9_moe"),
    "method-of-another": (qwen3, "awq", "--quantization", "awq"),
    # Drafts and flags.
    "draft-head-missing": (lambda: deepseek_v3(draft=1).drop("model.layers.3."), "layer 3", *_DRAFT),
    "draft-experts-missing": (lambda: deepseek_v3(draft=1).drop("3.mlp.experts.2."), "w13_weight", *_DRAFT),
    "misspelt-flag": (qwen3, "--tensor-paralel", "--tensor-paralel", "2"),
    "unknown-backend": (qwen3, "cutlas", "--moe-backend", "cutlas"),
    "length": (qwen3, "max_model_len", "--max-model-len", "100000"),
}  # fmt: skip
"""Name -> (the checkpoint, what the answer must name, the flags of the command line)."""
PLANTED: Mapping[str, Planted] = {
    name: Planted(built, names, tuple(flags)) for name, (built, names, *flags) in _ROWS.items()
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
