"""The judges of MD001's claims about real engines."""

from __future__ import annotations

from typing import Any

import pytest

from moedoctor.entries.shipped import builtin_folder
from moedoctor.faults.routing import nan_routing_engine as engine
from moedoctor.interfaces import Measurement
from moedoctor.results import ClaimVerdict, Observation
from moedoctor.runner.targets import load_targets

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
LIMITS = {"min_share": 1.0, "max_rows": 0, "min_old_rows": 1}
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


def judged(judge: Any, limits: dict[str, float], *rows: dict[str, Any]) -> Any:
    return judge((), [Measurement("installed", Observation({"rows": list(rows)}))], limits)


@pytest.mark.parametrize(
    ("judge", "limits", "good", "bad"),
    [
        (engine.judge_padding, {"min_share": 0.95}, TABLE, {**TABLE, "nan_share": 0.5}),
        (engine.judge_overhead, {"max_overhead": 0.05}, COST, {**COST, "overhead": 0.08}),
    ],
)
def test_claims_that_an_engine_decides(judge: Any, limits: Any, good: Any, bad: Any) -> None:
    assert judged(judge, limits, good).verdict is ClaimVerdict.CONFIRMED
    assert judged(judge, limits, bad).verdict is ClaimVerdict.REFUTED


@pytest.mark.parametrize(
    ("own", "old", "verdict"),
    [
        ({}, {}, ClaimVerdict.CONFIRMED),
        ({"prompts_with_the_same_tokens": 3}, {}, ClaimVerdict.REFUTED),
        ({"rows_with_repeated_ids": 1}, {}, ClaimVerdict.REFUTED),
        ({}, {"rows_with_repeated_ids": 0}, ClaimVerdict.REFUTED),
        ({}, {"nan_in_padding": 0}, ClaimVerdict.UNTESTED),
        ({"routers_watched": 0}, {}, ClaimVerdict.UNTESTED),
        ({}, {"routers_watched": 0}, ClaimVerdict.UNTESTED),
    ],
)
def test_both_releases_must_do_as_said(own: Any, old: Any, verdict: ClaimVerdict) -> None:
    found = judged(engine.judge_end_to_end, LIMITS, UNTOUCHED, {**OWN, **own}, {**OLD, **old})
    assert found.verdict is verdict


def test_memory_that_was_made_nan_on_purpose_confirms_nothing() -> None:
    poisoned = {**TABLE, "config": "1 GPU, memory held NaN before"}
    none = {**TABLE, "nan_in_padding": 0, "nan_share": 0.0}
    found = judged(engine.judge_padding, {"min_share": 0.95}, none, poisoned)
    assert found.verdict is ClaimVerdict.REFUTED
    assert "held NaN before: 20 of 20" in str(found.reason)
    assert judged(engine.judge_padding, {"min_share": 0.95}, poisoned).verdict is ClaimVerdict.UNTESTED


@pytest.mark.parametrize(
    ("judge", "limits", "row"),
    [
        (engine.judge_padding, {"min_share": 0.95}, {"config": "1 GPU", "error": "load: died"}),
        (engine.judge_padding, {"min_share": 0.95}, {**TABLE, "steps_with_padding": 0}),
        (engine.judge_end_to_end, LIMITS, {**OWN, "nan_in_padding": 0}),
        (engine.judge_end_to_end, LIMITS, {"engine": OWN["engine"], "error": "load: died"}),
        (engine.judge_end_to_end, LIMITS, OWN),
    ],
)
def test_what_did_not_run_decides_nothing(judge: Any, limits: Any, row: Any) -> None:
    before = [UNTOUCHED] if judge is engine.judge_end_to_end else []
    assert judged(judge, limits, *before, row).verdict is ClaimVerdict.UNTESTED


