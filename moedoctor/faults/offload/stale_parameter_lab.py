"""The child process for MD020: offloaded layers, with several products that read the config's scales."""

from __future__ import annotations

import torch
from torch import nn

from moedoctor.faults.base import need_gpu
from moedoctor.faults.offload.offloaded_scales_lab import make_marlin_stack
from moedoctor.faults.offload.stale_config import (
    Kernel,
    QuantizedExperts,
    multiply_dequantized,
    offload_and_run,
    run_simulated,
)
from moedoctor.faults.offload.stale_parameter import StaleParameterParameters
from moedoctor.results import Case, Evidence

_EXPERTS, _WIDTH, _TOKENS = 4, 256, 512


def model(case: Case, parameters: StaleParameterParameters, release: None) -> Evidence:
    """Simulated layers, whose kernel checks where the scales are or reads any address."""
    checks = parameters.backend == "checks"
    return run_simulated(case.subject, parameters.layers, parameters.seed, checks=checks)


def kernel(case: Case, parameters: StaleParameterParameters, release: None) -> Evidence:
    """The product of one backend on a GPU."""
    from moedoctor.upstream.releases.moe_kernels import MoeKernels

    need_gpu()
    if parameters.backend == "vllm_marlin":
        kernels = MoeKernels.installed()
        stack, x = make_marlin_stack(kernels, parameters.layers, case.device, parameters.seed)
    else:
        stack, x = _make_int8_stack(parameters, case.device)
    return offload_and_run(case.subject, stack, x)


def _make_int8_stack(parameters: StaleParameterParameters, device: str) -> tuple[nn.Sequential, torch.Tensor]:
    """Square layers of int8 numbers with a float32 scale for each output channel, and tokens."""
    product = _PRODUCTS[parameters.backend]
    dtype = torch.float8_e4m3fn if product is _multiply_by_cutlass else torch.int8
    generator = torch.Generator(device).manual_seed(parameters.seed)
    stack = nn.Sequential()
    for _ in range(parameters.layers):
        weight = torch.randint(
            -8, 8, (_EXPERTS, _WIDTH, _WIDTH), dtype=torch.int8, device=device, generator=generator
        )  # [E, N, K]
        scales = torch.rand(_EXPERTS, _WIDTH, 1, device=device, generator=generator) / _WIDTH  # [E, N, 1]
        stack.append(QuantizedExperts(weight.to(dtype), scales, product))
    return stack, torch.randn(_TOKENS, _WIDTH, device=device, generator=generator)  # [T, K]


def _read_unchecked(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from moedoctor.kernels.unchecked import read_address

    read = read_address(scales.data_ptr(), scales.numel(), str(x.device)).view(scales.shape)  # [E, N, 1]
    torch.cuda.synchronize()  # the error must be raised here, not in the next copy
    return multiply_dequantized(x, weight, read)


def _read_by_triton(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from moedoctor.kernels.unchecked import read_tensor

    try:
        return multiply_dequantized(x, weight, read_tensor(scales, str(x.device)).view(scales.shape))
    except ValueError as error:  # how Triton refuses an argument
        raise RuntimeError(str(error)) from error


def _multiply_by_cutlass(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from moedoctor.upstream.releases.products import load_operators, multiply_by_cutlass

    out = multiply_by_cutlass(load_operators(), x.to(torch.float8_e4m3fn), weight, scales)
    torch.cuda.synchronize()
    return out.float()


_PRODUCTS: dict[str, Kernel] = {
    "unchecked": _read_unchecked,
    "triton": _read_by_triton,
    "torch": multiply_dequantized,
    "vllm_cutlass": _multiply_by_cutlass,
}
