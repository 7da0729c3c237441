"""vLLM's FP8 quantisation kernel out of a release."""

from __future__ import annotations

from pathlib import Path

import torch

from moedoctor.results import UnavailableError
from moedoctor.upstream.releases.moe_kernels import chain, fill, load_library
from moedoctor.upstream.releases.wheel import core_libraries


def static_scaled_fp8_quant(source: Path, values: torch.Tensor) -> torch.Tensor:
    """`values` [T, N] as float8_e4m3fn [T, N] by the release's own kernel, with a scale of 1.

    Raises UnavailableError where the release's core kernels are not at hand or do not load.
    """
    operator = _operator(source)
    result = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)  # [T, N]
    scale = torch.ones(1, dtype=torch.float32, device=values.device)  # [1]
    given = {"result": result, "input": values, "scale": scale}
    schema = operator.default._schema

    operator(**fill(schema, given))
    return result


def _operator(source: Path) -> torch._ops.OpOverloadPacket:
    trouble = "no vllm/_C*.abi3.so goes with it"
    for library in core_libraries(source):
        try:
            load_library(library)
        except OSError as error:
            trouble = chain(error)
        if hasattr(torch.ops._C, "static_scaled_fp8_quant"):
            return torch.ops._C.static_scaled_fp8_quant
    raise UnavailableError(
        f"{source.name}: the FP8 quantisation kernel of this release cannot be loaded: {trouble}"
    )
