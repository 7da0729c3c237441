"""What runs in the child for MD020: one offload, several products that read the config's scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from moedoctor.faults.offload.late_device import DeviceMemory
from moedoctor.faults.offload.stale_config import Apply, Kernel, QuantisedExperts, run, simulated_stack
from moedoctor.results import Observation, Tier, UnavailableError

if TYPE_CHECKING:
    from moedoctor.faults.offload.stale_parameter import StaleParameterParameters

_EXPERTS, _WIDTH, _TOKENS = 4, 256, 512


def observe(parameters: StaleParameterParameters, tier: Tier, device: str, apply: Apply) -> Observation:
    """Offload layers, run them, and say what became of it."""
    if tier is Tier.MODEL:
        memory = DeviceMemory()
        checks = parameters.backend == "checks"
        stack = simulated_stack(parameters.layers, memory, checks=checks, seed=parameters.seed)
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(parameters.seed))  # [T, K]
        return Observation(run(stack, x, apply, memory))
    if not torch.cuda.is_available():
        raise UnavailableError("needs an NVIDIA GPU that torch can use")
    stack, x = _BACKENDS[parameters.backend](parameters.layers, device, parameters.seed)
    return Observation(run(stack, x, apply, None))


def _float_stack(product: Kernel, layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    """Square int8 layers with a float32 scale each output channel, and tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    stack = nn.Sequential()
    for _ in range(layers):
        shape = (_EXPERTS, _WIDTH, _WIDTH)
        weight = torch.randint(
            -8, 8, shape, dtype=torch.int8, device=device, generator=generator
        )  # [E, N, K]
        scales = torch.rand(_EXPERTS, _WIDTH, 1, device=device, generator=generator) / _WIDTH  # [E, N, 1]
        stack.append(QuantisedExperts(weight, scales, product))
    return stack, torch.randn(_TOKENS, _WIDTH, device=device, generator=generator)  # [T, K]


def _dequantised_product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    tokens = x.view(weight.shape[0], -1, x.shape[1])  # [E, T/E, K]
    return (tokens @ (weight.float() * scales).transpose(1, 2)).flatten(0, 1)  # [T, N]


def _unchecked(layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    from moedoctor.kernels.unchecked import read_address

    def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        read = read_address(scales.data_ptr(), scales.numel(), device).view(scales.shape)  # [E, N, 1]
        torch.cuda.synchronize()  # the error must come up here, not in the next copy
        return _dequantised_product(x, weight, read)

    return _float_stack(product, layers, device, seed)


def _triton(layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    from moedoctor.kernels.unchecked import read_tensor

    def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        try:
            return _dequantised_product(x, weight, read_tensor(scales, device).view(scales.shape))
        except ValueError as error:  # how Triton refuses an argument
            raise RuntimeError(str(error)) from error

    return _float_stack(product, layers, device, seed)


def _torch(layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    return _float_stack(_dequantised_product, layers, device, seed)


def _marlin(layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    from moedoctor.faults.offload.offloaded_scales_lab import marlin_stack
    from moedoctor.upstream.releases.moe_kernels import MoeKernels

    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16, generator=generator)  # [T, K]
    return marlin_stack(MoeKernels.installed(), layers, device, seed), x


def _cutlass(layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    from moedoctor.upstream.releases.products import cutlass_product, operators

    ops = operators()

    def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out = cutlass_product(ops, x.to(torch.float8_e4m3fn), weight, scales)
        torch.cuda.synchronize()
        return out.float()

    plain, x = _float_stack(product, layers, device, seed)
    stack = nn.Sequential()
    for layer in plain:
        weight, scales = (one.data for one in layer.parameters())  # [E, N, K], [E, N, 1]
        stack.append(QuantisedExperts(weight.to(torch.float8_e4m3fn), scales, product))
    return stack, x


_BACKENDS: dict[str, Callable[[int, str, int], tuple[nn.Sequential, torch.Tensor]]] = {
    "unchecked": _unchecked,
    "triton": _triton,
    "torch": _torch,
    "vllm_marlin": _marlin,
    "vllm_cutlass": _cutlass,
}
