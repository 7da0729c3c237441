"""The parts of claims; points that could not show a failure; controls and fixes at the points of files."""

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fault_cases import run
from pydantic import ValidationError

from moedoctor import catalogue
from moedoctor.entries import find_builtin_folder
from moedoctor.faults.base import ClaimCases, claim, decide, in_lab
from moedoctor.interfaces import ClaimJudgement, Fault, Measurement
from moedoctor.results import CaseVerdict, ClaimVerdict, Crash, Death, Observation, Tier
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
def test_a_claim_comes_from_outside_and_names_its_subject_and_conditions(file: Path) -> None:
    """A statement of moedoctor about itself is a promise in evidence/promises.yaml."""
    (scenario,) = load_targets((str(file),))
    assert all(claim.subject and claim.conditions for claim in scenario.claims)
    sources = [claim.source for claim in scenario.claims]
    assert [source for source in sources if not SOURCE.fullmatch(source) or "moedoctor" in source] == []


MORE_EXPERTS = "more than experts 8"
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "MD001": [
        ({"experts": 8, "top_k": 9}, f"top_k: 9 is {MORE_EXPERTS}"),
        ({"router": "grouped", "experts": 10, "num_groups": 4, "topk_groups": 2}, "does not divide experts"),
        ({"router": "grouped", "num_groups": 4, "topk_groups": 5}, "topk_groups: 5 is more than num_groups"),
        (
            {"router": "grouped", "experts": 16, "num_groups": 4, "topk_groups": 1},
            "top_k: 8 is more than the experts of 1 groups",
        ),
        ({"router": "grouped", "topk_groups": 2}, "the grouped router needs"),
        ({"num_groups": 4}, "only the grouped router has groups"),
        ({"tolerance": 1}, "tolerance"),
    ],
    "MD004": [
        ({"cuda": "11.8"}, "must be a release from 12.0 to 13.x"),
        ({"cuda": "13.0.88"}, "must be a release"),
        ({"arch_list": "x" * 201}, "arch_list"),
    ],
    "MD006": [
        ({"top_k": 9, "capacity": 8}, "that is MD007"),
        ({"capacity": 200}, "more than experts"),
        ({"calls": 4, "computed": 8}, "more than calls"),
    ],
    "MD007": [
        ({"experts": 8, "capacity": 8, "top_k": 2}, "hold every expert"),
        ({"tokens": 1, "capacity": 8, "top_k": 8}, "hold every expert"),
        ({"experts": 8, "top_k": 9}, MORE_EXPERTS),
    ],
    "MD008": [({"bytes": 1}, "1024"), ({"arguments": "[1]"}, "must be a JSON object")],
    "MD010": [
        ({"release": "0.16.0"}, "must be a release of the tables"),
        ({"capability": "9.9"}, "must be one of 7.0"),
        ({"setting": "MARLIN"}, "must be NAME=VALUE or a flag"),
        ({"wants": "BANANA"}, "wants: vLLM 0.21.0 has"),
        ({"activation": "situ"}, "activation: vLLM 0.21.0 knows"),
    ],
    "MD011": [
        ({"experts": 8, "top_k": 9}, MORE_EXPERTS),
        ({"ranks": 3}, "does not divide"),
        ({"ranks": 2, "rank": 2}, "below ranks 2"),
        ({"finalize": "no_filling"}, "two ranks or more"),
    ],
    "MD014": [({"ratio": 1.05}, "rounding hides it")],
    "MD015": [
        ({"damage": "zero", "memory": "nan"}, "memory"),
        ({"damage": "absent"}, "memory"),
        ({"damage": "zero", "taken": "max"}, "nothing goes wrong"),
        ({"damage": "absent", "memory": "small", "taken": "max"}, "nothing goes wrong"),
    ],
    "MD016": [
        ({"experts": 8, "top_k": 9}, MORE_EXPERTS),
        ({"ranks": 3}, "does not divide"),
        ({"ranks": 2, "rank": 2}, "below ranks"),
        ({"use": "gather", "ranks": 2}, "knows no ranks"),
    ],
    "MD017": [
        ({"quantization": "bf16", "mistake": "only_scales"}, "no block scales"),
        ({"experts": 8, "top_k": 9}, MORE_EXPERTS),
    ],
    "MD018": [({"mistake": "stale_padding"}, "padded columns"), ({"experts": 8, "top_k": 9}, MORE_EXPERTS)],
    "MD019": [({"groups": 3}, "does not divide"), ({"experts": 8, "top_k": 9}, MORE_EXPERTS)],
    "MD021": [({"mistake": "one_tensor"}, "0.33.0 reads one_tensor")],
    "MD022": [({"intermediate": 192, "tensor_parallel": 5}, "does not divide intermediate")],
    "MD024": [({"width": 60}, "leaves no padding"), ({"experts": 8, "top_k": 9, "width": 16}, MORE_EXPERTS)],
    "MD027": [({"ranks": 3, "experts": 9}, "is no multiple of ranks 3")],
    "PARITY": [
        ({"backend": "TRITON", "quantization": "nvfp4"}, "nvfp4 has MARLIN"),
        ({"top_k": 8, "experts": 8}, "must be less than experts"),
        ({"hidden": 200}, "multiple of 128"),
        ({"top_k": 1, "ids": "duplicates"}, "at least 2"),
    ],
}
NEEDED = {"MD010": {"release": "0.21.0", "setting": "VLLM_NVFP4_MOE_BACKEND=MARLIN", "wants": "MARLIN"}}


@pytest.mark.parametrize(
    ("id_", "wrong", "message"),
    [(id_, wrong, message) for id_, points in REFUSED.items() for wrong, message in points],
)
def test_impossible_parameters_are_refused(id_: str, wrong: dict[str, Any], message: str) -> None:
    parameters, right = catalogue.load_faults()[id_].parameters, NEEDED.get(id_, {})
    parameters.model_validate(right)
    with pytest.raises(ValidationError, match=message):
        parameters.model_validate({**right, **wrong})


def list_points() -> Iterator[Any]:
    """Yield a point of each scenario; CI runs all of them, with MD005, against the baseline."""
    for scenario in load_targets(()):
        fault = catalogue.load_faults()[scenario.id]
        points = [point for point in scenario.points if fault.has_point(Tier.MODEL, point)]
        if fault.id != "MD005":
            yield from (pytest.param(fault, point, id=fault.id) for point in points[:1])


@pytest.mark.parametrize(("fault", "point"), list(list_points()))
def test_the_control_fails_and_the_fix_does_not(fault: Fault, point: Mapping[str, Any]) -> None:
    assert run(fault, "faulty", **point).verdict is CaseVerdict.REPRODUCED
    assert run(fault, "fixed", **point).verdict is CaseVerdict.CLEAN
