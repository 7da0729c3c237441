"""MD016: three ways to index with -1, the same without -1, and the judges of the paths."""

import contextlib
import sys
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from fault_cases import by_rows, judge, run
from hypothesis import given, settings

from moedoctor.faults.routing import sentinel_ids as md016
from moedoctor.faults.routing import sentinel_ids_lab as lab
from moedoctor.faults.routing.sentinel_ids import SentinelIds
from moedoctor.interfaces import Measurement
from moedoctor.results import CaseVerdict, ClaimVerdict, Crash, Death, Observation, Skip
from moedoctor.upstream.releases.installed import describe_installed_release

FAULT = SentinelIds()


points = st.fixed_dictionaries(
    {
        "tokens": st.integers(2, 40),
        "experts": st.sampled_from([8, 24]),
        "top_k": st.integers(1, 8),
        "ranks": st.sampled_from([1, 4]),
        "rank": st.just(0),
        "slots": st.sampled_from(["padding", "dropped"]),
        "seed": st.integers(0, 5),
    }
)


@settings(deadline=None)
@given(points, st.sampled_from(["expert_map", "gather", "row_map"]))
def test_the_fix_is_always_right_and_the_control_wrong_if_it_can_be(point: dict, use: str) -> None:
    if use != "expert_map":
        point = {**point, "ranks": 1}
    # The first of four ranks does not have the expert that -1 wraps to.
    expected = CaseVerdict.CLEAN if point["ranks"] == 4 else CaseVerdict.REPRODUCED
    assert run(FAULT, "faulty", use=use, **point).verdict is expected
    assert run(FAULT, "fixed", use=use, **point).verdict is CaseVerdict.CLEAN


def test_empty_slots_of_weight_zero_are_noticed_too() -> None:
    evidence = {"rows": 4, "rows_wrong": 0, "empty_slots_given_to_an_expert": 2, "expert": 7}
    judged = judge(FAULT, evidence)
    assert (judged.verdict, judged.figure) == (CaseVerdict.REPRODUCED, "2 empty slots go to expert 7")


NONE, PADDING, DROPPED = md016.IDS
LIMITS = {"max_rows": 0}
RELEASE = "0.21.0, before #46408"


def measured(path: str, ids: str, wrong: int = 0) -> Measurement:
    row = {"rows": 4, "rows_wrong": wrong}
    return Measurement(f"{path}, {ids}", Observation({"row": row, "vllm": RELEASE}))


def died(path: str, ids: str) -> Measurement:
    return Measurement(f"{path}, {ids}", Crash(Death.ILLEGAL_MEMORY_ACCESS, "an illegal memory access"))


GOOD = [measured("TRITON bf16", ids) for ids in md016.IDS]


def judged(*units: Measurement) -> tuple[ClaimVerdict, str]:
    judgement = md016.judge_upstream_paths.judge((), units, LIMITS)
    return judgement.verdict, str(judgement.reason)


@pytest.mark.parametrize(("asked", "ends"), [(3, True), (10**9, False)])
def test_a_kernel_that_does_not_end_is_given_up(monkeypatch, asked, ends):
    class Event:
        times = 0

        def record(self) -> None: ...

        def query(self) -> bool:
            self.times += 1
            return self.times >= asked

    monkeypatch.setattr(torch.cuda, "Event", Event)
    expected = contextlib.nullcontext() if ends else pytest.raises(TimeoutError, match=r"after 0\.05 s")
    with expected:
        lab._finish("cuda:0", 0.05)


def test_paths_that_are_right_confirm_for_the_release_that_ran() -> None:
    reason = "vLLM 0.21.0, before #46408: all rows right in 2 calls of TRITON bf16"
    assert judged(*GOOD) == (ClaimVerdict.CONFIRMED, reason)


@pytest.mark.parametrize(
    ("bad", "figure"),
    [
        (measured("MARLIN nvfp4", PADDING, 2), "MARLIN nvfp4, padding rows of -1: 2 of 4 rows wrong"),
        (died("MARLIN nvfp4", PADDING), "MARLIN nvfp4, padding rows of -1: an illegal memory access"),
    ],
)
def test_a_path_that_fails_only_with_minus_one_refutes(bad: Measurement, figure: str) -> None:
    verdict, reason = judged(*GOOD, measured("MARLIN nvfp4", NONE), bad, measured("MARLIN nvfp4", DROPPED))
    assert verdict is ClaimVerdict.REFUTED
    assert reason == f"vLLM {RELEASE}: {figure}"


