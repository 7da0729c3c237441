"""The lab of MD001: rows of logits of every kind, the failing top-k restated, ours, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moedoctor.faults.routing.nan_routing import NanRoutingParameters
from moedoctor.fixes import routing as fixes
from moedoctor.fixes.routing import TopK
from moedoctor.reference import routing as reference
from moedoctor.reference.agreement import find_differing_rows
from moedoctor.results import Case, Evidence
from moedoctor.upstream.releases.moe_kernels import MoeKernels
from moedoctor.upstream.releases.old_topk import find_winners, repeat_argmax, topk_softmax

CLEAN, ALL_NAN, ONE_NAN, HALF_NAN = "clean", "all_nan", "one_nan", "half_nan"
POS_INF, NEG_INF, ALL_EQUAL, ALL_NEG_INF = "pos_inf", "neg_inf", "all_equal", "all_neg_inf"

KINDS = (CLEAN, ALL_NAN, ONE_NAN, HALF_NAN, POS_INF, NEG_INF, ALL_EQUAL, ALL_NEG_INF)
NAN_KINDS = (ALL_NAN, ONE_NAN, HALF_NAN)
WELL_DEFINED_KINDS = (CLEAN, NEG_INF, ALL_EQUAL)
"""Rows whose softmax is finite: every implementation must agree on them."""


def model(case: Case, parameters: NanRoutingParameters, release: None) -> Evidence:
    """Count what the failing argmax does, or ours under both NaN policies."""
    if case.subject == "faulty":
        return count(parameters, case.device, {"greater-than argmax": FaultyRouting()})
    return count(parameters, case.device, {policy: FixedRouting(policy) for policy in ("zero", "finite")})


def kernel(case: Case, parameters: NanRoutingParameters, release: MoeKernels | None) -> Evidence:
    """Count what a release's kernels do, or those of the installed vLLM."""
    return count(parameters, case.device, {"kernel": release or MoeKernels.installed()})


def count(parameters: NanRoutingParameters, device: str, variants: Mapping[str, Any]) -> Evidence:
    """Route rows of every kind through each variant and add up what comes out."""
    rows = make_rows(
        parameters.tokens,
        parameters.experts,
        dtype=getattr(torch, parameters.dtype),
        bias=parameters.bias,
        seed=parameters.seed,
        device=device,
    )
    totals, duplicates_by_kind = Counter[str](), Counter[str]()
    example: dict[str, Any] = {}
    for variant in variants.values():
        routed = _route(parameters, variant, rows)
        masks = _make_masks(parameters, rows, routed)  # name -> [T]
        totals.update({"rows": len(rows.kinds), **{name: int(mask.sum()) for name, mask in masks.items()}})
        duplicate = masks["rows_with_duplicates"]  # [T]
        duplicates_by_kind.update(rows.kinds[row] for row in duplicate.nonzero().flatten().tolist())
        shown = (duplicate | masks["rows_out_of_range"] | masks["clean_rows_wrong"]).nonzero()
        if len(shown) and not example:
            row = int(shown[0])
            ids, weights = routed.ids[row].tolist(), routed.weights[row].tolist()
            example = {"kind": rows.kinds[row], "ids": ids, "weights": weights}
    evidence = {
        "variants": list(variants),
        **totals,
        "duplicates_by_kind": dict(sorted(duplicates_by_kind.items())),
    }
    return {**evidence, "example": example} if example else evidence


@dataclass(frozen=True)
class Rows:
    """Router logits and what was done to each row."""

    logits: torch.Tensor
    """[T, E]"""
    kinds: tuple[str, ...]
    """Kind of each of the T rows. Every other row is clean, the rest take turns."""
    bias: torch.Tensor | None
    """[E] float32, for the choice only."""

    def mask(self, *kinds: str) -> torch.Tensor:
        """[T] bool: the rows of these kinds."""
        return torch.tensor([kind in kinds for kind in self.kinds], device=self.logits.device)


