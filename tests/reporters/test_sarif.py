"""SARIF of every command that has it.

The official schema is not part of this project. The parts that we use are written down here by the standard
(sections 3.13 to 3.52), with every object closed: a misspelt property fails.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from checkpoints_of_tests import f32, modelopt
from hypothesis import given
from hypothesis import strategies as st
from report_samples import HOSTILE, case, full_report, report, reports, scenario

from moedoctor.cli import main
from moedoctor.reporters.findings import Finding, Findings, of_run, relative
from moedoctor.reporters.sarif import MOST_RESULTS, MOST_TEXT, SarifReporter, fingerprint, to_sarif

TEXT = {"type": "string", "minLength": 1}
LEVEL = {"enum": ["none", "note", "warning", "error"]}


def closed(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def listed(items: Any, most: int = 25_000) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most}


MESSAGE = closed("text", text={**TEXT, "maxLength": MOST_TEXT})
RULE = closed(
    "id shortDescription fullDescription help properties",
    id={**TEXT, "maxLength": 255},
    name={**TEXT, "maxLength": 255},
    shortDescription=MESSAGE,
    fullDescription=MESSAGE,
    help=closed("text", text=TEXT, markdown=TEXT),
    helpUri={"type": "string", "pattern": "^https://"},
    defaultConfiguration=closed("level", level=LEVEL),
    properties={
        "type": "object",
        "required": ["tags", "precision", "problem.severity"],
        "properties": {
            "tags": {"type": "array", "items": TEXT, "maxItems": 10, "uniqueItems": True},
            "precision": {"enum": ["very-high", "high", "medium", "low"]},
            "problem.severity": {"enum": ["error", "warning", "recommendation"]},
        },
    },
)
PLACE = closed(
    "physicalLocation",
    physicalLocation=closed(
        "artifactLocation region",
        artifactLocation=closed("uri", uri={"type": "string", "pattern": r"^(?!/|[a-z]+:|.*\.\./)[!-~]+$"}),
        region=closed("startLine", startLine={"type": "integer", "minimum": 1}),
    ),
    logicalLocations=listed(closed("fullyQualifiedName", fullyQualifiedName=TEXT)),
)
RESULT = closed(
    "ruleId ruleIndex level message locations partialFingerprints",
    ruleId=TEXT,
    ruleIndex={"type": "integer", "minimum": 0},
    level=LEVEL,
    message=MESSAGE,
    locations={**listed(PLACE, 10), "minItems": 1},
    partialFingerprints={"type": "object", "additionalProperties": TEXT, "minProperties": 1},
)
NOTE = closed("message", level=LEVEL, message=MESSAGE)
SCHEMA = closed(
    "$schema version runs",
    **{"$schema": {"type": "string", "format": "uri"}},
    version={"const": "2.1.0"},
    runs={
        **listed(
            closed(
                "tool results",
                tool=closed(
                    "driver",
                    driver=closed(
                        "name rules", name=TEXT, version=TEXT, semanticVersion=TEXT, rules=listed(RULE)
                    ),
                ),
                automationDetails=closed("id", id={"type": "string", "pattern": "^moedoctor/[a-z]+/$"}),
                columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                invocations=listed(
                    closed(
                        "executionSuccessful",
                        executionSuccessful={"type": "boolean"},
                        toolExecutionNotifications=listed(NOTE),
                    )
                ),
                results=listed(RESULT, MOST_RESULTS),
            ),
            20,
        ),
        "minItems": 1,
    },
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def run_of(text: str) -> dict[str, Any]:
    """Return the only run of a valid log, whose rules are those of its results."""
    log = json.loads(text)
    VALIDATOR.validate(log)
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules))
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
    marks = [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]
    assert len(marks) == len(set(marks)), "equal results are told apart by a number"
    return run


def by_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--format", "sarif"])
    return run_of(capsys.readouterr().out)


@given(reports)
def test_any_report_is_valid(any_report: Any) -> None:
    run_of(SarifReporter().render(any_report))


def test_a_run_has_its_failing_scenarios_and_regressions_with_help_from_the_entries() -> None:
    run = run_of(SarifReporter().render(full_report()))
    first, regression = run["results"]
    assert (first["ruleId"], first["level"]) == ("MD001", "error")
    assert first["locations"][0]["physicalLocation"]["region"] == {"startLine": 3}
    assert "worse than the baseline" in regression["message"]["text"]
    (rule,) = run["tool"]["driver"]["rules"]
    assert "## Fix" in rule["help"]["markdown"]
    assert rule["helpUri"].startswith("https://github.com/")


def test_a_run_without_a_failure_has_no_result() -> None:
    good = report(scenario("proved", case("faulty", "reproduced")), scenario("skipped"))
    assert run_of(SarifReporter().render(good))["results"] == []


def marks(run: dict[str, Any]) -> list[str]:
    return [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]


def test_fingerprints_stay_if_lines_and_figures_change() -> None:
    before = full_report()
    moved = tuple(replace(each, line=each.line + 40, reason="other words") for each in before.scenarios)
    worse = ("MD001 faulty: time_us 12.5 -> 99.25: worse",)
    texts = [
        SarifReporter().render(replace(before, scenarios=scenarios, findings=findings))
        for scenarios, findings in (
            (before.scenarios, worse),
            (moved, ("MD001 faulty: time_us 3.5 -> 17: worse",)),
        )
    ]
    assert marks(run_of(texts[0])) == marks(run_of(texts[1]))
    renamed = tuple(replace(each, name="other") for each in before.scenarios)
    assert marks(run_of(texts[0])) != marks(
        run_of(SarifReporter().render(replace(before, scenarios=renamed, findings=worse)))
    )


def test_a_checkpoint_names_its_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    damaged(tmp_path / "model")
    run = by_command(capsys, "lint", "model")
    uris = {
        result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in run["results"]
    }
    assert uris
    assert all(uri.startswith("model/") for uri in uris)
    assert any(result["ruleId"].startswith("MD0") for result in run["results"])
    first = marks(run)
    config = tmp_path / "model" / "config.json"
    config.write_text("\n\n\n" + config.read_text())
    assert marks(by_command(capsys, "lint", "model")) == first


def damaged(folder: Path) -> None:
    checkpoint = modelopt()
    checkpoint.tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_2"] = f32(3e-4)
    checkpoint.write(folder)


def test_a_log_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "RuntimeError: b_scales is not on GPU\n"
    log = tmp_path / "logs" / "a b.log"
    log.parent.mkdir()
    log.write_text("INFO vLLM 0.19.1\nTraceback (most recent call last):\n" + line)
    run = by_command(capsys, "triage", "logs/a b.log")
    (result,) = [result for result in run["results"] if result["ruleId"] == "MD003"]
    place = result["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "logs/a%20b.log"}, "region": {"startLine": 3}}
    log.write_text("more\n" * 7 + log.read_text())
    again = by_command(capsys, "triage", str(log))  # an absolute path below the working directory
    assert marks(again) == marks(run)


def test_an_environment_points_to_the_scenarios_of_its_failures(capsys: pytest.CaptureFixture[str]) -> None:
    run = by_command(capsys, "check", "--release", "0.19.1", "--sm", "12.0")
    assert {"MD001", "MD009"} <= {result["ruleId"] for result in run["results"]}
    for result in run["results"]:
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].startswith("scenarios/")


def test_more_results_than_github_shows_are_cut_worst_first_and_counted() -> None:
    found = [Finding("MD001", "note", "t", "m", "a.py", number + 1) for number in range(MOST_RESULTS + 5)]
    found.append(Finding("MD002", "error", "t", "m", "b.py"))
    run = run_of(to_sarif(Findings("check", found)))
    assert len(run["results"]) == MOST_RESULTS
    assert run["results"][0]["ruleId"] == "MD002"
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"] == "6 more findings are left out"


@given(st.text(max_size=60), st.text(max_size=3_000))
def test_any_text_is_valid_and_within_the_limits(file: str, text: str) -> None:
    finding = Finding("environment", "warning", text or "t", text or "m", relative(file), logical=text)
    run_of(to_sarif(Findings("check", [finding, finding])))


@pytest.mark.parametrize(
    "path", ["/srv/secret/models/a.yaml", "../../secret/a.yaml", "/srv/secret/../x/a.yaml"]
)
def test_no_folder_of_the_machine_is_named(path: str) -> None:
    assert relative(path) == "a.yaml"
    hidden = replace(full_report().scenarios[0], file=path)
    assert "secret" not in SarifReporter().render(report(hidden))


def test_hostile_text_stays_data() -> None:
    broken = scenario("error", reason=HOSTILE, title=HOSTILE, id="MD902")
    text = SarifReporter().render(report(broken))
    run_of(text)
    assert "\x1b" not in text


def test_the_fingerprint_is_that_of_the_release_before() -> None:
    """Whoever changes this opens every alert of every user again."""
    finding = of_run(full_report()).found[0]
    assert fingerprint(finding) == fingerprint(replace(finding, line=99, message="other", title="other"))
    assert (
        fingerprint(Finding("MD001", "error", "", "", "scenarios/a.yaml", key=("a",)))[:16]
        == "a1b371e02c889bf2"
    )