@pytest.mark.parametrize("control", [measured("MARLIN fp8", NONE, 1), died("MARLIN fp8", NONE)])
def test_a_path_that_fails_without_minus_one_is_no_evidence(control: Measurement) -> None:
    verdict, reason = judged(*GOOD, control, died("MARLIN fp8", PADDING), measured("MARLIN fp8", DROPPED, 4))
    assert verdict is ClaimVerdict.UNTESTED
    assert "MARLIN fp8, no -1: " in reason
    assert "so it says nothing of -1" in reason
    assert "padding" not in reason
    assert judged(control)[0] is ClaimVerdict.UNTESTED


def test_a_path_that_did_not_run_is_named_once_with_its_reason() -> None:
    left = [Measurement(f"OURS fp8, {ids}", Skip("no FP8 here")) for ids in md016.IDS]
    verdict, reason = judged(*GOOD, *left)
    assert verdict is ClaimVerdict.CONFIRMED
    assert reason.endswith("; OURS fp8 not run: no FP8 here")
    evidence = md016.judge_upstream_paths.judge((), [*GOOD, *left], LIMITS).evidence
    assert [row["ids"] for row in evidence["rows"] if row.get("skipped") == "no FP8 here"] == [*md016.IDS]


def test_each_path_has_a_process_for_each_kind_of_ids_and_the_control_first() -> None:
    units = [f"{path}, {ids}" for path in md016.UPSTREAM for ids in (NONE, PADDING, DROPPED)]
    assert list(md016.judge_upstream_paths.units(())) == units


@pytest.mark.parametrize(("ids", "empty"), [(NONE, 0), (PADDING, 48), (DROPPED, 48)])
def test_a_path_is_measured_with_the_ids_that_the_unit_names(ids, empty, monkeypatch):
    empty_pairs = []

    def figures(problem: Any, out: Any, expected: Any) -> dict[str, Any]:
        empty_pairs.append(int((problem.topk_ids < 0).sum()))
        return paths_figures(problem, out, expected)

    paths_figures = lab._count_rows
    monkeypatch.setattr(lab, "_count_rows", figures)
    monkeypatch.setattr(lab, "describe_installed_release", lambda: RELEASE)
    figures_of_unit = lab.measure_path(f"OURS bf16, {ids}", "cpu")
    assert empty_pairs == [empty]
    row = figures_of_unit["row"]
    assert (row["rows"], row["rows_wrong"]) == (48, 0)


@pytest.mark.parametrize(("text", "word"), [("def remap_topk_to_local(): ...", "with"), ("", "before")])
def test_the_installed_release_is_recognized_by_its_sources(text, word, tmp_path, monkeypatch):
    kernels = tmp_path / "vllm" / "model_executor" / "layers" / "fused_moe" / "experts" / "kernels.py"
    kernels.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('is not to be imported')")
    (tmp_path / "vllm-0.30.0.dist-info").mkdir()
    (tmp_path / "vllm-0.30.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.30.0\n")
    kernels.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert describe_installed_release() == f"0.30.0, {word} #46408"


@pytest.mark.parametrize(("in_blocks", "lost"), [(1, 0), (0, 1)])
def test_an_alignment_that_counts_empty_slots_or_loses_real_ones_refutes(in_blocks: int, lost: int) -> None:
    names = ("call", "empty_slots", "empty_slots_in_blocks", "slots_lost")

    def judged(*rows: tuple[int, int, int]) -> tuple[ClaimVerdict, str]:
        counts = [dict(zip(names, ("padding", *row), strict=True)) for row in rows]
        judgement = by_rows(md016.judge_alignment, {"max_slots": 0}, *counts)
        return judgement.verdict, str(judgement.reason)

    control, right, wrong = (0, 0, 0), (4, 0, 0), (4, in_blocks, lost)
    assert judged(control, right)[0] is ClaimVerdict.CONFIRMED
    assert judged(control, wrong)[0] is ClaimVerdict.REFUTED
    assert judged(wrong)[0] is judged(control)[0] is judged()[0] is ClaimVerdict.UNTESTED
    for other in (right, wrong):
        verdict, reason = judged(other, (0, 0, lost + 1))
        assert verdict is ClaimVerdict.UNTESTED
        assert reason.endswith("so it says nothing of -1")
