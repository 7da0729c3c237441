"""The cases of `provoke_failures.py`: known failures, failures of other kinds, and healthy engines.

`CASES` is the table. A case may damage its checkpoint (`Case.change`) or break something after the engine has
started (`AFTER`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

with suppress(ImportError):  # the table of cases can be read without it
    import triton.language as triton_language

NO_UVA = {
    "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1",
    "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1",
}
"""What makes the offloader work as it does on WSL."""
OFFLOAD = {"cpu_offload_gb": 0.01, "cpu_offload_params": ["experts"]}
EAGER = {"enforce_eager": True}


@dataclass(frozen=True)
class Case:
    """One engine, and the known failures that it shows."""

    ids: tuple[str, ...]
    """Empty for a healthy engine, and for a failure of another kind."""
    what: str
    scheme: str = "bf16"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    change: str = ""
    """A function of this file that damages the checkpoint."""
    releases: tuple[str, ...] = ()
    """The releases that show it; empty for all. In others the case is skipped."""
    needs: str = ""
    """An argument that only some builds have. Elsewhere the case is skipped."""


def _offload(backend: str, ids: tuple[str, ...], scheme: str = "nvfp4") -> Case:
    return Case(
        ids,
        f"experts of an {scheme} model on the host without UVA, --moe-backend {backend}",
        scheme,
        {"moe_backend": backend, **OFFLOAD, **EAGER},
        NO_UVA,
    )


def _plain(what: str, scheme: str = "bf16", change: str = "", **arguments: Any) -> Case:
    """Return a case of another kind, or a healthy engine."""
    return Case((), what, scheme, {**TRITON, **arguments} if scheme == "bf16" else arguments, change=change)


def _backend(name: str, scheme: str, ids: tuple[str, ...] = ("MD010",)) -> Case:
    return Case(ids, f"--moe-backend {name} for an {scheme} model", scheme, {"moe_backend": name, **EAGER})


TRITON = {"moe_backend": "triton", **EAGER}
MARLIN = {"moe_backend": "marlin", **EAGER}
CASES: Mapping[str, Case] = {
    "offload_marlin": _offload("marlin", ("MD003",)),
    "offload_emulation": _offload("emulation", ("MD003",)),
    "offload_fp8_triton": _offload("triton", ("MD003",), "fp8"),
    "offload_compiled": Case(
        ("MD005",),
        "experts of a BF16 model on the host without UVA, compiled",
        "bf16",
        {"moe_backend": "triton", **OFFLOAD},
        NO_UVA,
    ),
    "offload_humming": _offload("auto", ("MD003",)),
    "offload_fp8_cutlass": _offload("cutlass", ("MD010",), "fp8"),
    "offload_fp8_marlin": _offload("marlin", ("MD003",), "fp8"),
    "stale_cutlass": Case(
        ("MD010",),
        "experts of an FP8 model with one scale a tensor on the host without UVA, which CUTLASS refuses",
        "fp8",
        {"moe_backend": "cutlass", **OFFLOAD, **EAGER},
        NO_UVA,
        change="scale_of_tensor",
    ),
    "stale_compiled": Case(
        ("MD005",),
        "experts of an NVFP4 model on the host without UVA, compiled",
        "nvfp4",
        {"moe_backend": "marlin", **OFFLOAD},
        NO_UVA,
    ),
    "offload_nvfp4_default": Case(
        ("MD003",),
        "experts of an NVFP4 model on the host without UVA, compiled by hand only, in graphs",
        "nvfp4",
        {"moe_backend": "marlin", **OFFLOAD, "compilation_config": {"mode": 0}},
        NO_UVA,
    ),
    "offload_everything": Case(
        ("MD003",),
        "all weights of an NVFP4 model on the host without UVA",
        "nvfp4",
        {"moe_backend": "marlin", "cpu_offload_gb": 1, **EAGER},
        NO_UVA,
    ),
    # CUTLASS takes FP8 experts of compressed-tensors, and does not check where their scales are.
    "stale_channel_cutlass": Case(
        ("MD020",),
        "experts of an FP8 model with a scale a channel on the host without UVA, --moe-backend cutlass",
        "fp8",
        {"moe_backend": "cutlass", **OFFLOAD, **EAGER},
        NO_UVA,
        change="scale_of_channel",
    ),
    "stale_channel_blocking": Case(
        ("MD020",),
        "the same with CUDA_LAUNCH_BLOCKING=1",
        "fp8",
        {"moe_backend": "cutlass", **OFFLOAD, **EAGER},
        {**NO_UVA, "CUDA_LAUNCH_BLOCKING": "1"},
        change="scale_of_channel",
    ),
    "healthy_channel_cutlass": Case(
        (),
        "an FP8 model with a scale a channel and all weights on the GPU, --moe-backend cutlass",
        "fp8",
        {"moe_backend": "cutlass", **EAGER},
        change="scale_of_channel",
    ),
    # Only builds of vLLM with PR 37190 have this cache.
    "cache_of_top_k": Case(
        ("MD006",),
        "an expert cache with as many slots as experts a token",
        "bf16",
        {**TRITON, "moe_expert_cache_size": 2, "max_num_batched_tokens": 8, "max_num_seqs": 1},
        needs="moe_expert_cache_size",
    ),
    "cache_too_small": Case(
        ("MD007",),
        "an expert cache with fewer slots than a prompt needs experts",
        "bf16",
        {**TRITON, "moe_expert_cache_size": 3},
        needs="moe_expert_cache_size",
    ),
    # The answers are wrong (MD015), and the log does not show it.
    "input_scales_zero": Case(
        (),
        "input scales of 0",
        "nvfp4",
        {"moe_backend": "emulation", **EAGER},
        change="zero_input_scales",
    ),
    "input_scales_absent": Case(
        (),
        "no input scales",
        "nvfp4",
        {"moe_backend": "emulation", **EAGER},
        change="without_input_scales",
    ),
    "kv_scales_fp8": Case(
        ("MD012",),
        "an FP8 KV cache that the checkpoint of FP8 weights asks for, without scales",
        "fp8",
        {**TRITON, "kv_cache_dtype": "fp8_e4m3"},
    ),
    "kv_scales": Case(
        ("MD012",),
        "an FP8 KV cache without scales",
        "nvfp4",
        {**MARLIN, "kv_cache_dtype": "fp8"},
        change="fp8_kv",
    ),
    "global_scales": Case(
        ("MD014",), "w1 and w3 with other global scales", "nvfp4", MARLIN, change="mismatch"
    ),
    "backend_misspelt": _backend("marlinn", "nvfp4"),
    "backend_other_gpu": _backend("flashinfer_trtllm", "nvfp4"),
    "backend_cutedsl": _backend("flashinfer_cutedsl", "nvfp4"),
    "backend_other_format": _backend("flashinfer_trtllm", "fp8"),
    "backend_cutlass": _backend("cutlass", "nvfp4"),
    "backend_flashinfer": _backend("flashinfer_cutlass", "nvfp4"),
    "backend_deep_gemm": _backend("deep_gemm", "bf16"),
    "variable_removed": Case(
        ("MD010",),
        "a variable that was removed",
        "nvfp4",
        EAGER,
        {"VLLM_USE_FLASHINFER_MOE_FP4": "1"},
        releases=("0.27.1", "0.30.0", "0.33.0"),
    ),
    "variable_invented": Case(
        ("MD010",), "a variable that never existed", "nvfp4", EAGER, {"VLLM_NVFP4_MOE_BACKEND": "marlin"}
    ),
    "variable_choice": Case(
        ("MD010",),
        "a choice in capitals",
        "nvfp4",
        EAGER,
        {"VLLM_NVFP4_GEMM_BACKEND": "MARLIN"},
        releases=("0.17.1", "0.19.1", "0.21.0"),
    ),
    "runner_noop": Case(
        ("MD013",),
        "offload under the V2 runner",
        "bf16",
        {**TRITON, **OFFLOAD},
        {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        releases=("0.17.1", "0.19.1", "0.21.0"),
    ),
    "variable_other": Case(
        (), "an unknown variable of another kind", "bf16", TRITON, {"VLLM_MY_OWN_SWITCH": "1"}
    ),
    "healthy_bf16": Case((), "a healthy engine", "bf16", TRITON),
    "healthy_nvfp4": Case((), "a healthy engine", "nvfp4", EAGER),
    "healthy_offload": Case((), "offload with UVA", "nvfp4", {**MARLIN, **OFFLOAD}),
    "no_room": Case((), "no room for the KV cache", "bf16", {**TRITON, "kv_cache_memory_bytes": 4096}),
    "too_long": Case((), "a longer context than the model has", "bf16", {**TRITON, "max_model_len": 999_999}),
    "two_gpus": Case((), "more GPUs than there are", "bf16", {**TRITON, "tensor_parallel_size": 16}),
    "missing_weight": Case((), "a checkpoint without a weight", "bf16", TRITON, change="without_weight"),
    "missing_scale": Case((), "a checkpoint without a block scale", "nvfp4", MARLIN, change="without_scale"),
    "wrong_shape": Case((), "a weight of another shape", "bf16", TRITON, change="other_shape"),
    "unknown_model": Case((), "an unknown architecture", "bf16", TRITON, change="other_model"),
    "other_quantization": Case(
        (), "--quantization awq for ModelOpt", "nvfp4", {**EAGER, "quantization": "awq"}
    ),
    "attention": Case(
        (),
        "an attention backend that is not installed",
        "bf16",
        {**TRITON, "attention_backend": "FLASHINFER"},
    ),
    "no_folder": Case((), "a model that is not there", "bf16", {**TRITON, "model": "/nowhere/model"}),
    "prompt_too_long": Case((), "a prompt that is too long", "bf16", {**TRITON, "max_model_len": 8}),
    "parallel": Case((), "expert parallelism on one GPU", "bf16", {**TRITON, "enable_expert_parallel": True}),
    "compiled_nvfp4": Case((), "a healthy compiled engine", "nvfp4", {}),
    "no_memory": Case((), "less memory than the model needs", "bf16", {**TRITON, "_after": "no_memory"}),
    "assertion_other": Case(
        (), "an assertion of a kernel outside of MoE", "bf16", {**TRITON, "_after": "assertion"}
    ),
    "host_tensor_other": Case(
        (), "a kernel outside of MoE gets a tensor on the host", "bf16", {**TRITON, "_after": "host_tensor"}
    ),
    "graph_break_other": Case(
        (), "Dynamo refuses code outside of vLLM", "bf16", {**TRITON, "_after": "graph_break"}
    ),
    "little_memory": Case(
        (),
        "too little memory for the cache",
        "bf16",
        {**TRITON, "gpu_memory_utilization": 0.001, "kv_cache_memory_bytes": None},
    ),
    "wrong_dtype": Case((), "a type that vLLM does not know", "bf16", {**TRITON, "dtype": "float7"}),
    "half_fp8": Case((), "a healthy FP8 engine", "fp8", TRITON),
    "lora": Case((), "LoRA for a model of tiny size", "bf16", {**TRITON, "enable_lora": True}),
    "speculative": Case(
        (),
        "a draft model that is not there",
        "bf16",
        {**TRITON, "speculative_config": {"model": "/nowhere/draft", "num_speculative_tokens": 2}},
    ),
    "truncated": Case((), "a truncated checkpoint", "bf16", {**TRITON, "_after": "truncated"}),
    "pipeline": Case((), "more pipeline stages than GPUs", "bf16", {**TRITON, "pipeline_parallel_size": 9}),
    "block_size": Case((), "a block size that no backend has", "bf16", {**TRITON, "block_size": 7}),
    "bad_config": Case((), "heads that do not divide", "bf16", TRITON, change="odd_heads"),
    **{
        f"backend_{name}_{scheme}": _backend(name, scheme)
        for scheme, names in {
            "nvfp4": ("triton", "deep_gemm", "aiter", "flashinfer_b12x"),
            "fp8": ("emulation", "flashinfer_cutedsl", "aiter", "flashinfer_cutlass"),
            "bf16": ("marlin", "cutlass", "flashinfer_cutlass", "flashinfer_trtllm"),
        }.items()
        for name in names
    },
    **{
        f"variable_{value.lower()}": Case(
            ("MD010",),
            "a variable that was removed",
            "nvfp4",
            EAGER,
            {value: setting},
            releases=("0.27.1", "0.30.0", "0.33.0"),
        )
        for value, setting in {
            "VLLM_USE_FLASHINFER_MOE_FP8": "1",
            "VLLM_USE_FLASHINFER_MOE_FP16": "1",
            "VLLM_FLASHINFER_MOE_BACKEND": "latency",
        }.items()
    },
    "offload_fp8_tensor_triton": Case(
        ("MD003",),
        "experts of an FP8 model with one scale a tensor on the host without UVA",
        "fp8",
        {"moe_backend": "triton", **OFFLOAD, **EAGER},
        NO_UVA,
        change="scale_of_tensor",
    ),
    "offload_fp8_tensor_marlin": Case(
        ("MD003",),
        "experts of an FP8 model with one scale a tensor on the host without UVA",
        "fp8",
        {"moe_backend": "marlin", **OFFLOAD, **EAGER},
        NO_UVA,
        change="scale_of_tensor",
    ),
    "offload_fp8_compiled": Case(
        ("MD005",),
        "experts of an FP8 model on the host without UVA, compiled",
        "fp8",
        {"moe_backend": "triton", **OFFLOAD},
        NO_UVA,
    ),
    "offload_marlin_kv": Case(
        ("MD003", "MD012"),
        "experts on the host without UVA, and an FP8 KV cache without scales",
        "nvfp4",
        {"moe_backend": "marlin", "kv_cache_dtype": "fp8", **OFFLOAD, **EAGER},
        NO_UVA,
        change="fp8_kv",
    ),
    "kv_scales_bf16": Case(
        ("MD012",),
        "an FP8 KV cache for a BF16 model",
        "bf16",
        {**TRITON, "kv_cache_dtype": "fp8"},
    ),
    "kv_scales_compiled": Case(
        ("MD012",),
        "an FP8 KV cache without scales, compiled",
        "nvfp4",
        {"moe_backend": "marlin", "kv_cache_dtype": "fp8"},
        change="fp8_kv",
    ),
    "scales_and_variable": Case(
        ("MD010", "MD014"),
        "w1 and w3 with other global scales, and a variable that never existed",
        "nvfp4",
        MARLIN,
        {"VLLM_NVFP4_MOE_BACKEND": "marlin"},
        change="mismatch",
    ),
    "global_scales_humming": Case(
        ("MD014",),
        "w1 and w3 with other global scales",
        "nvfp4",
        EAGER,
        change="mismatch",
    ),
    "no_tokenizer": _plain("a model without a tokenizer", skip_tokenizer_init=False),
    "utilization": _plain("more than all of the memory", gpu_memory_utilization=1.5),
    "no_sequences": _plain("no sequences at all", max_num_seqs=0),
    "kv_type": _plain("a type of the KV cache that does not exist", kv_cache_dtype="fp9"),
    "load_format": _plain("a load format that does not exist", load_format="by_pigeon"),
    "dummy_weights": _plain("a healthy engine with dummy weights", load_format="dummy"),
    "data_parallel": _plain("more data-parallel ranks than GPUs", data_parallel_size=4),
    "modes": _plain("a compilation mode that does not exist", compilation_config={"mode": 99}),
    "ngram": _plain(
        "a healthy engine with speculative decoding",
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
    ),
    "prefix_caching": _plain("a healthy engine", enable_prefix_caching=True),
    "graphs": Case(
        (),
        "a healthy engine with CUDA graphs, not compiled",
        "bf16",
        {"moe_backend": "triton", "compilation_config": {"mode": 0}},
    ),
    "compiled_bf16": Case((), "a healthy compiled engine", "bf16", {"moe_backend": "triton"}),
    "offload_uva_fp8": Case((), "offload with UVA", "fp8", {**TRITON, **OFFLOAD}),
    "offload_bf16_no_uva": Case(
        (), "offload of a BF16 model without UVA", "bf16", {**TRITON, **OFFLOAD}, NO_UVA
    ),
    "offload_zero": Case((), "offload of 0 GB", "nvfp4", {**MARLIN, "cpu_offload_gb": 0}),
    "kv_type_e5m2": Case((), "an FP8 E5M2 KV cache", "bf16", {**TRITON, "kv_cache_dtype": "fp8_e5m2"}),
    "no_config": _plain("a model without config.json", change="broken_config"),
    "no_router": _plain("a checkpoint without a router", change="without_router"),
    "more_experts": _plain("a checkpoint with fewer experts than its config", change="more_experts"),
    "nan_weights": _plain("weights that are not numbers", change="nan_weights"),
    "swapped_halves": _plain("gate and up are swapped, which no log shows", change="swapped"),
    "killed": _plain("the engine is killed", _after="killed"),
    "segfault": _plain("a segmentation fault", _after="segfault"),
    "deep_recursion": _plain("a failure of Python", _after="recursion"),
    "no_kernel_file": _plain("a library that cannot be loaded", _after="library"),
    "bad_sampling": _plain("a sampling parameter out of range", _after="sampling"),
    "triton_compile": _plain("a kernel that does not compile", _after="compile"),
    "shared_memory": _plain("a kernel that needs more shared memory than there is", _after="shared"),
    "misaligned_other": _plain("a misaligned address outside of MoE", _after="misaligned"),
    "nan_other": _plain("NaN outside of MoE", _after="nan"),
    "index_minus_one": _plain("an index of -1 outside of MoE", _after="minus_one"),
    "illegal_other": Case(
        (),
        "an illegal access outside of MoE",
        "bf16",
        {**TRITON, "_after": "illegal"},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    ),
}


# What damages a checkpoint.


def fp8_kv(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["quantization_config"]["kv_cache_quant_algo"] = "FP8"


def mismatch(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in tensors:
        if name.endswith("up_proj.weight_scale_2"):
            tensors[name] = tensors[name] * 2


def scale_of_tensor(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Give each FP8 weight one scale in place of one a block."""
    import torch

    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        blocks = tensors.pop(name)  # [N/128, K/128]
        weight = name.removesuffix("_scale_inv")
        scales = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)  # [N, K]
        values = tensors[weight].float() * scales  # [N, K]
        scale = values.abs().amax() / 448.0
        tensors[weight] = (values / scale).to(torch.float8_e4m3fn)
        tensors[weight + "_scale"] = scale.reshape(1)
    del config["quantization_config"]["weight_block_size"]


