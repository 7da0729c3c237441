"""The comparison of two reports."""

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import ENVIRONMENT, POINTS, PULL, case, report, reports, scenario

from moedoctor import comparison as compared
from moedoctor import results
from moedoctor.comparison import Comparison, Tolerance, compare, list_held, list_metrics, name_case

V = results.ScenarioVerdict
C = results.CaseVerdict


def _compare(before: results.ScenarioResult, after: results.ScenarioResult, **options: Any) -> Comparison:
    return compare(report(before), report(after), Tolerance(), **options)


@settings(max_examples=25)
@given(reports)
def test_a_report_is_no_worse_than_itself(record: results.Report) -> None:
    comparison = compare(record, record, Tolerance(0.0))
    assert comparison.regressions == comparison.improvements == ()
    again = results.from_json(results.Report, json.loads(results.to_json(record)))
    assert compare(again, record, Tolerance(0.0)) == compare(record, again, Tolerance(0.0)) == comparison


@settings(max_examples=25)
@given(reports.filter(lambda record: record.scenarios), st.data())
def test_any_worse_scenario_verdict_is_a_regression(record: results.Report, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(record.scenarios) - 1))
    two = data.draw(st.lists(st.sampled_from(V), min_size=2, max_size=2, unique=True))
    before, after = sorted(two, key=lambda verdict: results.VERDICTS[verdict].rank)
    baseline, current = (_with_verdict(record, index, verdict) for verdict in (before, after))
    held = current.scenarios[index] in list_held(baseline, current)
    if after is V.FOUND and held:
        assert compare(baseline, current, Tolerance()).regressions == ()
        return
    (change,) = compare(baseline, current, Tolerance()).regressions
    assert (change.what, change.baseline, change.current) == ("verdict", before.value, after.value)
    assert change.scenario == record.scenarios[index].id
    # The reverse is no regression, unless a known failure is no longer looked for.
    lost = after is V.FOUND and before in (V.ABSENT, V.SKIPPED)
    assert bool(compare(current, baseline, Tolerance()).regressions) is lost


def _with_verdict(record: results.Report, index: int, verdict: results.ScenarioVerdict) -> results.Report:
    scenarios = list(record.scenarios)
    scenarios[index] = dataclasses.replace(scenarios[index], verdict=verdict)
    return dataclasses.replace(record, scenarios=tuple(scenarios))


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("failed", "proved", "improvements"),
        ("found", "proved", "improvements"),
        ("failed", "found", "improvements"),
        ("failed", "error", "notes"),
        ("error", "skipped", "notes"),
        ("skipped", "absent", "notes"),
        ("found", "skipped", "regressions"),
        ("found", "absent", "regressions"),
    ],
)
def test_only_a_proof_is_an_improvement(before: str, after: str, kind: str) -> None:
    comparison = _compare(scenario(before), scenario(after, reason="why"))
    (change,) = getattr(comparison, kind)
    assert "why" in change.reason
    assert len(comparison.regressions + comparison.improvements + comparison.notes) == 1


WORSE = {
    "faulty": "reproduced-clean reproduced-skipped reproduced-error clean-skipped clean-error skipped-clean "
    "skipped-error error-clean",
    "installed": "clean-reproduced clean-skipped clean-error reproduced-skipped reproduced-error "
    "skipped-reproduced skipped-error error-reproduced",
    "vllm@0.19.1": "clean-reproduced reproduced-clean clean-skipped reproduced-skipped clean-error "
    "reproduced-error skipped-error",
}


@pytest.mark.parametrize("subject", ["faulty", "fixed", "installed", "vllm@0.19.1"])
def test_every_change_of_a_case(subject: str) -> None:
    worse = WORSE["installed" if subject == "fixed" else subject].split()
    for before, after in itertools.permutations((verdict.value for verdict in C), 2):
        comparison = _compare(*(scenario("proved", case(subject, verdict)) for verdict in (before, after)))
        (change,) = comparison.regressions or comparison.improvements or comparison.notes
        assert (change.what, change.baseline, change.current) == ("verdict", before, after)
        assert bool(comparison.regressions) is (f"{before}-{after}" in worse)
        assert bool(comparison.notes) is (f"{before}-{after}" == "error-skipped")


def test_a_missing_case_is_a_regression_unless_the_run_was_partial() -> None:
    before = scenario("proved", case("fixed", "clean", POINTS[0]), case("fixed", "clean", POINTS[1]))
    after = scenario("proved", case("fixed", "clean", POINTS[1]))
    (change,) = _compare(before, after).regressions
    assert (change.what, change.baseline, change.current) == ("missing", "clean", None)
    assert change.case == 'fixed/model/cpu scoring="softmax" tokens=128 top_k=2'
    partial = _compare(before, after, partial=True)
    assert (partial.regressions, [change.what for change in partial.notes]) == ((), ["missing"])
    assert [change.what for change in _compare(after, before).notes] == ["new"]


