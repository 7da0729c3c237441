"""MD001: its rows, its counters and its judges. MD024: padded logits, and the offsets of packed rows."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fault_cases import by_rows, claim_of, judge, run
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.faults.routing import nan_routing as md001
from moedoctor.faults.routing import nan_routing_lab as lab
from moedoctor.faults.routing.logits_stride import LogitsStride, LogitsStrideParameters
from moedoctor.faults.routing.logits_stride_lab import make_padded_logits, read_as_packed
from moedoctor.faults.routing.nan_routing import NanRouting, NanRoutingParameters
from moedoctor.fixes import routing as fixes
from moedoctor.fixes.routing import TopK
from moedoctor.interfaces import Measurement
from moedoctor.results import CaseResult, CaseVerdict, ClaimVerdict, Observation, Skip, Tier
from moedoctor.upstream.releases import old_topk

FAULT = NanRouting()


def parameters(**given: Any) -> NanRoutingParameters:
    if given.get("router") == "grouped":
        given = {"num_groups": 4, "topk_groups": 2, **given}
    return NanRoutingParameters(**{"experts": 16, "top_k": 4, "tokens": 56, "dtype": "float32", **given})


def judged(given: NanRoutingParameters, routing: Any) -> tuple[CaseVerdict, Mapping[str, Any]]:
    evidence = lab.count(given, "cpu", {"kernel": (routing, {})})
    return judge(FAULT, evidence).verdict, evidence


@given(tokens=st.integers(1, 60), experts=st.integers(1, 40), seed=st.integers(0, 5))
def test_rows_match_their_kind(tokens: int, experts: int, seed: int) -> None:
    rows = lab.make_rows(parameters(tokens=tokens, experts=experts, top_k=1, seed=seed), "cpu")
    for row, kind in zip(rows.logits, rows.kinds, strict=True):
        assert int(row.isnan().sum()) == {lab.ALL_NAN: experts, lab.ONE_NAN: 1, "half_nan": experts // 2}.get(
            kind, 0
        )
        assert int((row == float("inf")).sum()) == (kind == lab.POS_INF)
        assert int((row == float("-inf")).sum()) == {lab.NEG_INF: 1, "all_neg_inf": experts}.get(kind, 0)
    if tokens >= 2 * len(lab.KINDS):
        assert set(rows.kinds) == set(lab.KINDS)


def test_the_control_is_stuck_only_if_its_scan_starts_on_nan() -> None:
    nan = float("nan")
    logits = torch.tensor([[nan, 1.0, 2.0, 0.0], [1.0, nan, 2.0, 0.0]])
    routed = old_topk.topk_sigmoid(logits, 2, renormalize=False, bias=None)
    assert routed.ids.tolist() == [[0, 2], [2, 0]]
    assert routed.weights.isnan().tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize(
    ("plant", "counter"),
    [
        (lambda weights, ids: ids[0, 0].fill_(16), "rows_out_of_range"),
        (lambda weights, ids: ids[0, 0].fill_(-1), "rows_out_of_range"),
        (lambda weights, ids: weights[0, 0].fill_(torch.nan), "rows_with_nonfinite_weights"),
        (lambda weights, ids: weights[0, 0].fill_(torch.inf), "rows_with_nonfinite_weights"),
        (lambda weights, ids: weights[0, 0].fill_(0.123), "clean_rows_wrong"),
        (lambda weights, ids: ids[0].copy_(ids[0].flip(0)), "clean_rows_wrong"),
        (lambda weights, ids: weights.mul_(0.5), "clean_rows_wrong"),
        (lambda weights, ids: weights.zero_(), "clean_rows_wrong"),
    ],
)
def test_every_wrong_result_is_noticed(plant: Any, counter: str) -> None:
    def topk_softmax(logits: torch.Tensor, top_k: int, **options: Any) -> TopK:
        routed = fixes.topk_softmax(logits, top_k, **options)
        plant(*routed)
        return routed

    assert judged(parameters(), fixes)[0] is CaseVerdict.CLEAN
    verdict, evidence = judged(parameters(), SimpleNamespace(topk_softmax=topk_softmax))
    assert verdict is CaseVerdict.REPRODUCED
    assert evidence[counter] > 0


def test_experts_that_are_not_the_best_are_noticed_although_their_weights_fit() -> None:
    def topk_softmax(logits: torch.Tensor, top_k: int, **options: Any) -> TopK:
        weights, ids = fixes.topk_softmax(logits, top_k + 1, **options)
        total = weights[:, 1:].sum(1, keepdim=True)  # [T, 1]
        return TopK(weights[:, 1:] / total.where(total > 0, 1.0), ids[:, 1:])

    _, evidence = judged(parameters(), SimpleNamespace(topk_softmax=topk_softmax))
    assert evidence["clean_rows_wrong"] > 0


def case(subject: str, router: str = "softmax", **counts: int) -> CaseResult:
    none = ("rows_with_duplicates", "nan_rows_with_duplicates", "rows_with_nonfinite_weights")
    none += ("clean_rows_with_duplicates", "clean_rows_wrong", "all_nan_rows_with_one_id")
    evidence = {"rows": 112, "nan_rows": 24, "clean_rows": 72, "all_nan_rows": 8, **dict.fromkeys(none, 0)}
    evidence |= {"duplicates_by_kind": {}, **counts}
    given = {"router": router, "experts": 60, "top_k": 4, "dtype": "bfloat16", "bias": "negative"}
    return CaseResult(subject, Tier.KERNEL, given, CaseVerdict.CLEAN, evidence)


FAILING = {"rows_with_duplicates": 24, "nan_rows_with_duplicates": 24, "all_nan_rows_with_one_id": 8}


def test_the_first_fixed_release_follows_from_the_results() -> None:
    failing = [case(f"vllm@{release}", **FAILING) for release in ("0.9.2", "0.19.1")]
    conclusions = FAULT.conclude([failing[0], case("vllm@0.33.0"), case("vllm@0.20.0"), failing[1]])
    assert (conclusions["last_failing_release"], conclusions["first_fixed_release"]) == ("0.19.1", "0.20.0")
    assert [row["release"] for row in conclusions["releases"]] == ["0.9.2", "0.19.1", "0.20.0", "0.33.0"]
    assert [row["duplicates_from_nan"] for row in conclusions["releases"]] == [24, 24, 0, 0]

    results = [case("vllm@0.19.1"), case("vllm@0.20.0", **FAILING), case("vllm@0.21.0")]
    assert FAULT.conclude(results)["first_fixed_release"] == "0.21.0", "after the last failure"
    assert FAULT.conclude([case("vllm@0.20.0")])["first_fixed_release"] is None
    assert FAULT.conclude([case("faulty", **FAILING), case("fixed")]) == {}


def test_duplicates_in_clean_rows_too_do_not_come_from_nan() -> None:
    other = case("vllm@0.20.0", **FAILING, clean_rows_with_duplicates=56)
    conclusions = FAULT.conclude([case("vllm@0.19.1", **FAILING), case("vllm@0.20.0"), other])
    assert conclusions["first_fixed_release"] == "0.20.0"
    assert conclusions["releases"][1]["clean_rows_with_duplicates"] == 56
    judgement = judge(FAULT, {**other.evidence, "rows_out_of_range": 0})
    assert (judgement.verdict, judgement.figure) == (
        CaseVerdict.REPRODUCED,
        "56 of 112 rows are clean and hold a duplicate id: not because of NaN",
    )


# --- Claims about the kernels of releases ----------------------------------------------------------------

CONFIRMED, REFUTED, UNTESTED = ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED, ClaimVerdict.UNTESTED


def test_always_distinct_checks_only_releases_with_the_fix() -> None:
    limits, old = {"max_rows": 0}, [case("vllm@0.19.1", **FAILING), case("faulty", **FAILING)]
    new = [case("vllm@0.33.0"), case("vllm@0.33.0", **FAILING)]
    assert md001.judge_always_distinct.judge(old, (), limits).verdict is UNTESTED
    assert md001.judge_always_distinct.judge([*old, new[0]], (), limits).verdict is CONFIRMED
    refuted = md001.judge_always_distinct.judge(new, (), limits)
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
    assert md001.judge_same_expert.judge(cases, (), {"min_share": 0.99}).verdict is verdict


def test_fused_is_free_compares_the_two_sides_of_the_fix_per_shape() -> None:
    def units(after: float) -> list[Measurement]:
        times = {"vllm@0.19.1": 4.0, "vllm@0.20.0": after}
        return [
            Measurement(name, Observation({"rows": [{"shape": "128x128", "kernel_us": times[name]}]}))
            for name in [*times, *times]
        ]

    judge, limits = md001.judge_fused_is_free.judge, {"max_overhead": 0.03}
    assert judge([], units(4.1), limits).verdict is CONFIRMED
    assert judge([], units(4.2), limits).verdict is REFUTED
    one_side = [units(4.0)[0], Measurement("vllm@0.20.0", Skip("does not load"))]
    assert judge([], one_side, limits).verdict is UNTESTED


def test_units_around_the_fix_alternate() -> None:
    names = ["vllm@0.33.0", "vllm@0.18.0", "vllm@0.20.0", "vllm@0.19.1", "faulty"]
    assert md001.judge_fused_is_free.units(names) == ["vllm@0.19.1", "vllm@0.20.0"] * 3
    assert list(md001.judge_fused_is_free.units(names[:1])) == []
    assert list(md001.judge_separate_launch.units(names)) == ["vllm@0.33.0"]


@pytest.mark.parametrize(("overhead", "verdict"), [(0.3, CONFIRMED), (0.1, REFUTED), (0.5, REFUTED)])
def test_the_worst_kernel_decides_what_a_separate_launch_costs(overhead, verdict):
    rows = [{"kernel": "topk_softmax", "overhead": value} for value in (0.3, overhead)]
    limits = {"min_overhead": 0.2, "max_overhead": 0.4}
    assert by_rows(md001.judge_separate_launch, limits, *rows, unit="vllm@0.21.0").verdict is verdict


@pytest.mark.parametrize(("plus", "minus"), [(1.0, 0.0), (0.5, 0.5), (0.9, 0.0)])
def test_fp8_counts_the_results_of_nan(plus: float, minus: float) -> None:
    shares = {"clamped_to_plus_448": plus, "clamped_to_minus_448": minus, "still_nan": 1 - plus - minus}
    judgement = by_rows(md001.judge_fp8_clamps_nan, {"min_share": 1.0}, torch_cast_still_nan=1.0, **shares)
    assert judgement.verdict is (CONFIRMED if plus + minus == 1 else REFUTED)


# --- Engines ---------------------------------------------------------------------------------------------

TABLE = {"config": "1 GPU", "steps_with_padding": 20, "nan_in_padding": 20, "nan_share": 1.0}
SHARE = {"min_share": 0.95}


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
        ([TABLE, {"config": "DP=2", "not_run": "elsewhere"}], CONFIRMED),
    ],
)
@pytest.mark.parametrize("claim", [md001.judge_padding_holds_nan, md001.judge_padding_holds_nan_dp])
def test_every_engine_must_run_and_hold_nan_in_padding(claim, rows, verdict):
    assert by_rows(claim, SHARE, *rows).verdict is verdict


STRIDE = LogitsStride()
STRIDE_LIMITS = {"max_share": 0.2}


def test_padded_logits_have_the_strides_that_inductor_gives_them() -> None:
    logits = make_padded_logits(LogitsStrideParameters(tokens=5, experts=60, width=64), "cpu")
    assert (logits.shape, logits.stride()) == ((5, 60), (64, 1))


def test_packed_offsets_read_the_first_row_right_and_the_padding_in_the_second() -> None:
    memory = torch.arange(12.0).view(3, 4)
    assert read_as_packed(memory[:, :3]).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_only_the_first_row_is_sure_to_be_right(router: str) -> None:
    judged = run(STRIDE, router=router)
    assert judged.verdict is CaseVerdict.REPRODUCED
    assert (judged.evidence["rows_wrong"], judged.evidence["first_row_wrong"]) == (47, False)
    assert run(STRIDE, "fixed", router=router).evidence["rows_wrong"] == 0


def stride_case(wrong: int, tier: Tier = Tier.KERNEL) -> CaseResult:
    parameters = LogitsStrideParameters(tokens=11).model_dump()
    evidence = {"rows": 11, "rows_wrong": wrong}
    return CaseResult("vllm@0.33.0", tier, parameters, CaseVerdict.REPRODUCED, evidence=evidence)


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        ([stride_case(10)], ClaimVerdict.CONFIRMED),
        ([stride_case(10), stride_case(0)], ClaimVerdict.REFUTED),
        ([stride_case(10, Tier.MODEL)], ClaimVerdict.UNTESTED),
    ],
)
def test_kernels_of_releases_decide_the_claim(cases: list[CaseResult], verdict: ClaimVerdict) -> None:
    assert claim_of(STRIDE, "ignores_stride").judge(cases, (), STRIDE_LIMITS).verdict is verdict
