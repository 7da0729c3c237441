"""The lab of MD024: logits in padded rows, the top-k that reads them as if they were packed, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moedoctor.faults.routing.logits_stride import LogitsStrideParameters
from moedoctor.fixes import routing as fixes
from moedoctor.reference import routing as reference
from moedoctor.reference.agreement import find_differing_rows
from moedoctor.results import Case, Evidence
from moedoctor.upstream.releases.moe_kernels import MoeKernels


def model(case: Case, parameters: LogitsStrideParameters, release: None) -> Evidence:
    """Route padded rows with the restated kernel, or with ours."""
    if case.subject == "faulty":
        return count(parameters, case.device, reference, read_as_packed)
    return count(parameters, case.device, fixes)


def kernel(case: Case, parameters: LogitsStrideParameters, release: MoeKernels | None) -> Evidence:
    """Route padded rows with a release's kernels, or with those of the installed vLLM."""
    return count(parameters, case.device, release or MoeKernels.installed())


def read_as_packed(logits: torch.Tensor) -> torch.Tensor:
    """Return [T, E], the memory of `logits` [T, E] as vLLM's top-k kernels read it: rows without padding.

    `moeSoftmax` and `moeSigmoid` begin row i at ``blockIdx.x * num_cols``, `topkGating` at
    ``thread_row * ELTS_PER_ROW`` (csrc/libtorch_stable/moe/topk_softmax_kernels.cu at 085c812b; the same in
    csrc/moe/topk_softmax_kernels.cu before). The ranking itself is right.
    """
    tokens, experts = logits.shape
    return logits.as_strided((tokens, experts), (experts, 1)).float()


def make_padded_logits(parameters: LogitsStrideParameters, device: str) -> torch.Tensor:
    """Return logits [T, E] with strides (width, 1), as Inductor stores them; padding holds numbers too."""
    draw = torch.Generator().manual_seed(parameters.seed)
    memory = torch.randn(parameters.tokens, parameters.width, generator=draw) * 2  # [T, width]
    return memory.to(device, getattr(torch, parameters.dtype))[:, : parameters.experts]


def count(
    parameters: LogitsStrideParameters,
    device: str,
    routing: Any,
    read: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
) -> Evidence:
    """Count the rows whose experts are not those of their own logits; `read` is how they are read."""
    logits = make_padded_logits(parameters, device)  # [T, E]
    name = f"topk_{parameters.router}"
    weights, ids = getattr(routing, name)(read(logits), parameters.top_k)  # [T, K] each
    own = logits.contiguous()  # [T, E]
    _, expected = getattr(reference, name)(own.float(), parameters.top_k)  # [T, K]
    wrong = find_differing_rows(own, ids, weights, expected, scoring=parameters.router)  # [T]
    evidence: dict[str, Any] = {
        "rows": parameters.tokens,
        "rows_wrong": int(wrong.sum()),
        "rows_out_of_range": int(((ids < 0) | (ids >= parameters.experts)).any(1).sum()),
        "first_row_wrong": bool(wrong[0]),
    }
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        evidence["example"] = {"row": row, "ids": ids[row].tolist(), "own": expected[row].tolist()}
    return evidence
