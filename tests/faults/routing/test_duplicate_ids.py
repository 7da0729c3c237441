"""MD011: the restated sort, its counters and the judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from moedoctor.faults.routing import duplicate_ids as md011
from moedoctor.faults.routing import duplicate_ids_lab as lab
from moedoctor.faults.routing.duplicate_ids import DuplicateIds, DuplicateIdsParameters
from moedoctor.faults.routing.duplicate_ids_lab import (
    ThreeStepModel,
    entries_as_before,
    make_ids,
    map_figures,
    observe,
    takes_fused,
)
from moedoctor.interfaces import Measurement
from moedoctor.results import (
    Case,
    CaseResult,
    CaseVerdict,
    ClaimVerdict,
    Crash,
    Death,
    Observation,
    Skip,
    Tier,
    UnavailableError,
)
from moedoctor.runner.plan import Options, plan
from moedoctor.scenario.targets import load_targets
from moedoctor.upstream.flashinfer import probe as flashinfer_probe
from moedoctor.upstream.flashinfer.probe import FlashInferProbe
from moedoctor.upstream.releases.wheel import KernelError

FAULT = DuplicateIds()
DEFAULT = DuplicateIdsParameters().model_dump()


def parameters(**changes: Any) -> DuplicateIdsParameters:
    return DuplicateIdsParameters.model_validate({**DEFAULT, **changes})


def case(**changes: Any) -> Case:
    return Case("MD011", "faulty", Tier.MODEL, parameters(**changes).model_dump())


points = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([1, 7, 40, 257]),
        "experts": st.sampled_from([16, 512]),
        "top_k": st.sampled_from([2, 8, 10]),
        "ids": st.sampled_from(["one_expert", "one_repeat", "distinct", "sentinel"]),
        "memory": st.sampled_from(["garbage", "earlier", "zeros", "minus_one"]),
        "finalize": st.sampled_from(["normal", "no_filling"]),
        "rank": st.sampled_from([0, 1]),
        "ranks": st.just(2),
        "seed": st.integers(0, 3),
    }
)


@settings(max_examples=40, deadline=None)
@given(points)
def test_each_repeated_slot_leaves_one_entry_unwritten_and_no_other(point: dict[str, Any]) -> None:
    chosen = parameters(**point)
    ids, local = make_ids(chosen), chosen.experts // 2
    maps = ThreeStepModel().build_maps(ids, local, start=local * chosen.rank, memory=-5)
    figures = map_figures(chosen, ids, maps)
    assert entries_as_before(chosen, ids, maps, -5) == figures["unwritten_entries"]
    cleared = dataclasses.replace(maps, permuted_of_row=maps.permuted_of_row.clamp(min=-1))
    assert entries_as_before(chosen, ids, cleared, -5) == 0
    if maps.fused:
        assert figures["unwritten_entries"] == 0
    else:
        assert figures["unwritten_entries"] == figures["repeated_slots"]
        assert figures["local_slots"] - figures["sorted_rows"] == figures["repeated_slots"]


@settings(max_examples=40, deadline=None)
@given(points)
def test_distinct_ids_and_deduplicated_ones_give_the_right_sum(point: dict[str, Any]) -> None:
    chosen = parameters(**point)
    guarded = observe(chosen, ThreeStepModel(), guard=True).evidence
    assert guarded["rows_right"] == guarded["rows"]
    if chosen.ids in ("distinct", "sentinel"):
        plain = observe(chosen, ThreeStepModel()).evidence
        assert plain["rows_right"] == plain["rows"]


@pytest.mark.parametrize(
    ("memory", "finalize", "figure"),
    [
        ("garbage", "normal", "the repeat is dropped in 300 of 300 rows"),
        ("minus_one", "normal", "the repeat is dropped in 300 of 300 rows"),
        ("earlier", "normal", "of 300 rows hold a wrong sum, without an error"),
        ("garbage", "no_filling", "2100 entries of the map lead out of bounds"),
        ("earlier", "no_filling", "of 300 rows hold a wrong sum, without an error"),
    ],
)
def test_the_old_content_of_the_memory_decides_the_symptom(memory: str, finalize: str, figure: str) -> None:
    faulty = case(memory=memory, finalize=finalize, ranks=2 if finalize == "no_filling" else 1)
    judged = FAULT.judge(faulty, FAULT.observe(faulty, None))
    assert judged.verdict is CaseVerdict.REPRODUCED
    assert judged.figure.endswith(figure)
    fixed = FAULT.judge(faulty, FAULT.observe(dataclasses.replace(faulty, subject="fixed"), None))
    assert (fixed.verdict, fixed.figure) == (CaseVerdict.CLEAN, "300 of 300 rows are right, three-step")


@pytest.mark.parametrize(
    ("tokens", "top_k", "last"),
    [(1, 8, 510), (128, 8, 510), (129, 8, 254), (256, 8, 254), (257, 8, 0), (1, 10, 0)],
)
def test_the_largest_number_of_experts_of_the_fused_prologue(tokens: int, top_k: int, last: int) -> None:
    taken = [experts for experts in range(1, 600) if takes_fused(tokens, top_k, experts)]
    assert taken == list(range(1, last + 1))


def test_the_fused_prologue_sorts_repeated_ids_correctly() -> None:
    point = parameters(tokens=64, ids="one_repeat")
    evidence = observe(point, ThreeStepModel()).evidence
    assert (evidence["path"], evidence["rows_right"], evidence["unwritten_entries"]) == ("fused", 64, 0)


def test_an_illegal_access_is_the_symptom_and_another_death_is_not() -> None:
    crash = Crash(Death.ILLEGAL_MEMORY_ACCESS, "CUDA error: an illegal memory access was encountered")
    assert FAULT.judge_crash(case(), crash).verdict is CaseVerdict.REPRODUCED
    assert FAULT.judge_crash(case(), Crash(Death.HANG, "no answer")).verdict is CaseVerdict.ERROR


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"top_k": 9, "experts": 8}, "more than experts 8"),
        ({"ranks": 3}, "does not divide"),
        ({"ranks": 2, "rank": 2}, "below ranks 2"),
        ({"finalize": "no_filling"}, "two ranks or more"),
    ],
)
def test_impossible_points_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parameters(**changes)


# --- Judges ----------------------------------------------------------------------------------------------


def result(subject: str, what: str, **changes: Any) -> CaseResult:
    kinds = ("rows_right", "rows_with_the_repeat_dropped", "rows_wrong", "rows_out_of_bounds")
    counts = {"rows": 4, **dict.fromkeys(kinds, 0)}
    evidence: dict[str, Any] = {**counts, what: 4} if what != "death" else {"death": "illegal_memory_access"}
    verdict = CaseVerdict.CLEAN if what == "rows_right" else CaseVerdict.REPRODUCED
    return CaseResult(subject, Tier.KERNEL, parameters(**changes).model_dump(), verdict, evidence)


CASES = (
    result("flashinfer@0.6.6", "death", memory="garbage"),
    result("flashinfer@0.6.6", "rows_wrong"),
    result("flashinfer@0.7.2.post1", "rows_wrong"),
    result("flashinfer@0.7.2.post1", "rows_with_the_repeat_dropped", memory="garbage"),
    result("faulty", "death", memory="garbage"),
)
DEAD = dataclasses.replace(
    result("flashinfer@0.7.2.post1", "death"), verdict=CaseVerdict.ERROR, evidence={"death": "hang"}
)


def test_the_table_lists_each_release_and_call() -> None:
    (earlier, garbage) = sorted(FAULT.conclude(CASES)["finalize"], key=lambda row: str(row["call"]))
    assert earlier["flashinfer@0.6.6"] == earlier["flashinfer@0.7.2.post1"] == "wrong sum, no error"
    assert (garbage["flashinfer@0.6.6"], garbage["flashinfer@0.7.2.post1"]) == (
        "illegal access",
        "repeat dropped",
    )
    assert FAULT.conclude([result("faulty", "rows_wrong")]) == {}


@pytest.mark.parametrize(
    ("judge", "limits", "cases", "verdict"),
    [
        (md011.illegal_access.judge, {"min_releases": 1}, CASES, ClaimVerdict.CONFIRMED),
        (md011.illegal_access.judge, {"min_releases": 1}, CASES[1:4], ClaimVerdict.REFUTED),
        (md011.illegal_access.judge, {"min_releases": 1}, CASES[4:], ClaimVerdict.UNTESTED),
        (
            md011.illegal_access.judge,
            {"min_releases": 1},
            [result("flashinfer@0.6.6", "rows_out_of_bounds", memory="minus_one")],
            ClaimVerdict.CONFIRMED,
        ),
        (
            md011.bounds_check.judge,
            {"max_cases": 0},
            [result("flashinfer@0.6.13", "rows_out_of_bounds", memory="minus_one")],
            ClaimVerdict.REFUTED,
        ),
        (md011.bounds_check.judge, {"max_cases": 0}, CASES, ClaimVerdict.CONFIRMED),
        (
            md011.bounds_check.judge,
            {"max_cases": 0},
            [*CASES, result("flashinfer@0.6.13", "death", finalize="no_filling", ranks=2)],
            ClaimVerdict.REFUTED,
        ),
        (md011.bounds_check.judge, {"max_cases": 0}, CASES[:2], ClaimVerdict.UNTESTED),
        (md011.newest_is_silent.judge, {"min_cases": 1}, CASES, ClaimVerdict.CONFIRMED),
        (md011.newest_is_silent.judge, {"min_cases": 1}, CASES[3:], ClaimVerdict.REFUTED),
        (md011.newest_is_silent.judge, {"min_cases": 1}, CASES[4:], ClaimVerdict.UNTESTED),
        (md011.illegal_access.judge, {"min_releases": 1}, [DEAD], ClaimVerdict.UNTESTED),
        (md011.illegal_access.judge, {"min_releases": 1}, [*CASES, DEAD], ClaimVerdict.CONFIRMED),
        (md011.bounds_check.judge, {"max_cases": 0}, [DEAD], ClaimVerdict.UNTESTED),
        (
            md011.bounds_check.judge,
            {"max_cases": 0},
            [DEAD, result("flashinfer@0.6.13", "death")],
            ClaimVerdict.REFUTED,
        ),
        (md011.newest_is_silent.judge, {"min_cases": 1}, [DEAD], ClaimVerdict.UNTESTED),
        (md011.newest_is_silent.judge, {"min_cases": 1}, [*CASES, DEAD], ClaimVerdict.CONFIRMED),
    ],
)
def test_claims_decided_by_cases(judge: Any, limits: Mapping[str, float], cases: Any, verdict: Any) -> None:
    assert judge(cases, (), limits).verdict is verdict


def test_cases_that_died_for_another_reason_are_named() -> None:
    for judge in (md011.illegal_access.judge, md011.bounds_check.judge, md011.newest_is_silent.judge):
        judged = judge([*CASES, DEAD], (), {"min_releases": 1, "max_cases": 0, "min_cases": 1})
        assert judged.reason.endswith("flashinfer@0.7.2.post1: 1 cases ended in another error")


def test_the_whole_runner_is_untested_and_the_figure_describes_its_parts() -> None:
    judged = md011.whole_runner.judge(CASES, (), {})
    assert judged.verdict is ClaimVerdict.UNTESTED
    assert judged.reason == (
        "the whole cutlass_fused_moe was not built; its maps and finalize alone, all tokens on one expert, "
        "crash: flashinfer@0.6.6 in 1 of 2 cases, flashinfer@0.7.2.post1 in 0 of 2 cases"
    )
    assert judged.evidence["releases"][0]["illegal access"] == 1
    other = [result("flashinfer@0.6.6", "death", ids="one_repeat")]
    assert str(md011.whole_runner.judge(other, (), {}).reason).endswith("nor did its maps and finalize run")


def test_a_read_beside_the_expert_rows_differs_from_a_wrong_sum() -> None:
    judged = md011.illegal_access.judge(
        [*CASES, result("flashinfer@0.6.8.post1", "rows_out_of_bounds", memory="minus_one")],
        (),
        {"min_releases": 1},
    )
    assert judged.reason == (
        "illegal accesses in flashinfer@0.6.6; rows from beside the expert rows read without an error in "
        "flashinfer@0.6.8.post1"
    )


class Unchecked(ThreeStepModel):
    """Finalize of a release without a bounds check: an entry of -1 is the row before the first one."""

    def finalize(
        self, maps: Any, rows: Any, ids: Any, weights: Any, out: Any, experts: int, **_: Any
    ) -> None:
        tokens, top_k = ids.shape
        at = maps.permuted_of_row.reshape(top_k, tokens).t()  # [T, K]
        first = rows.storage_offset() // rows.shape[1]
        buffer = rows.as_strided((rows.shape[0] + first, rows.shape[1]), rows.stride(), 0)  # [8 + R, H]
        out[:] = (buffer[first + at].float() * weights[:, :, None]).sum(1)


def test_a_row_taken_from_before_the_buffer_is_a_read_out_of_bounds() -> None:
    point = parameters(ids="one_repeat", memory="minus_one")
    observation = observe(point, Unchecked())
    assert (observation.evidence["rows_out_of_bounds"], observation.evidence["rows_wrong"]) == (300, 0)
    judged = FAULT.judge(case(), observation)
    assert judged.verdict is CaseVerdict.REPRODUCED
    assert judged.figure == "reads out of bounds in 300 of 300 rows, without an error"
    stale = observe(parameters(ids="one_repeat"), Unchecked()).evidence
    assert stale["rows_out_of_bounds"] == 0
    assert stale["rows_wrong"] > 0


def test_many_stale_rows_are_no_read_out_of_bounds() -> None:
    point = parameters(tokens=30, experts=80, top_k=64)
    evidence = observe(point, ThreeStepModel()).evidence
    assert (evidence["rows_out_of_bounds"], evidence["rows_wrong"] > 0) == (0, True)


# --- The tier `kernel` -----------------------------------------------------------------------------------


def test_at_the_tier_kernel_control_and_fix_are_the_installed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def installed(device: str) -> ThreeStepModel:
        asked.append(device)
        return ThreeStepModel()

    monkeypatch.setattr(FlashInferProbe, "installed", installed)
    verdicts = {}
    for subject in ("faulty", "fixed"):
        kernel_case = Case("MD011", subject, Tier.KERNEL, parameters().model_dump(), "cuda:0")
        verdicts[subject] = FAULT.judge(kernel_case, FAULT.observe(kernel_case, None)).verdict
    assert verdicts == {"faulty": CaseVerdict.REPRODUCED, "fixed": CaseVerdict.CLEAN}
    assert asked == ["cuda:0", "cuda:0"]
    release = ThreeStepModel()
    named = Case("MD011", "flashinfer@0.6.6", Tier.KERNEL, parameters().model_dump(), "cuda:0")
    assert FAULT.judge(named, FAULT.observe(named, release)).verdict is CaseVerdict.REPRODUCED
    assert len(asked) == 2


def test_without_flashinfer_or_nvcc_the_tier_kernel_is_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> Any:
        raise KernelError("flashinfer is not installed here")

    monkeypatch.setattr(flashinfer_probe, "installed_source", missing)
    fixed = Case("MD011", "fixed", Tier.KERNEL, parameters().model_dump(), "cuda:0")
    with pytest.raises(UnavailableError, match="flashinfer is not installed here"):
        FAULT.observe(fixed, None)
    (scenario,) = load_targets(("MD011",))
    planned = plan([scenario], Options(), {"gpu": None})[0].cases
    kernel = [each for each in planned if each.case.tier is Tier.KERNEL and each.case.subject == "fixed"]
    assert len(kernel) == len(scenario.points)
    assert {each.skip for each in kernel} == {"needs an NVIDIA GPU, none is visible"}


def test_an_installed_release_with_right_sums_has_no_failure_to_show() -> None:
    model = dataclasses.replace(result("faulty", "rows_wrong"), tier=Tier.MODEL)
    clean, wrong = result("faulty", "rows_right"), result("faulty", "rows_wrong")
    reason = "the installed FlashInfer gives the right sums in 1 of 2 cases"
    assert FAULT.absent([model, clean, wrong]) == reason
    assert FAULT.absent([model, wrong]) is None
    assert FAULT.absent([dataclasses.replace(clean, tier=Tier.MODEL), clean]) is None


# --- Judges of measurements ------------------------------------------------------------------------------


def measured(*rows: dict[str, Any], unit: str = "flashinfer@0.6.6") -> Measurement:
    return Measurement(unit, Observation({"rows": list(rows)}))


SUM = {"path": "fused", "rows": 4, "rows_right": 4}
MAP = {
    "path": "three-step",
    "unwritten_entries": 3,
    "entries_as_before": 3,
    "repeated_slots": 3,
    "tokens": 257,
    "top_k": 8,
    "experts": 128,
}


@pytest.mark.parametrize(
    ("judge", "limits", "good", "bad"),
    [
        (md011.maps.judge, {"max_maps": 0}, MAP, {**MAP, "unwritten_entries": 2}),
        (md011.maps.judge, {"max_maps": 0}, MAP, {**MAP, "entries_as_before": 0}),
        (md011.fused.judge, {"max_calls": 0}, SUM, {**SUM, "rows_right": 3}),
        (md011.fused.judge, {"max_calls": 0}, SUM, {**SUM, "path": "three-step"}),
        (md011.distinct.judge, {"max_calls": 0}, SUM, {**SUM, "rows_right": 3}),
        (
            md011.guard_cost.judge,
            {"max_us": 2.0},
            {"shape": "128 x 8", "validate_us": 1.3, "deduplicate_us": 1.4},
            {"shape": "128 x 8", "validate_us": 2.3, "deduplicate_us": 1.4},
        ),
        (
            md011.boundary.judge,
            {"experts": 510, "tokens": 256},
            {"tokens": 64, "most_experts": 510},
            {"tokens": 256, "most_experts": 254},
        ),
    ],
)
def test_claims_decided_by_measurements(judge: Any, limits: Any, good: Any, bad: Any) -> None:
    assert judge((), [measured(good)], limits).verdict is ClaimVerdict.CONFIRMED
    assert judge((), [measured(good), measured(bad)], limits).verdict is ClaimVerdict.REFUTED


def test_the_table_of_paths_names_releases_that_differ() -> None:
    maps = [measured(MAP), measured({**MAP, "path": "fused"}, unit="flashinfer@0.6.13")]
    evidence = md011.maps.judge((), maps, {"max_maps": 0}).evidence
    paths = "fused: flashinfer@0.6.13; three-step: flashinfer@0.6.6"
    assert evidence["paths"] == [{"tokens": 257, "top_k": 8, "128 experts": paths}]
    assert md011.maps.judge((), maps[:1], {"max_maps": 0}).evidence["paths"][0]["128 experts"] == "three-step"


def test_calls_are_counted_by_release_and_wrong_ones_shown() -> None:
    evidence = md011.distinct.judge((), [measured(SUM, {**SUM, "rows_right": 1})], {"max_calls": 0}).evidence
    assert evidence["calls"] == [{"release": "flashinfer@0.6.6", "calls": 2, "calls_right": 1}]
    assert [row["rows_right"] for row in evidence["wrong"]] == [1]


@pytest.mark.parametrize(
    ("units", "names"),
    [
        (["flashinfer@0.6.6"], "1 named release"),
        (["flashinfer@0.6.6", "flashinfer@0.6.13"], "2 named releases"),
        (["flashinfer@0.6.8.post1", "installed"], "1 named release and the installed one"),
        (["installed"], "the installed one"),
    ],
)
def test_an_installed_release_is_not_counted_with_the_named_ones(units: list[str], names: str) -> None:
    """The installed release may also be a named release."""
    rows = [measured(SUM, unit=unit) for unit in units]
    judgement = md011.distinct.judge((), rows, {"max_calls": 0})
    assert judgement.reason == f"all rows right in {len(units)} of {len(units)} calls of {names}"


DIED = Measurement("flashinfer@0.7.2.post1", Crash(Death.HANG, "no answer in 400 s"))
BOUNDARY = {"tokens": 64, "most_experts": 510}
OPEN_WITH_A_DEATH = [
    (md011.maps.judge, {"max_maps": 0}, MAP, {**MAP, "unwritten_entries": 2}),
    (md011.fused.judge, {"max_calls": 0}, SUM, {**SUM, "rows_right": 3}),
    (md011.distinct.judge, {"max_calls": 0}, SUM, {**SUM, "rows_right": 3}),
    (
        md011.boundary.judge,
        {"experts": 510, "tokens": 256},
        BOUNDARY,
        {**BOUNDARY, "most_experts": 9},
    ),
]


@pytest.mark.parametrize(("judge", "limits", "good", "bad"), OPEN_WITH_A_DEATH)
def test_a_release_that_died_or_did_not_run_is_named(judge: Any, limits: Any, good: Any, bad: Any) -> None:
    judged = judge((), [measured(good), DIED], limits)
    assert judged.verdict is ClaimVerdict.UNTESTED
    assert "; flashinfer@0.7.2.post1 died: no answer in 400 s" in judged.reason
    assert judge((), [measured(bad), DIED], limits).verdict is ClaimVerdict.REFUTED
    judged = judge((), [measured(good), Measurement("installed", Skip("no nvcc"))], limits)
    assert judged.verdict is ClaimVerdict.CONFIRMED
    assert judged.reason.endswith("; installed not run: no nvcc")


@pytest.mark.parametrize(
    ("judge", "limits", "rows"),
    [
        (md011.maps.judge, {"max_maps": 0}, [{**MAP, "path": "fused"}]),
        (md011.fused.judge, {"max_calls": 0}, []),
        (md011.distinct.judge, {"max_calls": 0}, []),
        (
            md011.boundary.judge,
            {"experts": 510, "tokens": 256},
            [{"tokens": 257, "most_experts": 0}],
        ),
    ],
)
def test_without_such_rows_nothing_is_confirmed(judge: Any, limits: Any, rows: Any) -> None:
    assert judge((), [measured(*rows)], limits).verdict is ClaimVerdict.UNTESTED


@pytest.mark.parametrize("judge", [md011.fused.judge, md011.distinct.judge])
def test_an_illegal_access_in_sums_refutes(judge: Any) -> None:
    crash = Measurement("flashinfer@0.6.6", Crash(Death.ILLEGAL_MEMORY_ACCESS, "CUDA error"))
    assert judge((), [measured(SUM), crash], {"max_calls": 0}).verdict is ClaimVerdict.REFUTED


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (lab.distinct, {"ids": {"distinct"}, "finalize": {"normal", "no_filling"}, "rank": {0, 1}}),
        (lab.sentinels, {"ids": {"sentinel"}, "path": {"fused", "three-step"}, "rank": {0}}),
        (lab.fused_sums, {"ids": {"one_expert", "one_repeat"}, "path": {"fused"}}),
        (lab.deduplicated, {"ids": {"one_expert", "one_repeat"}, "finalize": {"normal", "no_filling"}}),
    ],
)
def test_sums_are_measured_on_the_code_of_the_release(
    monkeypatch: pytest.MonkeyPatch, measure: Any, expected: dict[str, set[Any]]
) -> None:
    monkeypatch.setattr(lab, "_load", lambda unit, device, sources: ThreeStepModel())
    monkeypatch.setattr(lab, "_MEMORIES", ("earlier",))
    rows = measure("flashinfer@0.6.6", "cpu", {})
    assert {key: {row[key] for row in rows} for key in expected} == expected
    assert all(row["rows_right"] == row["rows"] > 0 for row in rows)


def test_too_many_tokens_for_the_fused_prologue_leave_the_boundary_untested() -> None:
    rows = [{"tokens": 64, "most_experts": 510}, {"tokens": 257, "most_experts": 0}]
    judged = md011.boundary.judge((), [measured(*rows)], {"experts": 510, "tokens": 256})
    assert judged.verdict is ClaimVerdict.CONFIRMED


def test_ids_of_each_kind() -> None:
    torch.manual_seed(0)
    assert (make_ids(parameters(ids="one_expert", ranks=2, rank=1)) == 64).all()
    repeat = make_ids(parameters(ids="one_repeat", ranks=2, rank=1))
    assert (repeat[:, 0] == repeat[:, 1]).all()
    assert (repeat[:, 0] >= 64).all()
    assert (make_ids(parameters(ids="sentinel"))[::2, 4:] == -1).all()
