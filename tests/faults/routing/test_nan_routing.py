"""MD001: its rows, what is counted, what the counts mean, and what its claims make of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moedoctor.faults.routing import nan_routing_claims as claims
from moedoctor.faults.routing.nan_routing import NanRouting, NanRoutingParameters
from moedoctor.faults.routing.nan_routing_lab import FaultyRouting, observe
from moedoctor.faults.routing.rows import ALL_NAN, KINDS, NEG_INF, ONE_NAN, POS_INF, make_rows
from moedoctor.fixes import routing as fixes
from moedoctor.fixes.routing import TopK
from moedoctor.interfaces import Measurement
from moedoctor.results import Case, CaseResult, CaseVerdict, ClaimVerdict, Observation, Skip, Tier

FAULT = NanRouting()
ROUTERS = ("softmax", "sigmoid", "grouped")


def parameters(**given: Any) -> NanRoutingParameters:
    if given.get("router") == "grouped":
        given = {"num_groups": 4, "topk_groups": 2, **given}
    return NanRoutingParameters(**{"experts": 16, "top_k": 4, "tokens": 56, "dtype": "float32", **given})


def judged(given: NanRoutingParameters, implementation: Any) -> tuple[CaseVerdict, Mapping[str, Any]]:
    seen = observe(given, "cpu", implementation)
    case = Case("MD001", "fixed", Tier.MODEL, given.model_dump())
    return FAULT.judge(case, seen).verdict, seen.evidence


@given(tokens=st.integers(1, 60), experts=st.integers(1, 40), seed=st.integers(0, 5))
def test_rows_are_what_their_kind_says(tokens: int, experts: int, seed: int) -> None:
    rows = make_rows(tokens, experts, dtype=torch.float32, bias="none", seed=seed, device="cpu")
    for row, kind in zip(rows.logits, rows.kinds, strict=True):
        assert int(row.isnan().sum()) == {ALL_NAN: experts, ONE_NAN: 1, "half_nan": experts // 2}.get(kind, 0)
        assert int((row == float("inf")).sum()) == (kind == POS_INF)
        assert int((row == float("-inf")).sum()) == {NEG_INF: 1, "all_neg_inf": experts}.get(kind, 0)
    if tokens >= 2 * len(KINDS):
        assert set(rows.kinds) == set(KINDS)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("bias", ["none", "random", "negative"])
def test_the_control_gives_an_all_nan_row_one_expert_k_times(router: str, bias: str) -> None:
    given = parameters(router=router, bias=bias)
    verdict, seen = judged(given, FaultyRouting())
    assert verdict is CaseVerdict.REPRODUCED
    assert seen["all_nan_rows_with_one_id"] == seen["all_nan_rows"] > 0
    assert (seen["clean_rows_wrong"], seen["rows_out_of_range"]) == (0, 0)
    assert seen["duplicates_by_kind"].get("clean") is None
    assert seen["example"]["ids"] == [seen["example"]["ids"][0]] * given.top_k


def test_the_control_is_stuck_only_where_its_scan_starts_on_nan() -> None:
    nan = float("nan")
    logits = torch.tensor([[nan, 1.0, 2.0, 0.0], [1.0, nan, 2.0, 0.0]])
    routed = FaultyRouting().topk_sigmoid(logits, 2, renormalize=False, bias=None)
    assert routed.ids.tolist() == [[0, 2], [2, 0]]
    assert routed.weights.isnan().tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("router", ROUTERS)
def test_ours_is_clean_under_both_policies(router: str) -> None:
    implementation = FAULT.fixed(Case("MD001", "fixed", Tier.MODEL, {}))
    assert sorted(implementation) == ["finite", "zero"]
    verdict, seen = judged(parameters(router=router, bias="random"), implementation)
    assert verdict is CaseVerdict.CLEAN
    assert (seen["rows"], seen["variants"]) == (2 * 56, ["zero", "finite"])


class Broken:
    """Ours with one thing wrong; each must be noticed."""

    def __init__(self, **wrong: Any) -> None:
        self.wrong = wrong

    def topk_softmax(self, logits: torch.Tensor, top_k: int, **options: Any) -> TopK:
        weights, ids = fixes.topk_softmax(logits, top_k + 1, **options)
        first = int("not_the_best" in self.wrong)
        weights, ids = weights[:, first : first + top_k], ids[:, first : first + top_k]  # [T, K] each
        total = weights.sum(1, keepdim=True)  # [T, 1]
        weights = weights / total.where(total > 0, 1.0)
        if "id" in self.wrong:
            ids[0, 0] = self.wrong["id"]
        if "weight" in self.wrong:
            weights[0, 0] = self.wrong["weight"]
        if "swap" in self.wrong:
            ids[0] = ids[0].flip(0)
        if "scale" in self.wrong:
            weights = weights * self.wrong["scale"]
        return TopK(weights, ids)


@pytest.mark.parametrize(
    ("wrong", "counter"),
    [
        ({"id": 16}, "rows_out_of_range"),
        ({"id": -1}, "rows_out_of_range"),
        ({"weight": float("nan")}, "rows_with_nonfinite_weights"),
        ({"weight": float("inf")}, "rows_with_nonfinite_weights"),
        ({"weight": 0.123}, "clean_rows_wrong"),
        ({"swap": True}, "clean_rows_wrong"),
        ({"not_the_best": True}, "clean_rows_wrong"),
        ({"scale": 0.5}, "clean_rows_wrong"),
        ({"scale": 0.0}, "clean_rows_wrong"),
    ],
)
def test_every_wrong_result_is_noticed(wrong: dict[str, Any], counter: str) -> None:
    assert judged(parameters(), Broken())[0] is CaseVerdict.CLEAN
    verdict, seen = judged(parameters(), Broken(**wrong))
    assert verdict is CaseVerdict.REPRODUCED
    assert seen[counter] > 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"experts": 4, "top_k": 5}, "top_k: 5 is more than experts 4"),
        ({"router": "grouped", "experts": 10, "num_groups": 4}, "does not divide experts 10"),
        (
            {"router": "grouped", "num_groups": 4, "topk_groups": 5},
            "topk_groups: 5 is more than num_groups 4",
        ),
        ({"router": "grouped", "top_k": 9}, "top_k: 9 is more than the experts of 2 groups"),
        ({"router": "grouped", "num_groups": None}, "the grouped router needs"),
        ({"num_groups": 4}, "only the grouped router has groups"),
        ({"dtype": "int8"}, "dtype"),
        ({"experts": "8"}, "experts"),
        ({"tolerance": 1}, "tolerance"),
    ],
)
def test_parameters_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        parameters(**wrong)


def case(subject: str, router: str = "softmax", **counts: int) -> CaseResult:
    evidence = {
        "rows": 112,
        "rows_with_duplicates": 0,
        "nan_rows": 24,
        "nan_rows_with_duplicates": 0,
        "rows_with_nonfinite_weights": 0,
        "clean_rows": 72,
        "clean_rows_with_duplicates": 0,
        "clean_rows_wrong": 0,
        "all_nan_rows": 8,
        "all_nan_rows_with_one_id": 0,
        "duplicates_by_kind": {},
        **counts,
    }
    given = {"router": router, "experts": 60, "top_k": 4, "dtype": "bfloat16", "bias": "negative"}
    return CaseResult(subject, Tier.KERNEL, given, CaseVerdict.CLEAN, evidence)


FAILING = {"rows_with_duplicates": 24, "nan_rows_with_duplicates": 24, "all_nan_rows_with_one_id": 8}


def test_first_fixed_release_is_read_off_the_releases() -> None:
    results = [
        case("vllm@0.9.2", **FAILING),
        case("vllm@0.33.0"),
        case("vllm@0.20.0"),
        case("vllm@0.19.1", **FAILING),
    ]
    said = FAULT.conclude(results)
    assert (said["last_failing_release"], said["first_fixed_release"]) == ("0.19.1", "0.20.0")
    assert [row["release"] for row in said["releases"]] == ["0.9.2", "0.19.1", "0.20.0", "0.33.0"]
    assert [row["duplicates_from_nan"] for row in said["releases"]] == [24, 24, 0, 0]


def test_a_release_that_fails_again_is_not_passed_over() -> None:
    results = [case("vllm@0.19.1"), case("vllm@0.20.0", **FAILING), case("vllm@0.21.0")]
    assert FAULT.conclude(results)["first_fixed_release"] == "0.21.0"


def test_nothing_is_concluded_from_fixed_releases_alone() -> None:
    assert FAULT.conclude([case("vllm@0.20.0")])["first_fixed_release"] is None
    assert FAULT.conclude([case("faulty", **FAILING), case("fixed")]) == {}


def test_duplicates_that_clean_rows_hold_too_do_not_come_from_nan() -> None:
    other = case("vllm@0.20.0", **FAILING, clean_rows_with_duplicates=56)
    said = FAULT.conclude([case("vllm@0.19.1", **FAILING), case("vllm@0.20.0"), other])
    assert said["first_fixed_release"] == "0.20.0"
    assert said["releases"][1]["clean_rows_with_duplicates"] == 56
    judged = FAULT.judge(
        Case("MD001", "vllm@0.20.0", Tier.KERNEL, other.parameters),
        Observation({**other.evidence, "rows_out_of_range": 0}),
    )
    assert (judged.verdict, judged.figure) == (
        CaseVerdict.REPRODUCED,
        "56 of 112 rows are clean and hold a duplicate id: not because of NaN",
    )


def test_always_distinct_looks_at_releases_from_the_fix_on_alone() -> None:
    limits, judge = {"max_rows": 0}, claims.judge_always_distinct
    assert (
        judge([case("vllm@0.19.1", **FAILING), case("faulty", **FAILING)], [], limits).verdict
        is ClaimVerdict.UNTESTED
    )
    assert judge([case("vllm@0.33.0")], [], limits).verdict is ClaimVerdict.CONFIRMED
    refuted = judge([case("vllm@0.33.0"), case("vllm@0.33.0", **FAILING)], [], limits)
    assert (refuted.verdict, len(refuted.evidence["rows"])) == (ClaimVerdict.REFUTED, 1)
    assert "E=60 negative bias" in str(refuted.reason)


def test_same_expert_is_decided_by_releases_before_the_fix_alone() -> None:
    limits = {"min_share": 0.99}
    judge = claims.judge_same_expert
    assert judge([case("faulty", **FAILING)], [], limits).verdict is ClaimVerdict.UNTESTED
    assert judge([case("vllm@0.20.0")], [], limits).verdict is ClaimVerdict.UNTESTED
    assert judge([case("vllm@0.19.1", **FAILING)], [], limits).verdict is ClaimVerdict.CONFIRMED
    assert judge([case("vllm@0.19.1")], [], limits).verdict is ClaimVerdict.REFUTED
    grouped = case("vllm@0.19.1", router="grouped")
    assert judge([case("vllm@0.19.1", **FAILING), grouped], [], limits).verdict is ClaimVerdict.CONFIRMED


def measured(unit: str, **evidence: Any) -> Measurement:
    return Measurement(unit, Observation(evidence))


def test_fused_is_free_compares_the_two_sides_of_the_fix_per_shape() -> None:
    def units(after: float) -> list[Measurement]:
        rows = {"vllm@0.19.1": 4.0, "vllm@0.20.0": after}
        return [
            measured(name, rows=[{"shape": "128x128", "kernel_us": rows[name]}]) for name in [*rows, *rows]
        ]

    limits = {"max_overhead": 0.03}
    assert claims.judge_fused_is_free([], units(4.1), limits).verdict is ClaimVerdict.CONFIRMED
    assert claims.judge_fused_is_free([], units(4.2), limits).verdict is ClaimVerdict.REFUTED
    one_side = [units(4.0)[0], Measurement("vllm@0.20.0", Skip("does not load"))]
    assert claims.judge_fused_is_free([], one_side, limits).verdict is ClaimVerdict.UNTESTED


def test_units_around_the_fix_are_in_turn() -> None:
    names = ["vllm@0.33.0", "vllm@0.18.0", "vllm@0.20.0", "vllm@0.19.1", "faulty"]
    assert claims._around_the_fix(names) == ["vllm@0.19.1", "vllm@0.20.0"] * 3
    assert list(claims._around_the_fix(names[:1])) == []


@pytest.mark.parametrize(
    ("ratio", "tokens", "correct", "verdict"),
    [
        (0.6, 1024, True, ClaimVerdict.CONFIRMED),
        (0.61, 1024, True, ClaimVerdict.REFUTED),
        (0.5, 8192, True, ClaimVerdict.CONFIRMED),
        (0.55, 8192, True, ClaimVerdict.REFUTED),
        (0.1, 128, False, ClaimVerdict.REFUTED),
    ],
)
def test_speed_holds_each_shape_to_its_limit(
    ratio: float, tokens: int, correct: bool, verdict: ClaimVerdict
) -> None:
    row = {"shape": "s", "tokens": tokens, "time_ratio": ratio, "correct": correct}
    said = claims.judge_speed(
        [], [measured("vllm@0.21.0", rows=[row])], {"max_ratio": 0.6, "max_ratio_8192": 0.5}
    )
    assert said.verdict is verdict


def test_separate_launch_must_lie_within_both_limits() -> None:
    limits = {"min_overhead": 0.2, "max_overhead": 0.4}
    for overhead, verdict in (
        (0.3, ClaimVerdict.CONFIRMED),
        (0.1, ClaimVerdict.REFUTED),
        (0.5, ClaimVerdict.REFUTED),
    ):
        unit = measured("vllm@0.33.0", rows=[{"kernel": "topk_softmax", "overhead": overhead}])
        assert claims.judge_separate_launch([], [unit], limits).verdict is verdict


def test_fp8_counts_what_became_of_nan() -> None:
    def said(plus: float, minus: float) -> ClaimVerdict:
        shares = {"clamped_to_plus_448": plus, "clamped_to_minus_448": minus, "still_nan": 1 - plus - minus}
        unit = measured("vllm@0.21.0", torch_cast_still_nan=1.0, **shares)
        return claims.judge_fp8([], [unit], {"min_share": 1.0}).verdict

    assert said(1.0, 0.0) is said(0.5, 0.5) is ClaimVerdict.CONFIRMED
    assert said(0.9, 0.0) is ClaimVerdict.REFUTED


def test_policy_cost_is_the_worst_row() -> None:
    rows = [
        {"shape": "a", "policy": "zero", "overhead": 0.0},
        {"shape": "b", "policy": "finite", "overhead": 0.03},
    ]
    assert (
        claims.judge_policy_cost([], [measured("", rows=rows)], {"max_overhead": 0.02}).verdict
        is ClaimVerdict.REFUTED
    )
    assert (
        claims.judge_policy_cost([], [measured("", rows=rows[:1])], {"max_overhead": 0.02}).verdict
        is ClaimVerdict.CONFIRMED
    )
