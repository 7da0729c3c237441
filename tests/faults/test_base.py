"""The parts of claims: named thresholds, and measures that only the child imports."""

import importlib
import re
from pathlib import Path

import pytest

from moedoctor import catalogue
from moedoctor.entries import find_builtin_folder
from moedoctor.faults.base import ClaimCases, claim, decide, in_lab
from moedoctor.interfaces import ClaimJudgement, Measurement
from moedoctor.results import ClaimVerdict, Crash, Death, Observation
from moedoctor.scenario.targets import load_targets

CASES = ClaimCases((), (), {"min_share": 0.5, "max_rows": 2})


@pytest.mark.parametrize(
    ("limit", "values", "kept"),
    [
        ("min_share", 0.5, True),
        ("min_share", [0.6, 0.4], False),
        ("min_share", float("nan"), False),
        ("min_share", [], False),
        ("max_rows", (0, 2), True),
        ("max_rows", 3, False),
    ],
)
def test_the_worst_value_decides(limit: str, values: float | list[float], kept: bool) -> None:
    assert CASES.keeps(limit, values) is kept


def test_a_measure_is_imported_when_it_runs_and_gets_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(device: str, *, rounds: int = 3) -> list[dict[str, object]]:
        return [{"device": device, "rounds": rounds}]

    measure = in_lab("moedoctor.text:rows_of_test")
    with pytest.raises(AttributeError, match="rows_of_test"):
        measure("unit", "cuda:1", {})
    monkeypatch.setattr("moedoctor.text.rows_of_test", rows, raising=False)
    assert measure("unit", "cuda:1", {}).evidence == {"rows": [{"device": "cuda:1", "rounds": 3}]}
    monkeypatch.setattr("moedoctor.text.rows_of_test", lambda unit, sources: Observation({unit: sources}))
    assert measure("unit", "cpu", {"a": "b"}).evidence == {"unit": {"a": "b"}}
    with pytest.raises(ModuleNotFoundError):
        in_lab("moedoctor.no_lab:measure")("", "cpu", {})


def test_units_that_died_are_no_evidence() -> None:
    @claim("share", thresholds=("min_share",))
    def share(cases: ClaimCases) -> ClaimJudgement:
        """Every unit has its share."""
        rows = cases.evidence()
        return decide(cases.keeps("min_share", (row["share"] for row in rows)), {"units": len(rows)})

    died = Measurement("b", Crash(Death.EXCEPTION, "x"))
    measurements = [Measurement("a", Observation({"share": 0.7})), died]
    judgement = share.judge((), measurements, {"min_share": 0.5})
    assert (judgement.verdict, judgement.evidence) == (ClaimVerdict.CONFIRMED, {"units": 1})
    assert share.judge((), [died], {"min_share": 0.5}).verdict is ClaimVerdict.REFUTED


def test_every_measure_named_by_a_string_is_a_function() -> None:
    names = {
        measure.__qualname__
        for fault in catalogue.load_faults().values()
        for measure in (test.measure for test in fault.claims)
        if ":" in getattr(measure, "__qualname__", "")
    }
    assert len(names) > 5
    for name in names:
        module, _, function = name.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name


def test_every_claim_is_in_a_scenario_and_engines_run_by_name_only() -> None:
    by_name = load_targets([str(file) for file in sorted((find_builtin_folder() / "engine").glob("*.yaml"))])
    without_a_name = load_targets(())
    assert not {scenario.file for scenario in by_name} & {scenario.file for scenario in without_a_name}
    scenarios, faults = (*by_name, *without_a_name), catalogue.load_faults().values()
    listed = {(scenario.id, claim.key) for scenario in scenarios for claim in scenario.claims}
    assert listed == {(fault.id, test.key) for fault in faults for test in fault.claims}


SOURCE = re.compile(r"https://\S+|[\w.-]+/[\w.-]+(#\d+|: .+)")
"""A link, an issue or pull request, or a named document in somebody's repository."""


@pytest.mark.parametrize("file", sorted(find_builtin_folder().rglob("*.yaml")), ids=lambda file: file.stem)
def test_a_claim_comes_from_outside(file: Path) -> None:
    """What moedoctor says of itself is a promise in evidence/promises.yaml."""
    (scenario,) = load_targets((str(file),))
    sources = [claim.source for claim in scenario.claims]
    assert [source for source in sources if not SOURCE.fullmatch(source) or "moedoctor" in source] == []
