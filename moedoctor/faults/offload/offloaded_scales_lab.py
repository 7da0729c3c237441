"""What runs in the child for MD003: quantised layers, simulated or by vLLM's Marlin operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moedoctor.faults.offload.late_device import DeviceMemory
from moedoctor.faults.offload.stale_config import (
    Apply,
    QuantisedExperts,
    our_offload,
    run,
    simulated_stack,
    upstream_offload,
)
from moedoctor.results import Observation, Tier, UnavailableError

if TYPE_CHECKING:
    from moedoctor.faults.offload.offloaded_scales import OffloadedScalesParameters
    from moedoctor.upstream.releases.moe_kernels import MoeKernels


@dataclass(frozen=True)
class Way:
    """How weights are offloaded, and whose product runs on them; None: the simulated one."""

    apply: Apply
    kernels: MoeKernels | None

    @classmethod
    def upstream(cls, tier: Tier) -> Way:
        return cls(upstream_offload, _installed(tier))

    @classmethod
    def ours(cls, tier: Tier) -> Way:
        return cls(our_offload, _installed(tier))


def _installed(tier: Tier) -> MoeKernels | None:
    if tier is not Tier.KERNEL:
        return None
    from moedoctor.upstream.releases.moe_kernels import MoeKernels

    if not torch.cuda.is_available():
        raise UnavailableError("needs an NVIDIA GPU that torch can use")
    return MoeKernels.installed()


def observe(parameters: OffloadedScalesParameters, device: str, way: Any) -> Observation:
    """`way`: a `Way`, or the kernels of a named release, which run under vLLM's path without UVA."""
    if not isinstance(way, Way):
        way = Way(upstream_offload, way)
    if way.kernels is None:
        memory = DeviceMemory()
        stack = simulated_stack(parameters.layers, memory, checks=True, seed=parameters.seed)
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(parameters.seed))  # [T, K]
        return Observation(run(stack, x, way.apply, memory))
    stack = marlin_stack(way.kernels, parameters.layers, device, parameters.seed)
    generator = torch.Generator(device).manual_seed(parameters.seed)
    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16, generator=generator)  # [T, K]
    return Observation({"operator": "moe_wna16_marlin_gemm", **run(stack, x, way.apply, None)})


def marlin_stack(kernels: MoeKernels, layers: int, device: str, seed: int) -> nn.Sequential:
    """Square 4-bit layers for Marlin. What the bits mean does not matter, only that they stay."""
    from moedoctor.upstream.releases.products import GROUP, marlin_product

    def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return marlin_product(kernels, x, weight, scales)

    generator = torch.Generator(device).manual_seed(seed)
    stack = nn.Sequential()
    for _ in range(layers):
        weight = torch.randint(
            -(1 << 31),
            1 << 31,
            (4, 256 // 16, 2 * 256),
            dtype=torch.int32,
            device=device,
            generator=generator,
        )  # [E, K / 16, 2 N]
        scales = torch.rand(4, 256 // GROUP, 256, device=device, generator=generator) / 256  # [E, K / 128, N]
        stack.append(QuantisedExperts(weight, scales.to(torch.bfloat16), product))
    return stack
