"""What runs in the child for MD001: the failing algorithm restated, ours, and what is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moedoctor.faults.routing.rows import NAN_KINDS, WELL_DEFINED_KINDS, Rows, make_rows
from moedoctor.fixes import routing as fixes
from moedoctor.fixes.routing import TopK
from moedoctor.reference import routing as reference
from moedoctor.reference.agreement import differing_rows
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.routing.nan_routing import NanRoutingParameters

_BLANK = -10000.0
"""What vLLM's kernel overwrites a winner with before it looks for the next one."""


class FaultyRouting:
    """The argmax of vLLM up to 0.19.1 (csrc/moe/topk_softmax_kernels.cu), one thread's view of it.

    Restated for grouped routing too, as the same argmax over groups and then over their experts; no
    upstream grouped kernel is known to do that. What the real ones do is shown at tier `kernel`.
    """

    def topk_softmax(
        self, logits: torch.Tensor, top_k: int, *, renormalize: bool, bias: torch.Tensor | None
    ) -> TopK:
        return _argmax_k_times(torch.softmax(logits.float(), dim=-1), top_k, renormalize, bias)

    def topk_sigmoid(
        self, logits: torch.Tensor, top_k: int, *, renormalize: bool, bias: torch.Tensor | None
    ) -> TopK:
        return _argmax_k_times(torch.sigmoid(logits.float()), top_k, renormalize, bias)

    def grouped_topk(
        self,
        logits: torch.Tensor,
        top_k: int,
        *,
        num_groups: int,
        topk_groups: int,
        renormalize: bool,
        bias: torch.Tensor | None,
    ) -> TopK:
        scores = torch.sigmoid(logits.float())  # [T, E]
        choice = scores if bias is None else scores + bias  # [T, E]
        grouped = choice.unflatten(1, (num_groups, -1))  # [T, G, E/G]
        best = grouped.topk(min(2, grouped.shape[2]) if bias is not None else 1, dim=2).values.sum(
            2
        )  # [T, G]
        groups = _winners(best, topk_groups)  # [T, topk_groups]
        keep = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)  # [T, G]
        allowed = keep.repeat_interleave(grouped.shape[2], dim=1)  # [T, E]
        return _argmax_k_times(scores, top_k, renormalize, bias, allowed)


@dataclass(frozen=True)
class FixedRouting:
    """`moedoctor.fixes.routing` under one policy."""

    policy: str

    def topk_softmax(self, logits: torch.Tensor, top_k: int, **options: Any) -> TopK:
        return fixes.topk_softmax(logits, top_k, nan_policy=self.policy, **options)

    def topk_sigmoid(self, logits: torch.Tensor, top_k: int, **options: Any) -> TopK:
        return fixes.topk_sigmoid(logits, top_k, nan_policy=self.policy, **options)

    def grouped_topk(self, logits: torch.Tensor, top_k: int, **options: Any) -> TopK:
        return fixes.grouped_topk(logits, top_k, nan_policy=self.policy, **options)


def observe(parameters: NanRoutingParameters, device: str, implementation: Any) -> Observation:
    """Route rows of every kind through each variant of `implementation` and count what comes out."""
    rows = make_rows(
        parameters.tokens,
        parameters.experts,
        dtype=getattr(torch, parameters.dtype),
        bias=parameters.bias,
        seed=parameters.seed,
        device=device,
    )
    variants = implementation if isinstance(implementation, Mapping) else {"kernel": implementation}
    totals: dict[str, Any] = {"variants": list(variants)}
    for variant in variants.values():
        for key, value in _count(parameters, rows, _route(parameters, variant, rows)).items():
            totals[key] = _add(totals.get(key), value)
    return Observation(totals)


def _route(parameters: NanRoutingParameters, routing: Any, rows: Rows) -> TopK:
    options: dict[str, Any] = {"renormalize": parameters.renormalize, "bias": rows.bias}
    if parameters.router == "grouped":
        options |= {"num_groups": parameters.num_groups or 1, "topk_groups": parameters.topk_groups or 1}
        result = routing.grouped_topk(rows.logits, parameters.top_k, **options)
    elif parameters.router == "sigmoid":
        result = routing.topk_sigmoid(rows.logits, parameters.top_k, **options)
    else:
        result = routing.topk_softmax(rows.logits, parameters.top_k, **options)
    return TopK(*result)