def make_rows(tokens: int, experts: int, *, dtype: torch.dtype, bias: str, seed: int, device: str) -> Rows:
    """`tokens` rows of `experts` logits. Drawn on the CPU, so a seed gives the same rows everywhere."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=draw) * 2  # [T, E]
    place = torch.randint(experts, (tokens,), generator=draw)  # [T]
    whole_rows = {ALL_NAN: float("nan"), ALL_NEG_INF: float("-inf")}
    one_entry = {ONE_NAN: float("nan"), POS_INF: float("inf"), NEG_INF: float("-inf")}
    others = KINDS[1:]
    kinds = tuple(CLEAN if row % 2 == 0 else others[row // 2 % len(others)] for row in range(tokens))
    for row, kind in enumerate(kinds):
        if kind in whole_rows:
            logits[row] = whole_rows[kind]
        elif kind in one_entry:
            logits[row, place[row]] = one_entry[kind]
        elif kind == HALF_NAN:
            logits[row, torch.randperm(experts, generator=draw)[: experts // 2]] = float("nan")
        elif kind == ALL_EQUAL:
            logits[row] = logits[row, place[row]].clone()
    if bias == "none":
        return Rows(logits.to(device, dtype), kinds, None)
    values = torch.rand(experts, generator=draw) - 0.5  # [E], in [-0.5, 0.5)
    if bias == "negative":
        values = values - 3.0  # every choice below -1
    return Rows(logits.to(device, dtype), kinds, values.to(device))


class FaultyRouting:
    """The argmax of vLLM up to 0.19.1, as `old_topk` restates it.

    Restated for grouped routing too, as the same argmax over groups and then over their experts. No
    upstream grouped kernel is known to do that. The tier `kernel` shows what the real ones do.
    """

    def topk_softmax(self, logits: torch.Tensor, top_k: int, **options: Any) -> TopK:
        return topk_softmax(logits, top_k, **options)

    def topk_sigmoid(self, logits: torch.Tensor, top_k: int, **options: Any) -> TopK:
        return repeat_argmax(torch.sigmoid(logits.float()), top_k, **options)

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
        counted = 1 if bias is None else min(2, grouped.shape[2])
        best = grouped.topk(counted, dim=2).values.sum(2)  # [T, G]
        groups = find_winners(best, topk_groups)  # [T, topk_groups]
        keep = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)  # [T, G]
        allowed = keep.repeat_interleave(grouped.shape[2], dim=1)  # [T, E]
        return repeat_argmax(scores, top_k, renormalize=renormalize, bias=bias, allowed=allowed)


class FixedRouting:
    """`moedoctor.fixes.routing` under one policy."""

    def __init__(self, policy: str) -> None:
        self.topk_softmax = partial(fixes.topk_softmax, nan_policy=policy)
        self.topk_sigmoid = partial(fixes.topk_sigmoid, nan_policy=policy)
        self.grouped_topk = partial(fixes.grouped_topk, nan_policy=policy)


def _route(parameters: NanRoutingParameters, routing: Any, rows: Rows) -> TopK:
    options: dict[str, Any] = {"renormalize": parameters.renormalize, "bias": rows.bias}
    if parameters.router == "grouped":
        options |= {"num_groups": parameters.num_groups or 1, "topk_groups": parameters.topk_groups or 1}
        return TopK(*routing.grouped_topk(rows.logits, parameters.top_k, **options))
    route = routing.topk_sigmoid if parameters.router == "sigmoid" else routing.topk_softmax
    return TopK(*route(rows.logits, parameters.top_k, **options))


def _make_masks(parameters: NanRoutingParameters, rows: Rows, routed: TopK) -> dict[str, torch.Tensor]:
    """Name of a count -> bool [T], the rows that count."""
    ids = routed.ids.long()  # [T, K]
    ordered = ids.sort(dim=1).values  # [T, K]
    expected = _route(parameters, reference, Rows(rows.logits.float(), rows.kinds, rows.bias))
    # vLLM's grouped kernel computes in the type of the logits; all others, and ours, in float32.
    in_float32 = parameters.router != "grouped" or parameters.dtype == "float32"
    atol = 1e-5 if in_float32 else torch.finfo(getattr(torch, parameters.dtype)).eps
    differing = find_differing_rows(
        rows.logits,
        ids,
        routed.weights,
        expected.ids,
        scoring="softmax" if parameters.router == "softmax" else "sigmoid",
        bias=rows.bias,
        renormalize=parameters.renormalize,
        atol=atol,
    )  # [T]
    nan, all_nan, clean = rows.mask(*NAN_KINDS), rows.mask(ALL_NAN), rows.mask(*WELL_DEFINED_KINDS)  # [T]
    duplicate = (ordered[:, 1:] == ordered[:, :-1]).any(1)  # [T]
    one_id = (ids == ids[:, :1]).all(1) & (ids.shape[1] > 1)  # [T]
    return {
        "rows_with_duplicates": duplicate,
        "rows_out_of_range": ((ids < 0) | (ids >= parameters.experts)).any(1),
        "rows_with_nonfinite_weights": (~routed.weights.isfinite()).any(1),
        "nan_rows": nan,
        "nan_rows_with_duplicates": duplicate & nan,
        "clean_rows_with_duplicates": duplicate & clean,
        "all_nan_rows": all_nan,
        "all_nan_rows_with_one_id": one_id & all_nan,
        "clean_rows": clean,
        "clean_rows_wrong": differing & clean,
    }