@pytest.mark.parametrize(
    ("own", "untouched"),
    [
        ({"prompts_with_the_same_tokens": None}, {"engine": "untouched", "error": "process: hang"}),
        ({"prompts_with_the_same_tokens": 0}, {"engine": "something else"}),
        ({"nan_in_padding": 0}, UNTOUCHED),
    ],
)
def test_nothing_is_refuted_without_an_engine_to_hold_it_against(
    own: dict[str, Any], untouched: dict[str, Any]
) -> None:
    found = judged(engine.judge_end_to_end, LIMITS, untouched, {**OWN, **own}, OLD)
    assert found.verdict is ClaimVerdict.UNTESTED


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([{"config": "2 GPUs", "error": "died"}], ClaimVerdict.UNTESTED),
        ([{**TABLE, "config": "2 GPUs", "steps_with_padding": 0}], ClaimVerdict.UNTESTED),
        ([{**TABLE, "nan_share": 0.5}, {"config": "2 GPUs", "error": "died"}], ClaimVerdict.REFUTED),
        ([{"config": "1 GPU, memory held NaN before", "error": "died"}], ClaimVerdict.CONFIRMED),
        ([{"config": "DP=2", "not_run": "elsewhere"}], ClaimVerdict.CONFIRMED),
    ],
)
def test_an_engine_that_died_confirms_nothing(rows: list[dict[str, Any]], verdict: ClaimVerdict) -> None:
    assert judged(engine.judge_padding, {"min_share": 0.95}, TABLE, *rows).verdict is verdict


@pytest.mark.parametrize(
    ("overhead", "noise", "verdict"),
    [
        (0.026, 0.039, ClaimVerdict.UNTESTED),
        (0.06, 0.02, ClaimVerdict.UNTESTED),
        (0.026, 0.02, ClaimVerdict.CONFIRMED),
        (0.08, 0.02, ClaimVerdict.REFUTED),
    ],
)
def test_what_two_engines_that_are_alike_differ_by_counts(
    overhead: float, noise: float, verdict: ClaimVerdict
) -> None:
    found = judged(
        engine.judge_overhead, {"max_overhead": 0.05}, {**COST, "overhead": overhead, "noise": noise}
    )
    assert found.verdict is verdict
    assert f"differ by {noise:.1%}" in found.reason
    assert ("too much to tell" in found.reason) is (verdict is ClaimVerdict.UNTESTED)


@pytest.mark.parametrize(
    ("around_the_model", "wall", "verdict"),
    [
        ((0.06, 0.01), (0.03, 0.04), ClaimVerdict.CONFIRMED),
        ((0.09, 0.02), (0.03, 0.04), ClaimVerdict.UNTESTED),
        ((0.12, 0.01), (0.03, 0.04), ClaimVerdict.REFUTED),
        ((0.06, 0.01), (0.06, 0.04), ClaimVerdict.UNTESTED),
        ((0.06, 0.01), (0.10, 0.04), ClaimVerdict.REFUTED),
    ],
)
def test_events_around_the_model_decide_and_the_wall_clock_must_agree(
    around_the_model: tuple[float, float], wall: tuple[float, float], verdict: ClaimVerdict
) -> None:
    """The model is half of the step here."""
    gpu = {"gpu_overhead": around_the_model[0], "gpu_noise": around_the_model[1], "gpu_step_ms_off": 1.0}
    row = {**COST, **gpu, "overhead": wall[0], "noise": wall[1]}
    found = judged(engine.judge_overhead, {"max_overhead": 0.05}, row)
    assert found.verdict is verdict
    share, noise = (one / 2 for one in around_the_model)
    assert f"by events around the model {share:+.1%} and {noise:.1%} of that step" in found.reason


def test_the_trace_must_be_cheap_in_every_model() -> None:
    limits = {"max_overhead": 0.05}
    assert judged(engine.judge_overhead, limits, COST, COST).verdict is ClaimVerdict.CONFIRMED
    for other, verdict in ((0.08, ClaimVerdict.REFUTED), (0.04, ClaimVerdict.UNTESTED)):
        for rows in ((COST, {**COST, "overhead": other}), ({**COST, "overhead": other}, COST)):
            assert judged(engine.judge_overhead, limits, *rows).verdict is verdict


def test_the_engine_scenarios_are_valid_and_run_by_name_only() -> None:
    folder = builtin_folder() / "engine"
    names = ("nan_padding", "nan_padding_dp", "nan_overhead")
    found = [load_targets((str(folder / f"{name}.yaml"),))[0] for name in names]
    assert [one.id for one in found] == ["MD001"] * 3
    claims = {claim.key for one in found for claim in one.claims}
    assert claims == {one.key for one in engine.ENGINE_CLAIMS}
    assert not any("nan_padding" in one.file for one in load_targets(()))