def _count(parameters: NanRoutingParameters, rows: Rows, routed: TopK) -> dict[str, Any]:
    ids, weights = routed.ids.long(), routed.weights  # [T, K] each
    ordered = ids.sort(dim=1).values  # [T, K]
    duplicate = (ordered[:, 1:] == ordered[:, :-1]).any(1)  # [T]
    outside = ((ids < 0) | (ids >= parameters.experts)).any(1)  # [T]
    same = (ids == ids[:, :1]).all(1) & (ids.shape[1] > 1)  # [T]
    nan, all_nan = rows.mask(NAN_KINDS), rows.mask(("all_nan",))  # [T] each
    clean = rows.mask(WELL_DEFINED_KINDS)  # [T]
    expected = _route(parameters, reference, Rows(rows.logits.float(), rows.kinds, rows.bias))
    wrong = clean & differing_rows(
        rows.logits,
        ids,
        weights,
        expected.ids,
        scoring="softmax" if parameters.router == "softmax" else "sigmoid",
        bias=rows.bias,
        renormalize=parameters.renormalize,
        atol=_tolerance(parameters),
    )  # [T]
    counts = {
        "rows": len(rows.kinds),
        "rows_with_duplicates": int(duplicate.sum()),
        "rows_out_of_range": int(outside.sum()),
        "rows_with_nonfinite_weights": int((~weights.isfinite()).any(1).sum()),
        "nan_rows": int(nan.sum()),
        "nan_rows_with_duplicates": int((duplicate & nan).sum()),
        "clean_rows_with_duplicates": int((duplicate & clean).sum()),
        "all_nan_rows": int(all_nan.sum()),
        "all_nan_rows_with_one_id": int((same & all_nan).sum()),
        "clean_rows": int(clean.sum()),
        "clean_rows_wrong": int(wrong.sum()),
        "duplicates_by_kind": {
            kind: sum(1 for row, one in enumerate(rows.kinds) if one == kind and bool(duplicate[row]))
            for kind in sorted({one for row, one in enumerate(rows.kinds) if bool(duplicate[row])})
        },
    }
    shown = (duplicate | outside | wrong).nonzero()
    if len(shown):
        row = int(shown[0])
        counts["example"] = {
            "kind": rows.kinds[row],
            "ids": ids[row].tolist(),
            "weights": weights[row].tolist(),
        }
    return counts


def _tolerance(parameters: NanRoutingParameters) -> float:
    """How far a clean row may part from the float32 reference.

    vLLM's grouped kernel computes in the type of the logits; all others, and ours, in float32.
    """
    if parameters.router == "grouped" and parameters.dtype != "float32":
        return torch.finfo(getattr(torch, parameters.dtype)).eps
    return 1e-5


def _add(total: Any, value: Any) -> Any:
    if total is None:
        return value
    if isinstance(value, int):
        return total + value
    return (
        {**value, **total}
        if "ids" in total
        else {key: total.get(key, 0) + value.get(key, 0) for key in {*total, *value}}
    )


def _argmax_k_times(
    scores: torch.Tensor,
    top_k: int,
    renormalize: bool,
    bias: torch.Tensor | None,
    allowed: torch.Tensor | None = None,
) -> TopK:
    choice = scores if bias is None else scores + bias  # [T, E]
    if allowed is not None:
        choice = torch.where(allowed, choice, float("-inf"))  # [T, E]
    ids = _winners(choice, top_k)  # [T, K]
    weights = scores.gather(1, ids)  # [T, K]
    if renormalize:
        total = weights.sum(1, keepdim=True)  # [T, 1]
        weights = weights / torch.where(total > 0, total, 1.0)
    return TopK(weights, ids.int())


def _winners(choice: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count]: the winner of ``value > best``, scanned from the first column, `count` times.

    Nothing is greater than NaN, so a scan that starts on NaN ends where it started, and one that
    starts elsewhere walks past it.
    """
    choice = choice.clone()  # [T, E]
    winners = []
    for _ in range(count):
        passable = choice.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))  # [T, E]
        winner = torch.where(choice[:, 0].isnan(), 0, passable.argmax(1))  # [T]
        winners.append(winner)
        choice.scatter_(1, winner[:, None], _BLANK)
    return torch.stack(winners, dim=1)