def scale_of_channel(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Store FP8 experts as compressed-tensors does: a scale a row, activations quantized token by token."""
    import torch

    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        blocks = tensors.pop(name)  # [N/128, K/128]
        weight = name.removesuffix("_scale_inv")
        scales = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)  # [N, K]
        values = tensors[weight].float() * scales  # [N, K]
        scale = values.abs().amax(dim=1, keepdim=True) / 448.0  # [N, 1]
        tensors[weight] = (values / scale).to(torch.float8_e4m3fn)
        tensors[weight + "_scale"] = scale
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**fp8, "strategy": "channel", "dynamic": False},
                "input_activations": {**fp8, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    }


def zero_input_scales(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in tensors:
        if name.endswith(".input_scale"):
            tensors[name] = tensors[name] * 0


def without_input_scales(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith(".input_scale")]:
        del tensors[name]


def without_weight(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors["model.layers.1.self_attn.o_proj.weight"]


def without_scale(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith("3.down_proj.weight_scale")]:
        del tensors[name]


def other_shape(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["model.layers.0.mlp.experts.0.gate_proj.weight"] = tensors["lm_head.weight"].clone()


def broken_config(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del config["architectures"], config["model_type"]


def without_router(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors["model.layers.0.mlp.gate.weight"]


def more_experts(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["num_experts"] *= 2


def nan_weights(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.gate.weight"].fill_(float("nan"))


def swapped(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in [name for name in tensors if "gate_proj" in name]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def odd_heads(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["num_attention_heads"] = 3


def other_model(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["architectures"] = ["NobodysMoeForCausalLM"]


# What breaks after the engine has started.


def _read_far(address):  # type: ignore[no-untyped-def]
    # Triton reads this source: no annotations, and the name of the module is its own.
    triton_language.store(address, triton_language.load(address + (1 << 42)))


def illegal_access() -> None:
    """Read far outside of a tensor, with a kernel that has nothing to do with experts."""
    import torch
    import triton

    kernel: Any = triton.jit(_read_far)
    kernel[(1,)](torch.zeros(4, device="cuda"))
    torch.cuda.synchronize()


def no_memory() -> None:
    """Ask for more memory than any GPU has."""
    import torch

    torch.empty(1 << 42, device="cuda")


def assertion() -> None:
    """Index out of range in a kernel of torch."""
    import torch

    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()


def host_tensor() -> None:
    """Multiply a tensor on the GPU with one on the host."""
    import torch

    torch.mm(torch.zeros(4, 4, device="cuda"), torch.zeros(4, 4))


def graph_break() -> None:
    """Trace code that Dynamo does not know."""
    import torch

    def code(x: Any) -> Any:
        print(x)
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(code, fullgraph=True)(torch.zeros(4, device="cuda"))


def killed() -> None:
    """End the process as the system does if its memory is full."""
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    """Read address 0."""
    import ctypes
    import faulthandler

    faulthandler.enable()
    ctypes.string_at(0)


def recursion() -> None:
    """Call without end."""
    recursion()


def library() -> None:
    """Load a library that is not there."""
    import ctypes

    ctypes.CDLL("libcudart_static_moe.so.12")


def sampling() -> None:
    """Ask for a temperature below 0."""
    from vllm import SamplingParams

    SamplingParams(temperature=-1.0, top_p=2.0)


def _unknown_name(address):  # type: ignore[no-untyped-def]
    triton_language.store(address, not_a_name)  # noqa: F821


def compile_error() -> None:
    """Compile a Triton kernel with an unknown name."""
    import torch
    import triton

    kernel: Any = triton.jit(_unknown_name)
    kernel[(1,)](torch.zeros(4, device="cuda"))


def _large_tiles(address):  # type: ignore[no-untyped-def]
    rows = triton_language.arange(0, 1024)
    tile = triton_language.load(address + rows[:, None] * 1024 + rows[None, :])
    triton_language.store(address + rows[:, None] * 1024 + rows[None, :], triton_language.dot(tile, tile))


def shared_memory() -> None:
    """Multiply tiles that are too large for the shared memory."""
    import torch
    import triton

    kernel: Any = triton.jit(_large_tiles)
    kernel[(1,)](torch.zeros(1024, 1024, device="cuda"))


def misaligned() -> None:
    """Load 16 bytes from an address that is no multiple of 16."""
    import torch

    code = 'extern "C" __global__ void write(char* p) { *(float4*)(p + 1) = make_float4(0, 0, 0, 0); }'
    kernel = torch.cuda._compile_kernel(code, "write")
    kernel(args=[torch.zeros(64, dtype=torch.uint8, device="cuda")])
    torch.cuda.synchronize()


def nan_other() -> None:
    """Stop at NaN that has nothing to do with a router."""
    import torch

    loss = torch.full((4,), float("nan"), device="cuda").sum()
    assert torch.isfinite(loss), f"the loss is {loss.item()}: NaN in the logits of the head"


def minus_one() -> None:
    """Select with an index of -1."""
    import torch

    table = torch.zeros(8, 4, device="cuda")
    table.index_select(0, torch.tensor([-1], device="cuda")).sum().item()


AFTER: Mapping[str, Callable[[], None]] = {
    "illegal": illegal_access,
    "no_memory": no_memory,
    "assertion": assertion,
    "host_tensor": host_tensor,
    "graph_break": graph_break,
    "killed": killed,
    "segfault": segfault,
    "recursion": recursion,
    "library": library,
    "sampling": sampling,
    "compile": compile_error,
    "shared": shared_memory,
    "misaligned": misaligned,
    "nan": nan_other,
    "minus_one": minus_one,
}
"""What breaks after the engine has started."""
