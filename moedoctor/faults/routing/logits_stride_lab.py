"""The lab of MD024: logits in padded rows, the top-k that reads them as if they were packed, and ours."""

from __future__ import annotations

from typing import Any

import torch

from moedoctor.faults.routing.logits_stride import LogitsStrideParameters
from moedoctor.fixes import routing as fixes
from moedoctor.fixes.routing import TopK
from moedoctor.reference import routing as reference
from moedoctor.reference.agreement import find_differing_rows
from moedoctor.results import Case, Evidence
from moedoctor.upstream.releases.moe_kernels import MoeKernels


def model(case: Case, parameters: LogitsStrideParameters, release: None) -> Evidence:
    """Route padded rows with the restated kernel, or with ours."""
    return count(parameters, case.device, PackedRows() if case.subject == "faulty" else fixes)


def kernel(case: Case, parameters: LogitsStrideParameters, release: MoeKernels | None) -> Evidence:
    """Route padded rows with a release's kernels, or with those of the installed vLLM."""
    return count(parameters, case.device, release or MoeKernels.installed())


class PackedRows:
    """The row offsets of vLLM's top-k kernels: row i begins at i times the number of experts.

    `moeSoftmax` and `moeSigmoid` have ``blockIdx.x * num_cols``, `topkGating` has
    ``thread_row * ELTS_PER_ROW`` (csrc/libtorch_stable/moe/topk_softmax_kernels.cu at 085c812b; the same in
    csrc/moe/topk_softmax_kernels.cu before). The ranking itself is right.
    """

    def topk_softmax(self, logits: torch.Tensor, top_k: int) -> TopK:
        return TopK(*reference.topk_softmax(read_as_packed(logits), top_k))

    def topk_sigmoid(self, logits: torch.Tensor, top_k: int) -> TopK:
        return TopK(*reference.topk_sigmoid(read_as_packed(logits), top_k))


def read_as_packed(logits: torch.Tensor) -> torch.Tensor:
    """Return [T, E], the memory of `logits` [T, E] read as rows without padding."""
    tokens, experts = logits.shape
    return logits.as_strided((tokens, experts), (experts, 1)).float()


def make_padded_logits(parameters: LogitsStrideParameters, device: str) -> torch.Tensor:
    """Return logits [T, E] with strides (width, 1), as Inductor stores them; padding holds numbers too."""
    draw = torch.Generator().manual_seed(parameters.seed)
    memory = torch.randn(parameters.tokens, parameters.width, generator=draw) * 2  # [T, width]
    return memory.to(device, getattr(torch, parameters.dtype))[:, : parameters.experts]


def count(parameters: LogitsStrideParameters, device: str, routing: Any) -> Evidence:
    """Count the rows whose experts are not those of their own logits."""
    logits = make_padded_logits(parameters, device)  # [T, E]
    name = f"topk_{parameters.router}"
    routed = TopK(*getattr(routing, name)(logits, parameters.top_k))
    own = logits.contiguous()  # [T, E]
    expected = TopK(*getattr(reference, name)(own.float(), parameters.top_k))
    wrong = find_differing_rows(
        own,
        routed.ids.long(),
        routed.weights,
        expected.ids,
        scoring=parameters.router,
        bias=None,
        renormalize=False,
        atol=1e-5,
    )  # [T]
    evidence: dict[str, Any] = {
        "rows": parameters.tokens,
        "rows_wrong": int(wrong.sum()),
        "rows_out_of_range": int(((routed.ids < 0) | (routed.ids >= parameters.experts)).any(1).sum()),
        "first_row_wrong": bool(wrong[0]),
    }
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        evidence["example"] = {"row": row, "ids": routed.ids[row].tolist(), "own": expected.ids[row].tolist()}
    return evidence
