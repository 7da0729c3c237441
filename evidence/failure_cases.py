"""The cases of `provoke_failures.py`: `CASES` is the table `failure_cases.yaml`.

The functions below damage a checkpoint (`Case.change`) or break something after the engine has started
(`Case.after`).
"""

from __future__ import annotations

import fnmatch
import functools
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

with suppress(ImportError):  # the table of cases can be read without it
    import triton.language as triton_language


@dataclass(frozen=True)
class Case:
    """One engine, and the known failures that it shows; `failure_cases.yaml` explains the fields."""

    what: str
    ids: tuple[str, ...] = ()
    scheme: str = "bf16"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    multiply: Mapping[str, float] = field(default_factory=dict)
    drop: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    change: str = ""
    after: str = ""
    releases: tuple[str, ...] = ()
    needs: str = ""


CASES: Mapping[str, Case] = {
    name: Case(**row)
    for name, row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}


def damage(case: Case, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Damage a checkpoint as a case asks."""
    for pattern, factor in case.multiply.items():
        for name in fnmatch.filter(tensors, pattern):
            tensors[name] = tensors[name] * factor
    for name in fnmatch.filter(tensors, case.drop):
        del tensors[name]
    for path, value in case.config.items():
        *outer, key = path.split(".")
        place = functools.reduce(dict.__getitem__, outer, config)
        if value is None:
            del place[key]
        else:
            place[key] = value
    if case.change:
        globals()[case.change](tensors, config)


def _rescale(tensors: dict[str, Any], dims: tuple[int, ...]) -> None:
    """Give each FP8 weight [N, K] a scale for all of `dims` in place of one a block: [1, 1] or [N, 1]."""
    import torch

    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        blocks = tensors.pop(name)  # [N/128, K/128]
        weight = name.removesuffix("_scale_inv")
        scales = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)  # [N, K]
        values = tensors[weight].float() * scales  # [N, K]
        scale = values.abs().amax(dim=dims, keepdim=True) / 448.0
        tensors[weight] = (values / scale).to(torch.float8_e4m3fn)
        tensors[weight + "_scale"] = scale


def scale_of_tensor(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Give each FP8 weight one scale, [1], in place of one a block."""
    _rescale(tensors, (0, 1))
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[name] = tensors[name].reshape(1)
    del config["quantization_config"]["weight_block_size"]


def scale_of_channel(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Store FP8 experts as compressed-tensors does: a scale a row, activations quantized token by token."""
    _rescale(tensors, (1,))
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


def other_shape(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["model.layers.0.mlp.experts.0.gate_proj.weight"] = tensors["lm_head.weight"].clone()


def swap_projections(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in [name for name in tensors if "gate_proj" in name]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def join_experts(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Stack the experts of each layer: gate and up [E, 2I, H], down [E, H, I]."""
    import torch

    for name in [name for name in tensors if "experts.0.gate_proj" in name]:
        prefix = name.partition("0.gate_proj")[0]
        parts: dict[str, list[Any]] = {"gate": [], "up": [], "down": []}
        for expert in range(config["num_experts"]):
            for part, each in parts.items():
                each.append(tensors.pop(f"{prefix}{expert}.{part}_proj.weight"))
        gate, up, down = map(torch.stack, parts.values())
        tensors[f"{prefix}gate_up_projection"] = torch.cat([gate, up], 1)
        tensors[f"{prefix}down_projection"] = down


def narrow_experts(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["moe_intermediate_size"] = 80
    for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
        tensors[name] = tensors[name].narrow(1 if "down_proj" in name else 0, 0, 80)


# What breaks after the engine has started.


def _read_far(address):  # type: ignore[no-untyped-def]
    # Triton reads this source: no annotations, and the name of the module is its own.
    triton_language.store(address, triton_language.load(address + (1 << 42)))


def _launch(function: Any, *size: int) -> None:
    import torch
    import triton

    triton.jit(function)[(1,)](torch.zeros(size, device="cuda"))
    torch.cuda.synchronize()


def illegal_access() -> None:
    """Read far outside of a tensor, with a kernel that has nothing to do with experts."""
    _launch(_read_far, 4)


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


def kill_process() -> None:
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
    _launch(_unknown_name, 4)


def _large_tiles(address):  # type: ignore[no-untyped-def]
    rows = triton_language.arange(0, 1024)
    tile = triton_language.load(address + rows[:, None] * 1024 + rows[None, :])
    triton_language.store(address + rows[:, None] * 1024 + rows[None, :], triton_language.dot(tile, tile))


def shared_memory() -> None:
    """Multiply tiles that are too large for the shared memory."""
    _launch(_large_tiles, 1024, 1024)


def load_misaligned() -> None:
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
