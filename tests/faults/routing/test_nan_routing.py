"""MD001: its rows, its counters, the verdicts and the judges of its claims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fault_cases import by_cases, by_rows, run
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.faults.routing import nan_routing as md001
from moedoctor.faults.routing.nan_routing import NanRouting, NanRoutingParameters
from moedoctor.faults.routing.nan_routing_lab import (
    ALL_NAN,
    KINDS,
    NEG_INF,
    ONE_NAN,
    POS_INF,
    FaultyRouting,
    count,
    make_rows,
)
from moedoctor.fixes import routing as fixes
from moedoctor.fixes.routing import TopK
from moedoctor.interfaces import ClaimTest, Measurement
from moedoctor.results import Case, CaseResult, CaseVerdict, ClaimVerdict, Observation, Skip, Tier

FAULT = NanRouting()
ROUTERS = ("softmax", "sigmoid", "grouped")


def parameters(**given: Any) -> NanRoutingParameters:
    if given.get("router") == "grouped":
        given = {"num_groups": 4, "topk_groups": 2, **given}
    return NanRoutingParameters(**{"experts": 16, "top_k": 4, "tokens": 56, "dtype": "float32", **given})


def judged(given: NanRoutingParameters, routing: Any) -> tuple[CaseVerdict, Mapping[str, Any]]:
    observation = count(given, "cpu", {"kernel": routing})
    return FAULT.judge(Case("MD001", "fixed", Tier.MODEL, {}), observation).verdict, observation.evidence


@given(tokens=st.integers(1, 60), experts=st.integers(1, 40), seed=st.integers(0, 5))
def test_rows_match_their_kind(tokens: int, experts: int, seed: int) -> None:
    rows = make_rows(tokens, experts, dtype=torch.float32, bias="none", seed=seed, device="cpu")
    for row, kind in zip(rows.logits, rows.kinds, strict=True):
        assert int(row.isnan().sum()) == {ALL_NAN: experts, ONE_NAN: 1, "half_nan": experts // 2}.get(kind, 0)
        assert int((row == float("inf")).sum()) == (kind == POS_INF)
        assert int((row == float("-inf")).sum()) == {NEG_INF: 1, "all_neg_inf": experts}.get(kind, 0)
    if tokens >= 2 * len(KINDS):
        assert set(rows.kinds) == set(KINDS)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("bias", ["none", "random", "negative"])
def test_the_control_gives_an_all_nan_row_one_expert_k_times_and_the_fix_does_not(
    router: str, bias: str
) -> None:
    given = parameters(router=router, bias=bias).model_dump()
    judgement, evidence = run(FAULT, "faulty", **given)
    assert judgement.verdict is CaseVerdict.REPRODUCED
    assert evidence["all_nan_rows_with_one_id"] == evidence["all_nan_rows"] > 0
    assert (evidence["clean_rows_wrong"], evidence["rows_out_of_range"]) == (0, 0)
    assert evidence["duplicates_by_kind"].get("clean") is None
    assert evidence["example"]["ids"] == [evidence["example"]["ids"][0]] * 4
    judgement, evidence = run(FAULT, "fixed", **given)
    assert judgement.verdict is CaseVerdict.CLEAN
    assert (evidence["rows"], evidence["variants"]) == (2 * 56, ["zero", "finite"])


def test_the_control_is_stuck_only_if_its_scan_starts_on_nan() -> None:
    nan = float("nan")
    logits = torch.tensor([[nan, 1.0, 2.0, 0.0], [1.0, nan, 2.0, 0.0]])
    routed = FaultyRouting().topk_sigmoid(logits, 2, renormalize=False, bias=None)
    assert routed.ids.tolist() == [[0, 2], [2, 0]]
    assert routed.weights.isnan().tolist() == [[True, False], [False, False]]


class Broken:
    """Our routing with one planted error."""

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
    verdict, evidence = judged(parameters(), Broken(**wrong))
    assert verdict is CaseVerdict.REPRODUCED
    assert evidence[counter] > 0


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


def test_the_first_fixed_release_follows_from_the_results() -> None:
    results = [
        case("vllm@0.9.2", **FAILING),
        case("vllm@0.33.0"),
        case("vllm@0.20.0"),
        case("vllm@0.19.1", **FAILING),
    ]
    conclusions = FAULT.conclude(results)
    assert (conclusions["last_failing_release"], conclusions["first_fixed_release"]) == ("0.19.1", "0.20.0")
    assert [row["release"] for row in conclusions["releases"]] == ["0.9.2", "0.19.1", "0.20.0", "0.33.0"]
    assert [row["duplicates_from_nan"] for row in conclusions["releases"]] == [24, 24, 0, 0]


def test_the_first_fixed_release_comes_after_the_last_failure() -> None:
    results = [case("vllm@0.19.1"), case("vllm@0.20.0", **FAILING), case("vllm@0.21.0")]
    assert FAULT.conclude(results)["first_fixed_release"] == "0.21.0"


def test_nothing_is_concluded_from_fixed_releases_alone() -> None:
    assert FAULT.conclude([case("vllm@0.20.0")])["first_fixed_release"] is None
    assert FAULT.conclude([case("faulty", **FAILING), case("fixed")]) == {}


def test_duplicates_in_clean_rows_too_do_not_come_from_nan() -> None:
    other = case("vllm@0.20.0", **FAILING, clean_rows_with_duplicates=56)
    conclusions = FAULT.conclude([case("vllm@0.19.1", **FAILING), case("vllm@0.20.0"), other])
    assert conclusions["first_fixed_release"] == "0.20.0"
    assert conclusions["releases"][1]["clean_rows_with_duplicates"] == 56
    judgement = FAULT.judge(
        Case("MD001", "vllm@0.20.0", Tier.KERNEL, other.parameters),
        Observation({**other.evidence, "rows_out_of_range": 0}),
    )
    assert (judgement.verdict, judgement.figure) == (
        CaseVerdict.REPRODUCED,
        "56 of 112 rows are clean and hold a duplicate id: not because of NaN",
    )


# --- Claims about the kernels of releases ----------------------------------------------------------------

CONFIRMED, REFUTED, UNTESTED = ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED, ClaimVerdict.UNTESTED


def test_always_distinct_checks_only_releases_with_the_fix() -> None:
    limits, old = {"max_rows": 0}, [case("vllm@0.19.1", **FAILING), case("faulty", **FAILING)]
    assert by_cases(md001.always_distinct, limits, old).verdict is UNTESTED
    assert by_cases(md001.always_distinct, limits, [*old, case("vllm@0.33.0")]).verdict is CONFIRMED
    refuted = by_cases(md001.always_distinct, limits, [case("vllm@0.33.0"), case("vllm@0.33.0", **FAILING)])
    assert (refuted.verdict, len(refuted.evidence["rows"])) == (REFUTED, 1)
    assert "E=60 negative bias" in str(refuted.reason)


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        ([case("faulty", **FAILING)], UNTESTED),
        ([case("vllm@0.20.0")], UNTESTED),
        ([case("vllm@0.19.1", **FAILING)], CONFIRMED),
        ([case("vllm@0.19.1")], REFUTED),
        ([case("vllm@0.19.1", **FAILING), case("vllm@0.19.1", router="grouped")], CONFIRMED),
    ],
)
def test_same_expert_is_decided_only_by_releases_before_the_fix(cases: Any, verdict: ClaimVerdict) -> None:
    assert by_cases(md001.same_expert, {"min_share": 0.99}, cases).verdict is verdict


def test_fused_is_free_compares_the_two_sides_of_the_fix_per_shape() -> None:
    def units(after: float) -> list[Measurement]:
        times = {"vllm@0.19.1": 4.0, "vllm@0.20.0": after}
        return [
            Measurement(name, Observation({"rows": [{"shape": "128x128", "kernel_us": times[name]}]}))
            for name in [*times, *times]
        ]

    judge, limits = md001.fused_is_free.judge, {"max_overhead": 0.03}
    assert judge([], units(4.1), limits).verdict is CONFIRMED
    assert judge([], units(4.2), limits).verdict is REFUTED
    one_side = [units(4.0)[0], Measurement("vllm@0.20.0", Skip("does not load"))]
    assert judge([], one_side, limits).verdict is UNTESTED


def test_units_around_the_fix_alternate() -> None:
    names = ["vllm@0.33.0", "vllm@0.18.0", "vllm@0.20.0", "vllm@0.19.1", "faulty"]
    assert md001.fused_is_free.units(names) == ["vllm@0.19.1", "vllm@0.20.0"] * 3
    assert list(md001.fused_is_free.units(names[:1])) == []
    assert list(md001.separate_launch.units(names)) == ["vllm@0.33.0"]
    assert list(md001.speed.units(names)) == []


SPEED = {"shape": "s", "tokens": 1024, "time_ratio": 0.6, "correct": True}
LAUNCH = {"kernel": "topk_softmax", "overhead": 0.3}
FREE = {"shape": "a", "policy": "zero", "overhead": 0.0}
LIMITS = {"max_ratio": 0.6, "max_ratio_8192": 0.5, "min_overhead": 0.2, "max_overhead": 0.4}


@pytest.mark.parametrize(
    ("claims", "row", "change", "verdict"),
    [
        ((md001.speed, md001.never_slower), SPEED, {}, CONFIRMED),
        ((md001.speed, md001.never_slower), SPEED, {"time_ratio": 0.61}, REFUTED),
        ((md001.speed, md001.never_slower), SPEED, {"tokens": 8192, "time_ratio": 0.5}, CONFIRMED),
        ((md001.speed, md001.never_slower), SPEED, {"tokens": 8192, "time_ratio": 0.55}, REFUTED),
        ((md001.speed, md001.never_slower), SPEED, {"correct": False}, REFUTED),
        ((md001.separate_launch,), LAUNCH, {}, CONFIRMED),
        ((md001.separate_launch,), LAUNCH, {"overhead": 0.1}, REFUTED),
        ((md001.separate_launch,), LAUNCH, {"overhead": 0.5}, REFUTED),
        ((md001.policy_cost,), FREE, {}, CONFIRMED),
        ((md001.policy_cost,), FREE, {"policy": "finite", "overhead": 0.41}, REFUTED),
    ],
)
def test_the_worst_row_decides(
    claims: tuple[ClaimTest, ...], row: dict[str, Any], change: dict[str, Any], verdict: ClaimVerdict
) -> None:
    for claim in claims:
        assert by_rows(claim, LIMITS, row, {**row, **change}, unit="vllm@0.21.0").verdict is verdict


@pytest.mark.parametrize(
    ("plus", "minus", "verdict"), [(1.0, 0.0, CONFIRMED), (0.5, 0.5, CONFIRMED), (0.9, 0.0, REFUTED)]
)
def test_fp8_counts_the_results_of_nan(plus: float, minus: float, verdict: ClaimVerdict) -> None:
    shares = {"clamped_to_plus_448": plus, "clamped_to_minus_448": minus, "still_nan": 1 - plus - minus}
    judgement = by_rows(md001.fp8_clamps_nan, {"min_share": 1.0}, torch_cast_still_nan=1.0, **shares)
    assert judgement.verdict is verdict


# --- Engines ---------------------------------------------------------------------------------------------

TABLE = {"config": "1 GPU", "steps_with_padding": 20, "nan_in_padding": 20, "nan_share": 1.0}
OWN = {
    "engine": "own topk_softmax",
    "prompts": 4,
    "prompts_with_the_same_tokens": 4,
    "nan_in_padding": 9,
    "routers_watched": 4,
    "rows_with_repeated_ids": 0,
    "real_rows_with_repeated_ids": 0,
}
UNTOUCHED = {"engine": "untouched", "prompts": 4, "prompts_with_the_same_tokens": 4, "nan_in_padding": 0}
OLD = {**OWN, "engine": "topk_softmax of 0.19.1", "rows_with_repeated_ids": 50}
SHARE = {"min_share": 0.95}
END_TO_END = {"min_share": 1.0, "max_rows": 0, "min_old_rows": 1}
OVERHEAD = {"max_overhead": 0.05}
COST = {
    "overhead": 0.03,
    "overhead_p20": 0.02,
    "overhead_p80": 0.04,
    "step_ms_off": 2.0,
    "noise": 0.02,
    "model": "tiny",
    "layers": 4,
    "batch": 11,
}


@pytest.mark.parametrize(
    ("untouched", "own", "old", "verdict"),
    [
        ({}, {}, {}, CONFIRMED),
        ({}, {"prompts_with_the_same_tokens": 3}, {}, REFUTED),
        ({}, {"rows_with_repeated_ids": 1}, {}, REFUTED),
        ({}, {}, {"rows_with_repeated_ids": 0}, REFUTED),
        ({}, {}, {"nan_in_padding": 0}, UNTESTED),
        ({}, {"routers_watched": 0}, {}, UNTESTED),
        ({}, {}, {"routers_watched": 0}, UNTESTED),
        ({}, {"nan_in_padding": 0}, {}, UNTESTED),
        ({"error": "process: hang"}, {"prompts_with_the_same_tokens": None}, {}, UNTESTED),
        ({"engine": "something else"}, {"prompts_with_the_same_tokens": 0}, {}, UNTESTED),
    ],
)
def test_both_releases_must_behave_as_claimed(
    untouched: Any, own: Any, old: Any, verdict: ClaimVerdict
) -> None:
    rows = ({**UNTOUCHED, **untouched}, {**OWN, **own}, {**OLD, **old})
    assert by_rows(md001.end_to_end, END_TO_END, *rows).verdict is verdict


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (OWN, "0.19.1, restated (its kernels were not given: --vllm-kernels 0.19.1=PATH): it did not run"),
        ({"engine": OWN["engine"], "error": "load: died"}, "load: died"),
    ],
)
def test_engines_that_did_not_run_decide_nothing(own: dict[str, Any], reason: str) -> None:
    judgement = by_rows(md001.end_to_end, END_TO_END, UNTOUCHED, own)
    assert judgement.verdict is UNTESTED
    assert reason in str(judgement.reason)


@pytest.mark.parametrize(
    ("old", "restated", "verdict", "reason"),
    [
        ([], {}, CONFIRMED, "0.19.1, restated (its kernels were not given"),
        ([], {"rows_with_repeated_ids": 0}, REFUTED, "0.19.1, restated"),
        ([{"error": "load: moe_C.so does not load: undefined symbol"}], {}, CONFIRMED, "undefined symbol"),
        ([{"error": "process: hang: no answer"}], {}, UNTESTED, "0.19.1: process: hang"),
        ([OLD], {"rows_with_repeated_ids": 0}, CONFIRMED, "0.19.1: 50 rows"),
    ],
)
def test_the_restated_topk_decides_where_the_kernels_do_not_load(
    old: list[dict[str, Any]], restated: dict[str, Any], verdict: ClaimVerdict, reason: str
) -> None:
    rows = [UNTOUCHED, OWN, {**OLD, "engine": f"{OLD['engine']}, restated", **restated}]
    rows += [{**row, "engine": OLD["engine"]} for row in old]
    judgement = by_rows(md001.end_to_end, END_TO_END, *rows)
    assert judgement.verdict is verdict
    assert reason in str(judgement.reason)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([TABLE], CONFIRMED),
        ([{**TABLE, "nan_share": 0.5}], REFUTED),
        ([{"config": "1 GPU", "error": "load: died"}], UNTESTED),
        ([{**TABLE, "steps_with_padding": 0}], UNTESTED),
        ([TABLE, {"config": "2 GPUs", "error": "died"}], UNTESTED),
        ([TABLE, {**TABLE, "config": "2 GPUs", "steps_with_padding": 0}], UNTESTED),
        ([TABLE, {**TABLE, "nan_share": 0.5}, {"config": "2 GPUs", "error": "died"}], REFUTED),
        ([TABLE, {"config": "1 GPU, memory held NaN before", "error": "died"}], CONFIRMED),
        ([TABLE, {"config": "DP=2", "not_run": "elsewhere"}], CONFIRMED),
    ],
)
@pytest.mark.parametrize("claim", [md001.padding_holds_nan, md001.padding_holds_nan_dp])
def test_every_engine_must_run_and_hold_nan_in_padding(
    claim: ClaimTest, rows: list[dict[str, Any]], verdict: ClaimVerdict
) -> None:
    assert by_rows(claim, SHARE, *rows).verdict is verdict


def test_memory_filled_with_nan_on_purpose_confirms_nothing() -> None:
    poisoned = {**TABLE, "config": "1 GPU, memory held NaN before"}
    none = {**TABLE, "nan_in_padding": 0, "nan_share": 0.0}
    judgement = by_rows(md001.padding_holds_nan, SHARE, none, poisoned)
    assert judgement.verdict is REFUTED
    assert "held NaN before: 20 of 20" in str(judgement.reason)
    assert by_rows(md001.padding_holds_nan, SHARE, poisoned).verdict is UNTESTED


@pytest.mark.parametrize(
    ("gpu", "wall", "verdict"),
    [
        (None, (0.026, 0.039), UNTESTED),
        (None, (0.06, 0.02), UNTESTED),
        (None, (0.026, 0.02), CONFIRMED),
        (None, (0.08, 0.02), REFUTED),
        ((0.06, 0.01), (0.03, 0.04), CONFIRMED),
        ((0.09, 0.02), (0.03, 0.04), UNTESTED),
        ((0.12, 0.01), (0.03, 0.04), REFUTED),
        ((0.06, 0.01), (0.06, 0.04), UNTESTED),
        ((0.06, 0.01), (0.10, 0.04), REFUTED),
    ],
)
@pytest.mark.parametrize("claim", [md001.trace_overhead, md001.trace_overhead_tiny])
def test_the_difference_of_identical_engines_is_added_to_both_sides(
    claim: ClaimTest, gpu: tuple[float, float] | None, wall: tuple[float, float], verdict: ClaimVerdict
) -> None:
    """Events around the model decide, if there are any, and the wall clock must agree."""
    row = {**COST, "overhead": wall[0], "noise": wall[1]}
    shown = f"differ by {wall[1]:.1%}"
    if gpu is not None:
        row |= {"gpu_overhead": gpu[0], "gpu_noise": gpu[1], "gpu_step_ms_off": 1.0}  # half of the step
        shown = f"by events around the model {gpu[0] / 2:+.1%} and {gpu[1] / 2:.1%} of that step"
    judgement = by_rows(claim, OVERHEAD, row)
    assert judgement.verdict is verdict
    assert shown in str(judgement.reason)
    assert ("too much to tell" in str(judgement.reason)) is (verdict is UNTESTED)


def test_the_trace_must_be_cheap_in_every_model() -> None:
    assert by_rows(md001.trace_overhead, OVERHEAD, COST, COST).verdict is CONFIRMED
    for other, verdict in ((0.08, REFUTED), (0.04, UNTESTED)):
        rows = (COST, {**COST, "overhead": other})
        for order in (rows, rows[::-1]):
            assert by_rows(md001.trace_overhead, OVERHEAD, *order).verdict is verdict


def test_a_recording_that_compared_nothing_costs_nothing_that_is_known() -> None:
    row = {**COST, "overhead": 0.01, "noise": 0.01, "rounds": 24, "compared": [90, 80], "compare_ms": 480.0}
    judgement = by_rows(md001.record_overhead_mismatch, OVERHEAD, row)
    assert judgement.verdict is CONFIRMED
    assert "means of 24 rounds in which 170 calls were compared, 480 ms each" in str(judgement.reason)
    for overhead, noise, verdict in ((0.08, 0.01, REFUTED), (0.04, 0.02, UNTESTED)):
        other = {**row, "overhead": overhead, "noise": noise}
        assert by_rows(md001.record_overhead_mismatch, OVERHEAD, other).verdict is verdict
    judgement = by_rows(md001.record_overhead_mismatch, OVERHEAD, {**row, "compared": [90, 0]})
    assert judgement.verdict is UNTESTED
    assert "compared no call with the reference" in str(judgement.reason)
