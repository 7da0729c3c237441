"""The lab of MD001: rows of logits of every kind, the failing top-k restated, ours, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moedoctor.faults.routing.nan_routing import NanRoutingParameters
from moedoctor.fixes import routing as fixes
from moedoctor.fixes.routing import TopK
from moedoctor.reference import routing as reference
from moedoctor.reference.agreement import find_differing_rows
from moedoctor.results import Case, Evidence
from moedoctor.upstream.releases import old_topk
from moedoctor.upstream.releases.moe_kernels import MoeKernels

CLEAN, ALL_NAN, ONE_NAN, HALF_NAN = "clean", "all_nan", "one_nan", "half_nan"
POS_INF, NEG_INF, ALL_EQUAL, ALL_NEG_INF = "pos_inf", "neg_inf", "all_equal", "all_neg_inf"

KINDS = (CLEAN, ALL_NAN, ONE_NAN, HALF_NAN, POS_INF, NEG_INF, ALL_EQUAL, ALL_NEG_INF)
NAN_KINDS = (ALL_NAN, ONE_NAN, HALF_NAN)
WELL_DEFINED_KINDS = (CLEAN, NEG_INF, ALL_EQUAL)
"""Rows whose softmax is finite: every implementation must agree on them."""


def model(case: Case, parameters: NanRoutingParameters, release: None) -> Evidence:
    """Count what the failing argmax does, or ours under both NaN policies."""
    if case.subject == "faulty":
        return count(parameters, case.device, {"greater-than argmax": (old_topk, {})})
    policies = {policy: (fixes, {"nan_policy": policy}) for policy in ("zero", "finite")}
    return count(parameters, case.device, policies)


def kernel(case: Case, parameters: NanRoutingParameters, release: MoeKernels | None) -> Evidence:
    """Count what a release's kernels do, or those of the installed vLLM."""
    return count(parameters, case.device, {"kernel": (release or MoeKernels.installed(), {})})


def count(
    parameters: NanRoutingParameters, device: str, variants: Mapping[str, tuple[Any, Mapping[str, str]]]
) -> Evidence:
    """Route rows of every kind through each variant, with its options, and add up what comes out."""
    rows = make_rows(parameters, device)
    totals, duplicates_by_kind = Counter[str](), Counter[str]()
    example: dict[str, Any] = {}
    for routing, options in variants.values():
        routed = _route(parameters, routing, rows, **options)
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
    logits: torch.Tensor
    """[T, E]"""
    kinds: tuple[str, ...]
    """Kind of each of the T rows. Every other row is clean, the rest take turns."""
    bias: torch.Tensor | None
    """[E] float32, for the choice only."""

    def mask(self, *kinds: str) -> torch.Tensor:
        """[T] bool: the rows of these kinds."""
        return torch.tensor([kind in kinds for kind in self.kinds], device=self.logits.device)


def make_rows(parameters: NanRoutingParameters, device: str) -> Rows:
    """Rows of logits of every kind. Drawn on the CPU, so a seed gives the same rows everywhere."""
    tokens, experts = parameters.tokens, parameters.experts
    draw = torch.Generator().manual_seed(parameters.seed)
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
    logits = logits.to(device, getattr(torch, parameters.dtype))
    if parameters.bias == "none":
        return Rows(logits, kinds, None)
    bias = torch.rand(experts, generator=draw) - 0.5  # [E], in [-0.5, 0.5)
    if parameters.bias == "negative":
        bias = bias - 3.0  # every choice below -1
    return Rows(logits, kinds, bias.to(device))


def _route(parameters: NanRoutingParameters, routing: Any, rows: Rows, **options: Any) -> TopK:
    options |= {"renormalize": parameters.renormalize, "bias": rows.bias}
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
