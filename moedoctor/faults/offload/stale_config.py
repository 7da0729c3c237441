"""A quantised MoE layer whose config holds the scales, as vLLM's `FusedMoEQuantConfig` does.

Used by MD003 and MD020: the same reference goes stale in both, and what differs is what the kernel does with
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from moedoctor.faults.offload.late_device import DeviceMemory
from moedoctor.fixes.offloader import Offload, offload
from moedoctor.reference.offload_paths import functional_call_offload


class IllegalAccessError(RuntimeError):
    """What a simulated device does with an address that it cannot reach."""


@dataclass(frozen=True)
class QuantConfig:
    """Built when the layer is; holds the parameter, not its name."""

    scales: nn.Parameter
    """float32 [E, N, 1] for the simulated kernels."""


class Kernel(Protocol):
    """The layer's product."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor: ...


class QuantisedExperts(nn.Module):
    """Weights from the module, scales from the config."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, kernel: Kernel) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(weight, requires_grad=False)
        self.w13_weight_scale = nn.Parameter(scales, requires_grad=False)
        self.quant_config = QuantConfig(self.w13_weight_scale)
        self._kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x, self.w13_weight, self.quant_config.scales)


NAMES = ("w13_weight", "w13_weight_scale")


@dataclass(frozen=True)
class SimulatedKernel:
    """int8 experts on a simulated device.

    `checks`: asks where its arguments are, as Marlin does; else it reads the address, wherever it leads.
    """

    memory: DeviceMemory
    checks: bool

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        for name, operand in (("b_q_weight", weight), ("b_scales", scales)):
            if self.memory.holds(operand):
                continue
            if self.checks:
                raise RuntimeError(f"{name} is not on GPU")
            raise IllegalAccessError(f"an illegal memory access was encountered (reading {name})")
        dequantised = weight.float() * scales  # [E, N, K]
        tokens = x.view(weight.shape[0], -1, x.shape[1])  # [E, T/E, K]
        return (tokens @ dequantised.transpose(1, 2)).flatten(0, 1)  # [T, N]


def simulated_stack(layers: int, memory: DeviceMemory, *, checks: bool, seed: int) -> nn.Sequential:
    """Square int8 layers, loaded to the simulated device."""
    generator = torch.Generator().manual_seed(seed)
    kernel = SimulatedKernel(memory, checks)
    stack = nn.Sequential()
    for _ in range(layers):
        weight = torch.randint(-8, 8, (4, 64, 64), dtype=torch.int8, generator=generator)  # [E, N, K]
        scales = torch.rand(4, 64, 1, generator=generator) / 64  # [E, N, 1]
        stack.append(QuantisedExperts(memory.upload(weight), memory.upload(scales), kernel))
    return stack


Apply = Callable[[nn.Sequential, DeviceMemory | None], Offload | None]


def upstream_offload(stack: nn.Sequential, memory: DeviceMemory | None) -> None:
    """vLLM's path without UVA and without pinned memory. `memory`: of the simulated device, if it is one."""
    to_device = memory.upload if memory is not None else None
    functional_call_offload(list(stack), NAMES, pin=False, to_device=to_device)


def our_offload(stack: nn.Sequential, memory: DeviceMemory | None) -> Offload:
    """Ours, for everything that may go."""
    handle = offload(stack, 1 << 40, keep_below=0)
    if memory is not None:
        for one in handle.device_tensors():
            memory.admit(one)
    return handle


@torch.no_grad()
def run(stack: nn.Sequential, x: torch.Tensor, apply: Apply, memory: DeviceMemory | None) -> dict[str, Any]:
    """Offload the stack, run it twice, and compare with what it gave before."""
    expected = stack(x)  # [T, N]
    handle = apply(stack, memory)
    seen: dict[str, Any] = {"error": None, "same_bits": None, **_where(stack, handle, memory)}
    try:
        same = [torch.equal(stack(x), expected) for _ in range(2)]
    except RuntimeError as error:
        return {**seen, "error": str(error).splitlines()[0], "kind": type(error).__name__}
    return {**seen, "same_bits": all(same)}


def _where(stack: nn.Sequential, handle: Offload | None, memory: DeviceMemory | None) -> dict[str, Any]:
    """Where the tensor that the config of the first layer holds lies, and what ours says why."""
    first = stack[0]
    assert isinstance(first, QuantisedExperts)
    held = first.quant_config.scales
    reachable = memory.holds(held) if memory is not None else held.is_cuda
    found: dict[str, Any] = {"config_holds": "device memory" if reachable else "host memory"}
    if handle is not None:
        report = handle.report()
        kept: Sequence[str] = [
            f"{one.name}: {one.reason}" for one in report.placements if one.lives == "device"
        ]
        found |= {
            "host_bytes": report.host_bytes,
            "kept_on_device": list(kept)[:4],
            "rules": list(report.rules),
        }
    return found
