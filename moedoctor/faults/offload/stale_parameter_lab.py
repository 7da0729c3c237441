"""What runs in the child for MD020: offloaded layers, with several products that read the config's scales."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from moedoctor.faults.base import need_gpu
from moedoctor.faults.offload.offloaded_scales_lab import marlin_stack
from moedoctor.faults.offload.stale_config import (
    Kernel,
    QuantisedExperts,
    dequantised_product,
    offload_and_run,
    run_simulated,
)
from moedoctor.faults.offload.stale_parameter import StaleParameterParameters
from moedoctor.results import Case, Observation

_EXPERTS, _WIDTH, _TOKENS = 4, 256, 512


def model(case: Case, parameters: StaleParameterParameters, release: None) -> Observation:
    """Simulated layers, whose kernel checks where the scales are or reads any address."""
    checks = parameters.backend == "checks"
    return run_simulated(case.subject, parameters.layers, parameters.seed, checks=checks)


def kernel(case: Case, parameters: StaleParameterParameters, release: None) -> Observation:
    """The product of one backend on a GPU."""
    need_gpu()
    stack, x = _BACKENDS[parameters.backend](parameters.layers, case.device, parameters.seed)
    return Observation(offload_and_run(case.subject, stack, x))


def _float_stack(product: Kernel, layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    """Square int8 layers with a float32 scale for each output channel, and tokens."""
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


def _unchecked(layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    from moedoctor.kernels.unchecked import read_address

    def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        read = read_address(scales.data_ptr(), scales.numel(), device).view(scales.shape)  # [E, N, 1]
        torch.cuda.synchronize()  # the error must be raised here, not in the next copy
        return dequantised_product(x, weight, read)

    return _float_stack(product, layers, device, seed)


def _triton(layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    from moedoctor.kernels.unchecked import read_tensor

    def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        try:
            return dequantised_product(x, weight, read_tensor(scales, device).view(scales.shape))
        except ValueError as error:  # how Triton refuses an argument
            raise RuntimeError(str(error)) from error

    return _float_stack(product, layers, device, seed)


def _torch(layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    return _float_stack(dequantised_product, layers, device, seed)


def _marlin(layers: int, device: str, seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    from moedoctor.upstream.releases.moe_kernels import MoeKernels

    return marlin_stack(MoeKernels.installed(), layers, device, seed)


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
        weight, scales = (parameter.data for parameter in layer.parameters())  # [E, N, K], [E, N, 1]
        stack.append(QuantisedExperts(weight.to(torch.float8_e4m3fn), scales, product))
    return stack, x


_BACKENDS: dict[str, Callable[[int, str, int], tuple[nn.Sequential, torch.Tensor]]] = {
    "unchecked": _unchecked,
    "triton": _triton,
    "torch": _torch,
    "vllm_marlin": _marlin,
    "vllm_cutlass": _cutlass,
}
