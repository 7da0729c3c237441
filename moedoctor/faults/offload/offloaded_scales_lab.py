"""The child process for MD003: quantized layers, simulated, by vLLM's Marlin operator, or in engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moedoctor.faults.base import need_gpu
from moedoctor.faults.offload.offloaded_scales import OffloadedScalesParameters
from moedoctor.faults.offload.stale_config import QuantizedExperts, offload_and_run, run_simulated
from moedoctor.results import Case, Evidence
from moedoctor.upstream.engine import offload_table
from moedoctor.upstream.engine.offload_table import COMPILED, PLACES, TABLE, WEIGHTS

if TYPE_CHECKING:
    from moedoctor.upstream.releases.moe_kernels import MoeKernels


def model(case: Case, parameters: OffloadedScalesParameters, release: None) -> Evidence:
    """Simulated layers, whose kernel checks where the scales are."""
    return run_simulated(case.subject, parameters.layers, parameters.seed, checks=True)


def kernel(case: Case, parameters: OffloadedScalesParameters, release: MoeKernels | None) -> Evidence:
    """vLLM's Marlin operator. A named release runs under vLLM's path without UVA, as `faulty` does."""
    from moedoctor.upstream.releases.moe_kernels import MoeKernels

    if release is None:
        need_gpu()
    kernels = release or MoeKernels.installed()
    stack, x = make_marlin_stack(kernels, parameters.layers, case.device, parameters.seed)
    return {"operator": "moe_wna16_marlin_gemm", **offload_and_run(case.subject, stack, x)}


def engine(case: Case, parameters: OffloadedScalesParameters, release: None) -> Evidence:
    """The table of vllm#37883."""
    mode = str(parameters.engine)
    places = PLACES if mode == COMPILED else (*PLACES, WEIGHTS)
    return offload_table.measure(TABLE, mode, places, fixed=case.subject == "fixed")


def make_marlin_stack(
    kernels: MoeKernels, layers: int, device: str, seed: int
) -> tuple[nn.Sequential, torch.Tensor]:
    """Square 4-bit layers of random bits for Marlin, and tokens."""
    from moedoctor.upstream.releases.products import GROUP, multiply_by_marlin

    def multiply(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return multiply_by_marlin(kernels, x, weight, scales)

    drawn: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(seed)}
    stack = nn.Sequential()
    for _ in range(layers):
        size = (4, 256 // 16, 2 * 256)  # [E, K / 16, 2 N]
        weight = torch.randint(-(1 << 31), 1 << 31, size, dtype=torch.int32, **drawn)
        scales = torch.rand(4, 256 // GROUP, 256, **drawn) / 256  # [E, K / 128, N]
        stack.append(QuantizedExperts(weight, scales.to(torch.bfloat16), multiply))
    draw = torch.Generator(device).manual_seed(seed)
    return stack, torch.randn(64, 256, device=device, dtype=torch.bfloat16, generator=draw)  # [T, K]