def test_a_missing_scenario_is_a_regression_unless_the_run_was_partial() -> None:
    fewer = report(scenario())
    more = report(scenario(), scenario(id="MD002", file="scenarios/unpinned_copy.yaml"))
    (change,) = compare(more, fewer, Tolerance()).regressions
    assert (change.scenario, change.what) == ("MD002", "missing")
    assert compare(more, fewer, Tolerance(), partial=True).regressions == ()
    assert [note.what for note in compare(fewer, more, Tolerance()).notes] == ["new"]


def test_a_partial_run_rests_on_fewer_cases() -> None:
    for before, after in (("proved", "skipped"), ("found", "skipped"), ("found", "proved")):
        comparison = _compare(scenario(before), scenario(after), partial=True)
        assert (comparison.regressions, comparison.improvements, len(comparison.notes)) == ((), (), 1)
    assert _compare(scenario("proved"), scenario("failed"), partial=True).regressions


def test_cases_are_found_again_in_another_order_on_another_gpu_and_from_another_folder() -> None:
    cases = [case("installed", "clean", point) for point in POINTS]
    moved = [
        dataclasses.replace(item, device="cuda:3", parameters=dict(reversed(item.parameters.items())))
        for item in cases
    ]
    before = scenario("proved", *cases, file="scenarios/nan_routing.yaml")
    after = scenario("proved", *reversed(moved), file="C:\\moedoctor\\_scenarios\\nan_routing.yaml")
    assert _compare(before, after) == Comparison()
    names = {name_case(item) for item in [*cases, case("installed", "clean", device="cpu")]}
    assert len(names) == len(POINTS) + 1


def test_one_and_true_are_different_parameters() -> None:
    before, after = (scenario("proved", case("fixed", "clean", {"bias": value})) for value in (1, True))
    assert [change.what for change in _compare(before, after).regressions] == ["missing"]


def test_two_scenarios_about_one_failure_are_kept_apart() -> None:
    proved, failed = scenario("proved"), scenario("failed")
    assert compare(report(proved, failed), report(proved, failed), Tolerance()) == Comparison()
    for worse in ((proved, failed), (failed, proved)):
        assert len(compare(report(proved, proved), report(*worse), Tolerance()).regressions) == 1


def _claim(verdict: str, **evidence: Any) -> results.ClaimResult:
    return results.ClaimResult("the clamp is free", PULL, results.ClaimVerdict(verdict), evidence, "measured")


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("confirmed", "refuted", "regressions"),
        ("confirmed", "untested", "notes"),
        ("untested", "refuted", "notes"),
        ("refuted", "confirmed", "notes"),
        ("confirmed", None, "notes"),
    ],
)
def test_changes_of_a_claim(before: str, after: str | None, kind: str) -> None:
    claims = () if after is None else (_claim(after),)
    comparison = _compare(scenario(claims=(_claim(before),)), scenario(claims=claims))
    (change,) = getattr(comparison, kind)
    assert (change.case, change.baseline) == ("claim: the clamp is free (vllm-project/vllm#39391)", before)
    assert len(comparison.regressions) + len(comparison.improvements) + len(comparison.notes) == 1


def test_metrics_of_cases_claims_and_conclusions_are_compared() -> None:
    def measured(us: float) -> results.ScenarioResult:
        return scenario(
            "proved",
            case("fixed", "clean", evidence={"kernel_us": us, "rows": us}, seconds=us),
            claims=(_claim("confirmed", clamp_us=us),),
            conclusions={"ours_vllm_ratio": us},
        )

    comparison = _compare(measured(1.0), measured(2.0))
    regressed = sorted(change.what for change in comparison.regressions)
    assert regressed == ["clamp_us", "kernel_us", "ours_vllm_ratio"]
    assert {(change.baseline, change.current) for change in comparison.regressions} == {(1.0, 2.0)}
    assert len(_compare(measured(2.0), measured(1.0)).improvements) == 3
    wide = compare(report(measured(1.0)), report(measured(2.0)), Tolerance(1.0))
    assert wide == Comparison()


def _on(**facts: Any) -> results.Report:
    fast = facts.pop("us", 1.0)
    return report(scenario(conclusions={"a_us": fast}), environment={**ENVIRONMENT, **facts})


@pytest.mark.parametrize("fact", ["driver", "torch"])
def test_metrics_under_another_driver_or_torch_are_not_compared(fact: str) -> None:
    comparison = compare(_on(), _on(us=9.0, **{fact: "other"}), Tolerance())
    (note,) = comparison.notes
    assert comparison.regressions == ()
    assert f"not compared: {fact} differs (baseline {ENVIRONMENT[fact]}, current other)" in note.reason


def test_the_processor_matters_only_without_a_gpu() -> None:
    assert compare(_on(), _on(us=9.0, cpu="other"), Tolerance()).regressions
    comparison = compare(_on(gpu=None), _on(gpu=None, us=9.0, cpu="other"), Tolerance())
    assert (comparison.regressions, len(comparison.notes)) == ((), 1)


