"""MD011: the restated sort, its counters and the judges."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
from fault_cases import case, judge, run
from hypothesis import given, settings

from moedoctor import results
from moedoctor.faults.routing import duplicate_ids as md011
from moedoctor.faults.routing import duplicate_ids_lab as lab
from moedoctor.faults.routing.duplicate_ids import DuplicateIds, DuplicateIdsParameters
from moedoctor.interfaces import ClaimTest, Measurement
from moedoctor.results import CaseResult, CaseVerdict, ClaimVerdict, Crash, Death, Observation, Skip, Tier
from moedoctor.upstream.flashinfer import probe as flashinfer_probe
from moedoctor.upstream.flashinfer.probe import FlashInferProbe
from moedoctor.upstream.releases.wheel import KernelError

FAULT = DuplicateIds()
CONFIRMED, REFUTED, UNTESTED = ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED, ClaimVerdict.UNTESTED


def parameters(**changes: Any) -> DuplicateIdsParameters:
    return DuplicateIdsParameters.model_validate(changes)


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


@settings(deadline=None)
@given(points)
def test_each_repeated_slot_leaves_one_entry_unwritten_and_no_other(point: dict[str, Any]) -> None:
    chosen = parameters(**point)
    ids, share = lab.make_ids(chosen), lab.find_share(chosen)
    maps = lab.ThreeStepModel().build_maps(ids, share, -5)
    figures = lab.map_figures(share, ids, maps)
    assert lab.count_entries_as_before(share, ids, maps, -5) == figures["unwritten_entries"]
    cleared = dataclasses.replace(maps, permuted_of_row=maps.permuted_of_row.clamp(min=-1))
    assert lab.count_entries_as_before(share, ids, cleared, -5) == 0
    if maps.fused:
        assert figures["unwritten_entries"] == 0
    else:
        assert figures["unwritten_entries"] == figures["repeated_slots"]
        assert figures["local_slots"] - figures["sorted_rows"] == figures["repeated_slots"]


@settings(max_examples=25, deadline=None)
@given(points)
def test_distinct_ids_and_deduplicated_ones_give_the_right_sum(point: dict[str, Any]) -> None:
    chosen = parameters(**point)
    guarded = lab.observe(chosen, lab.ThreeStepModel(), guard=True)
    assert guarded["rows_right"] == guarded["rows"]
    if chosen.ids in ("distinct", "sentinel"):
        plain = lab.observe(chosen, lab.ThreeStepModel())
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
    point = {"memory": memory, "finalize": finalize, "ranks": 2 if finalize == "no_filling" else 1}
    judged = run(FAULT, **point)
    assert judged.verdict is CaseVerdict.REPRODUCED
    assert judged.figure.endswith(figure)
    fixed = run(FAULT, "fixed", **point)
    assert (fixed.verdict, fixed.figure) == (CaseVerdict.CLEAN, "300 of 300 rows are right, three-step")


def test_an_illegal_access_is_the_symptom_and_another_death_is_not() -> None:
    crash = Crash(Death.ILLEGAL_MEMORY_ACCESS, "CUDA error: an illegal memory access was encountered")
    assert FAULT.judge_crash(case(FAULT), crash).verdict is CaseVerdict.REPRODUCED
    assert FAULT.judge_crash(case(FAULT), Crash(Death.HANG, "no answer")).verdict is CaseVerdict.ERROR


class Unchecked(lab.ThreeStepModel):
    """Finalize of a release without a bounds check: an entry of -1 is the row before the first one."""

    def finalize(self, maps: Any, rows: Any, ids: Any, weights: Any, out: Any, *_: Any) -> None:
        tokens, top_k = ids.shape
        at = maps.permuted_of_row.reshape(top_k, tokens).t()  # [T, K]
        first = rows.storage_offset() // rows.shape[1]
        buffer = rows.as_strided((rows.shape[0] + first, rows.shape[1]), rows.stride(), 0)  # [8 + R, H]
        out[:] = (buffer[first + at].float() * weights[:, :, None]).sum(1)


def test_a_row_taken_from_before_the_buffer_is_a_read_out_of_bounds() -> None:
    evidence = lab.observe(parameters(ids="one_repeat", memory="minus_one"), Unchecked())
    assert (evidence["rows_out_of_bounds"], evidence["rows_wrong"]) == (300, 0)
    judged = judge(FAULT, evidence)
    assert judged.verdict is CaseVerdict.REPRODUCED
    assert judged.figure == "reads out of bounds in 300 of 300 rows, without an error"
    for point, code in (
        (parameters(ids="one_repeat"), Unchecked()),
        (parameters(tokens=30, experts=80, top_k=64), lab.ThreeStepModel()),  # many stale rows
    ):
        stale = lab.observe(point, code)
        assert (stale["rows_out_of_bounds"], stale["rows_wrong"] > 0) == (0, True)


# --- The tier `kernel` -----------------------------------------------------------------------------------


def test_at_the_tier_kernel_control_and_fix_are_the_installed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def installed(device: str) -> lab.ThreeStepModel:
        asked.append(device)
        return lab.ThreeStepModel()

    monkeypatch.setattr(FlashInferProbe, "installed", installed)
    assert run(FAULT, "faulty", Tier.KERNEL).verdict is CaseVerdict.REPRODUCED
    assert run(FAULT, "fixed", Tier.KERNEL).verdict is CaseVerdict.CLEAN
    assert asked == ["cuda:0", "cuda:0"]
    released = run(FAULT, "flashinfer@0.6.6", Tier.KERNEL, lab.ThreeStepModel())
    assert released.verdict is CaseVerdict.REPRODUCED
    assert len(asked) == 2


def test_without_flashinfer_the_tier_kernel_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise KernelError("flashinfer is not installed here")

    monkeypatch.setattr(flashinfer_probe, "find_installed_source", missing)
    with pytest.raises(results.UnavailableError, match="flashinfer is not installed here"):
        run(FAULT, "fixed", Tier.KERNEL)


# --- Judges of cases -------------------------------------------------------------------------------------


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
HANG = {"verdict": CaseVerdict.ERROR, "evidence": {"death": "hang"}}
DEAD = dataclasses.replace(result("flashinfer@0.7.2.post1", "death"), **HANG)
BESIDE = result("flashinfer@0.6.13", "rows_out_of_bounds", memory="minus_one")
LIMITS = {"min_releases": 1, "max_cases": 0, "max_maps": 0, "experts": 510, "tokens": 256}


def test_the_table_lists_each_release_and_call() -> None:
    (earlier, garbage) = sorted(FAULT.conclude(CASES)["finalize"], key=lambda row: str(row["call"]))
    assert earlier["flashinfer@0.6.6"] == earlier["flashinfer@0.7.2.post1"] == "wrong sum, no error"
    figures = (garbage["flashinfer@0.6.6"], garbage["flashinfer@0.7.2.post1"])
    assert figures == ("illegal access", "repeat dropped")
    assert FAULT.conclude([result("faulty", "rows_wrong")]) == {}


@pytest.mark.parametrize(
    ("claim", "cases", "verdict"),
    [
        (md011.judge_illegal_access, CASES, CONFIRMED),
        (md011.judge_illegal_access, CASES[1:4], REFUTED),
        (md011.judge_illegal_access, CASES[4:], UNTESTED),
        (md011.judge_illegal_access, [BESIDE], CONFIRMED),
        (md011.judge_illegal_access, [DEAD], UNTESTED),
        (md011.judge_illegal_access, [*CASES, DEAD], CONFIRMED),
        (md011.judge_bounds_check, [BESIDE], REFUTED),
        (md011.judge_bounds_check, CASES, CONFIRMED),
        (md011.judge_bounds_check, [*CASES, result("flashinfer@0.6.13", "death")], REFUTED),
        (md011.judge_bounds_check, CASES[:2], UNTESTED),
        (md011.judge_bounds_check, [DEAD], UNTESTED),
        (md011.judge_bounds_check, [*CASES, DEAD], UNTESTED),
        (md011.judge_bounds_check, [DEAD, result("flashinfer@0.6.13", "death")], REFUTED),
    ],
)
def test_claims_decided_by_cases(claim: ClaimTest, cases: list[CaseResult], verdict: ClaimVerdict) -> None:
    judged = claim.judge(cases, (), LIMITS)
    assert judged.verdict is verdict
    if DEAD in cases:
        assert str(judged.reason).endswith("flashinfer@0.7.2.post1: 1 cases ended in another error")


def test_the_whole_runner_is_untested_and_the_figure_describes_its_parts() -> None:
    judged = md011.judge_whole_runner.judge(CASES, (), {})
    assert judged.verdict is UNTESTED
    crashes = "flashinfer@0.6.6 in 1 of 2 cases, flashinfer@0.7.2.post1 in 0 of 2 cases"
    assert str(judged.reason).endswith(f"all tokens on one expert, crash: {crashes}")
    assert judged.evidence["releases"][0]["illegal access"] == 1
    other = md011.judge_whole_runner.judge([result("flashinfer@0.6.6", "death", ids="one_repeat")], (), {})
    assert str(other.reason).endswith("nor did its maps and finalize run")


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


MAP = {"path": "three-step", "tokens": 257, "top_k": 8, "experts": 128}
MAP |= {"unwritten_entries": 3, "entries_as_before": 3, "repeated_slots": 3}
DIED = Measurement("flashinfer@0.7.2.post1", Crash(Death.HANG, "no answer in 400 s"))
SKIPPED = Measurement("installed", Skip("no nvcc"))


def bound(tokens: int, most: int) -> dict[str, int]:
    return {"tokens": tokens, "most_experts": most}


@pytest.mark.parametrize(
    ("claim", "good", "change", "irrelevant"),
    [
        (md011.judge_maps, MAP, {"unwritten_entries": 2}, {**MAP, "path": "fused"}),
        (md011.judge_maps, MAP, {"entries_as_before": 0}, {**MAP, "path": "fused"}),
        (md011.judge_boundary, bound(64, 510), bound(256, 254), bound(257, 0)),
    ],
)
def test_claims_decided_by_measurements(claim: ClaimTest, good: Any, change: Any, irrelevant: Any) -> None:
    def judged(*units: Measurement) -> tuple[ClaimVerdict, str]:
        judgement = claim.judge((), units, LIMITS)
        return judgement.verdict, str(judgement.reason)

    right, wrong = measured(good), measured({**good, **change})
    assert judged(right)[0] is judged(measured(good, irrelevant))[0] is CONFIRMED
    assert judged(right, wrong)[0] is judged(wrong, DIED)[0] is REFUTED
    assert judged(measured(irrelevant))[0] is UNTESTED, "nothing of the kind was measured"
    verdict, reason = judged(right, DIED)
    assert verdict is UNTESTED
    assert reason.endswith("; flashinfer@0.7.2.post1 died: no answer in 400 s")
    verdict, reason = judged(right, SKIPPED)
    assert verdict is CONFIRMED
    assert reason.endswith("; installed not run: no nvcc")


def test_the_table_of_paths_names_releases_that_differ() -> None:
    maps = [measured(MAP), measured({**MAP, "path": "fused"}, unit="flashinfer@0.6.13")]
    evidence = md011.judge_maps.judge((), maps, LIMITS).evidence
    paths = "fused: flashinfer@0.6.13; three-step: flashinfer@0.6.6"
    assert evidence["paths"] == [{"tokens": 257, "top_k": 8, "128 experts": paths}]
    assert md011.judge_maps.judge((), maps[:1], LIMITS).evidence["paths"][0]["128 experts"] == "three-step"


def test_the_boundary_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "_load", lambda unit, device, sources: lab.ThreeStepModel())
    most = {row["tokens"]: row["most_experts"] for row in lab.measure_boundary("flashinfer@0.6.6", "cpu", {})}
    assert most == {1: 510, 32: 510, 64: 510, 128: 510, 129: 254, 256: 254, 257: 0}
