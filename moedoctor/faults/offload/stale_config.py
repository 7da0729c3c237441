"""A quantized MoE layer whose config holds the scales, as vLLM's `FusedMoEQuantConfig` does.

Shared by MD003 and MD020: in both the same reference goes stale. They differ in what the kernel does with it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from moedoctor.fixes.offloader import offload
from moedoctor.reference.offload_paths import offload_by_functional_call
from moedoctor.results import Evidence

NAMES = ("w13_weight", "w13_weight_scale")


class IllegalAccessError(RuntimeError):
    """A simulated device was given an address that it cannot reach."""


class DeviceMemory:
    """The addresses that a simulated device can reach."""

    def __init__(self) -> None:
        self._ranges: list[tuple[StorageWeakRef, int, int]] = []

    def admit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declare `tensor` device memory."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        # Weakly: freed memory is not the device's any more, and its address is soon used by another tensor.
        self._ranges.append((StorageWeakRef(storage), start, start + storage.nbytes()))
        return tensor

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.admit(tensor.clone())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a kernel could read `tensor`."""
        address = tensor.data_ptr()
        return any(start <= address < end and not storage.expired() for storage, start, end in self._ranges)


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The layer's product: (x, weight, scales) -> output."""


class QuantizedExperts(nn.Module):
    """Weights from the module, scales from a config that holds the parameter, not its name."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, kernel: Kernel) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(weight, requires_grad=False)
        self.w13_weight_scale = nn.Parameter(scales, requires_grad=False)
        self.quant_config = SimpleNamespace(scales=self.w13_weight_scale)
        self._kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x, self.w13_weight, self.quant_config.scales)


def multiply_dequantized(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply `x` [T, K] by `weight` [E, N, K] times `scales` [E, N, 1]: [T, N].

    Expert e gets the e-th part of the tokens.
    """
    tokens = x.view(weight.shape[0], -1, x.shape[1])  # [E, T/E, K]
    return (tokens @ (weight.float() * scales).transpose(1, 2)).flatten(0, 1)  # [T, N]


def make_simulated_stack(layers: int, memory: DeviceMemory, *, checks: bool, seed: int) -> nn.Sequential:
    """Return square int8 layers, loaded to a simulated device with `memory`.

    `checks`: its kernel looks where its arguments are, as Marlin does; otherwise it reads any address.
    """

    def kernel(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        for name, operand in (("b_q_weight", weight), ("b_scales", scales)):
            if not memory.holds(operand):
                if checks:
                    raise RuntimeError(f"{name} is not on GPU")
                raise IllegalAccessError(f"an illegal memory access was encountered (reading {name})")
        return multiply_dequantized(x, weight, scales)

    generator = torch.Generator().manual_seed(seed)
    stack = nn.Sequential()
    for _ in range(layers):
        weight = torch.randint(-8, 8, (4, 64, 64), dtype=torch.int8, generator=generator)  # [E, N, K]
        scales = torch.rand(4, 64, 1, generator=generator) / 64  # [E, N, 1]
        stack.append(QuantizedExperts(memory.upload(weight), memory.upload(scales), kernel))
    return stack


def run_simulated(subject: str, layers: int, seed: int, *, checks: bool) -> Evidence:
    """`offload_and_run` for simulated layers."""
    memory = DeviceMemory()
    stack = make_simulated_stack(layers, memory, checks=checks, seed=seed)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))  # [T, K]
    return offload_and_run(subject, stack, x, memory)


@torch.no_grad()
def offload_and_run(
    subject: str, stack: nn.Sequential, x: torch.Tensor, memory: DeviceMemory | None = None
) -> dict[str, Any]:
    """Offload the stack, run it twice on `x` [T, K], and compare with its output before.

    The subject ``fixed`` is offloaded by ours, all others by vLLM's path without UVA and without pinned
    memory. `memory`: that of the simulated device, if the stack is on one.
    """
    expected = stack(x)  # [T, N]
    evidence: dict[str, Any] = {"error": None, "same_bits": None}
    if subject == "fixed":
        handle = offload(stack, 1 << 40, keep_below=0)
        if memory is not None:
            for tensor in handle.list_device_tensors():
                memory.admit(tensor)
        report = handle.report()
        on_device = [item for item in report.placements if item.lives == "device"]
        evidence |= {
            "host_bytes": report.host_bytes,
            "kept_on_device": [f"{item.name}: {item.reason}" for item in on_device[:4]],
            "rules": list(report.rules),
        }
    else:
        to_device = memory.upload if memory is not None else None
        offload_by_functional_call(list(stack), NAMES, to_device=to_device)
    first = stack[0]
    assert isinstance(first, QuantizedExperts)
    scales = first.quant_config.scales
    reachable = memory.holds(scales) if memory is not None else scales.is_cuda
    evidence["config_holds"] = "device memory" if reachable else "host memory"
    try:
        same = [torch.equal(stack(x), expected) for _ in range(2)]
    except RuntimeError as error:
        evidence |= {"error": str(error).splitlines()[0], "kind": type(error).__name__}
    else:
        evidence["same_bits"] = all(same)
    return evidence
