"""SARIF of every command that has it, against the standard's schema and the limits of code scanning."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from checkpoints_of_tests import f32, modelopt
from cuda_fakes import fake_cubin
from hypothesis import given
from hypothesis import strategies as st
from report_samples import HOSTILE, case, full_report, report, reports, scenario

from moedoctor.cli import main
from moedoctor.reporters.findings import Finding, Findings, find_in_run, make_relative
from moedoctor.reporters.sarif import MOST_BYTES, MOST_RESULTS, SarifReporter, hash_finding, to_sarif

SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "sarif-2.1.0.json").read_text(encoding="utf-8"))
STANDARD = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())
REPORTS = Path(__file__).parents[2] / "reports"
RUNS = sorted(
    file
    for file in REPORTS.rglob("*.json")
    if '"command": "run"' in file.read_text(encoding="utf-8", errors="replace")[:200]
)


def ends(parts: list[Any]) -> list[Any]:
    return parts[:50] + parts[50:][-50:]


def run_of(text: str) -> dict[str, Any]:
    """Return the only run of a log that is valid by the standard and that GitHub's code scanning takes.

    The limits and the required properties are those of GitHub's pages "SARIF support for code scanning" and
    "SARIF results exceed one or more limits".
    """
    log = json.loads(text)
    (run,) = log["runs"]
    results, rules = run["results"], run["tool"]["driver"]["rules"]
    # The schema is slow: of a large log it gets the first and the last.
    driver = {**run["tool"]["driver"], "rules": ends(rules)}
    STANDARD.validate({**log, "runs": [{**run, "tool": {"driver": driver}, "results": ends(results)}]})
    assert len(gzip.compress(text.encode(), 1)) <= 10_000_000
    assert len(results) <= 5_000
    assert len(rules) <= 25_000
    ids = [rule["id"] for rule in rules]
    assert len(ids) == len(set(ids))
    for rule in rules:
        assert 1 <= len(rule["name"]) <= 255
        for name in ("shortDescription", "fullDescription"):
            assert 1 <= len(rule[name]["text"]) <= 1_024
        assert rule["help"]["text"]
        assert rule.get("helpUri", "https://").startswith("https://")
        assert len(rule["properties"]["tags"]) <= 10
        assert rule["properties"]["precision"] in ("very-high", "high", "medium", "low")
        assert rule["properties"]["problem.severity"] in ("error", "warning", "recommendation")
    for result in results:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert 1 <= len(result["message"]["text"]) <= 1_024
        assert 1 <= len(result["locations"]) <= 100
        for place in result["locations"]:
            physical = place["physicalLocation"]
            assert physical["region"]["startLine"] >= 1
            assert re.fullmatch(r"(?!/|[a-z]+:|.*\.\./)[!-~]+", physical["artifactLocation"]["uri"])
    assert run["automationDetails"]["id"].startswith("moedoctor/"), "one category for each command"
    assert len(set(marks(run))) == len(results), "equal results are told apart by a number"
    return dict(run)


@pytest.mark.parametrize("path", ["message", "locations", "bogus"])
def test_the_schema_notices_what_is_wrong(path: str) -> None:
    log = json.loads(SarifReporter().render(full_report()))
    (result, _) = log["runs"][0]["results"]
    result.pop("message") if path == "message" else result.update({path: 3})
    with pytest.raises(jsonschema.ValidationError):
        STANDARD.validate(log)


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


def test_an_environment_points_to_the_file_that_chooses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("environment", "requirements.txt"):
        run = by_command(capsys, "check", "--release", "0.19.1", "--sm", "12.0")
        assert {"MD001", "MD011"} <= {result["ruleId"] for result in run["results"]}
        for result in run["results"]:
            assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == place
        (tmp_path / "requirements.txt").write_text("vllm == 0.19.1\n")


def test_kernels_that_a_gpu_cannot_use_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cubin").write_bytes(fake_cubin(90))
    for path in ("kernels/a.cubin", "kernels"):  # the cubins of a folder are judged together
        (result,) = by_command(capsys, "audit", path, "--sm", "12.0")["results"]
        assert result["ruleId"] == "MD004"
        assert result["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": path}


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_every_stored_run_is_valid(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = by_command(capsys, "show", str(file))
    verdicts = [scenario["verdict"] for scenario in json.loads(file.read_text())["scenarios"]]
    assert len(run["results"]) >= sum(verdict in ("found", "failed", "error") for verdict in verdicts)


def test_more_results_than_github_shows_are_cut_worst_first_and_counted() -> None:
    found = [Finding("MD001", "note", "t", "m", "a.py", number + 1) for number in range(25_005)]
    found.append(Finding("MD002", "error", "t", "m", "b.py"))
    run = run_of(to_sarif(Findings("check", found)))
    assert len(run["results"]) == MOST_RESULTS
    assert run["results"][0]["ruleId"] == "MD002"
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"] == "20006 more findings are left out"


def test_more_rules_than_github_takes_are_cut() -> None:
    found = [Finding(f"R{number}", "note", "t", "m", "a.py") for number in range(25_005)]
    assert len(run_of(to_sarif(Findings("check", found)))["tool"]["driver"]["rules"]) == MOST_RESULTS


def test_a_log_is_below_10_megabytes_and_says_what_is_left_out() -> None:
    noise = Random(0)
    found = [
        Finding(f"R{number}", "error", text, text, f"{number}.py")
        for number in range(1_500)
        for text in ["".join(map(chr, noise.choices(range(0x4E00, 0x9FA5), k=1_024)))]
    ]
    text = to_sarif(Findings("check", found))
    assert len(text.encode()) <= MOST_BYTES
    run = run_of(text)
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"] == f"{1_500 - len(run['results'])} more findings are left out"


def test_long_names_and_texts_are_cut() -> None:
    found = [Finding("R" * 300, "error", "t" * 3_000, "m" * 3_000, "a.py", logical="l" * 3_000)]
    titles = {"R" * 300: ("t" * 3_000, "e" * 30_000)}
    run = run_of(to_sarif(Findings("check", found, titles=titles)))
    assert run["results"][0]["message"]["text"].endswith("m…")


@given(st.text(max_size=60), st.text(max_size=3_000))
def test_any_text_is_valid_and_within_the_limits(file: str, text: str) -> None:
    finding = Finding("environment", "warning", text or "t", text or "m", make_relative(file), logical=text)
    run_of(to_sarif(Findings("check", [finding, finding])))


@pytest.mark.parametrize(
    "path", ["/srv/secret/models/a.yaml", "../../secret/a.yaml", "/srv/secret/../x/a.yaml"]
)
def test_no_folder_of_the_machine_is_named(path: str) -> None:
    assert make_relative(path) == "a.yaml"
    hidden = replace(full_report().scenarios[0], file=path)
    assert "secret" not in SarifReporter().render(report(hidden))


def test_hostile_text_stays_data() -> None:
    broken = scenario("error", reason=HOSTILE, title=HOSTILE, id="MD902")
    text = SarifReporter().render(report(broken))
    run_of(text)
    assert "\x1b" not in text


def test_the_fingerprint_is_that_of_the_release_before() -> None:
    """Whoever changes this opens every alert of every user again."""
    finding = find_in_run(full_report()).found[0]
    assert hash_finding(finding) == hash_finding(replace(finding, line=99, message="other", title="other"))
    assert (
        hash_finding(Finding("MD001", "error", "", "", "scenarios/a.yaml", key=("a",)))[:16]
        == "a1b371e02c889bf2"
    )