@pytest.mark.parametrize("fact", ["gpu", "vllm", "flashinfer"])
def test_reports_about_different_things_cannot_be_compared(fact: str) -> None:
    with pytest.raises(compared.Incomparable, match=f"{fact} differs .baseline .*, current other") as caught:
        compare(_on(), _on(**{fact: "other"}), Tolerance())
    assert isinstance(caught.value, ValueError)
    with pytest.raises(compared.Incomparable, match=f"{fact} differs"):
        compared.check_comparable(ENVIRONMENT, {**ENVIRONMENT, fact: "other"})
    compared.check_comparable(ENVIRONMENT, {**ENVIRONMENT, "driver": "other"})
    with pytest.raises(compared.Incomparable, match="current none"):
        compare(_on(**{fact: "other"}), _on(**{fact: None}), Tolerance())


LOWER = ("kernel_us", "load_ms", "start_seconds", "ours_vllm_ratio")
HIGHER = ("copy_gb_s", "tokens_per_second")
positive = st.floats(1e-3, 1e6)


def test_metrics_are_found_inside_mappings_and_lists() -> None:
    evidence = {
        "kernel_us": 3,
        "rows": [{"tokens": 1, "kernel_us": 2.5}, {"kernel_us": "nan"}],
        "ours": {"vllm_ratio": 0.6, "name": "x"},
        "note_us": "fast",
        "flag_us": True,
        "samples_us": [1.0, 2.0],
        "missing_us": None,
    }
    found = {"kernel_us": 3, "rows[0].kernel_us": 2.5, "rows[1].kernel_us": "nan", "ours.vllm_ratio": 0.6}
    assert list_metrics(evidence) == found


@given(st.sampled_from(LOWER + HIGHER), positive, st.floats(0.06, 3), st.booleans())
def test_direction_follows_the_name(name: str, baseline: float, change: float, up: bool) -> None:
    current = baseline * (1 + change) if up else baseline / (1 + change)
    judged = compared.judge_metric(name, baseline, current, Tolerance(0.05))
    assert judged is not None
    assert judged[0] == ("regression" if up == (name in LOWER) else "improvement")


@given(st.sampled_from(LOWER + HIGHER), positive, st.floats(-1, 1), st.floats(0, 0.9))
def test_a_change_within_the_tolerance_is_not_reported(name, baseline, share, limit):
    assert compared.judge_metric(name, baseline, baseline * (1 + share * limit), Tolerance(limit)) is None


def test_figures_without_a_usable_baseline() -> None:
    expected = {(2.0, "nan"): "regression"}
    expected |= dict.fromkeys(((0.0, 1.0), (-1.0, 1.0), ("nan", 1.0), ("nan", "inf")), "note")
    for (baseline, current), outcome in expected.items():
        judged = compared.judge_metric("kernel_us", baseline, current, Tolerance())
        assert judged is not None
        assert judged[0] == outcome
    assert compared.judge_metric("kernel_us", "nan", "nan", Tolerance()) is None
    assert compared.judge_metric("kernel_us", 0, 0, Tolerance()) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5%", Tolerance(0.05)),
        (" 2.5 % ", Tolerance(0.025)),
        ("0%", Tolerance(0.0)),
        ("latency:5%,ratio:2%", Tolerance(by_key={"latency": 0.05, "ratio": 0.02})),
        (("3%", "kernel_us=10%"), Tolerance(0.03, {"kernel_us": 0.1})),
        ("rows[0].kernel_us = 10%", Tolerance(by_key={"rows[0].kernel_us": 0.1})),
    ],
)
def test_tolerances_are_read(text: str | tuple[str, ...], expected: Tolerance) -> None:
    read = Tolerance.parse(text)
    assert read.default == pytest.approx(expected.default)
    assert dict(read.by_key) == pytest.approx(dict(expected.by_key))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tolerance '': expected a percentage such as 5%"),
        ("5", "tolerance '5': expected a percentage"),
        ("nan%", "expected a percentage"),
        ("latency:5%,", "tolerance '': expected"),
        ("2000%", "expected 0% to 1000%"),
        ("latncy:5%", "unknown metric latncy, expected one of latency, ratio, bandwidth, throughput"),
        ("5%,6%", "the general tolerance is given twice"),
        ("9" * 5000 + "%", "expected a percentage"),
    ],
)
def test_bad_tolerances_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="tolerance") as caught:
        Tolerance.parse(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_the_most_specific_tolerance_is_used() -> None:
    tolerance = Tolerance.parse("1%,latency:2%,kernel_us:3%,rows[0].kernel_us:4%")
    limits = [tolerance.limit(name) for name in ("a_ratio", "a_us", "x.kernel_us", "rows[0].kernel_us")]
    assert limits == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert math.isclose(Tolerance().limit("a_us"), 0.05)
