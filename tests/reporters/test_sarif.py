"""SARIF of every command that has it, against the standard's schema and the limits of code scanning."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from checkpoints_of_tests import damaged
from cuda_fakes import fake_cubin
from hypothesis import given
from hypothesis import strategies as st
from report_readers import list_fingerprints, read_sarif
from report_samples import case, full_report, report, scenario

from moedoctor.cli import main
from moedoctor.reporters import sarif
from moedoctor.reporters.findings import Finding, Findings, find_in_run, make_relative
from moedoctor.reporters.sarif import MOST_BYTES, MOST_RESULTS, SarifReporter, hash_finding, to_sarif


def by_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--format", "sarif"])
    return read_sarif(capsys.readouterr().out)


def test_a_run_has_its_failing_scenarios_and_regressions_with_help_from_the_entries() -> None:
    run = read_sarif(SarifReporter().render(full_report()))
    first, regression = run["results"]
    assert (first["ruleId"], first["level"]) == ("MD001", "error")
    assert first["locations"][0]["physicalLocation"]["region"] == {"startLine": 3}
    assert "worse than the baseline" in regression["message"]["text"]
    (rule,) = run["tool"]["driver"]["rules"]
    assert "## Fix" in rule["help"]["markdown"]
    assert rule["helpUri"].startswith("https://github.com/")


def test_a_run_without_a_failure_has_no_result() -> None:
    good = report(scenario("proved", case("faulty", "reproduced")), scenario("skipped"))
    assert read_sarif(SarifReporter().render(good))["results"] == []


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
    assert list_fingerprints(read_sarif(texts[0])) == list_fingerprints(read_sarif(texts[1]))
    renamed = tuple(replace(each, name="other") for each in before.scenarios)
    assert list_fingerprints(read_sarif(texts[0])) != list_fingerprints(
        read_sarif(SarifReporter().render(replace(before, scenarios=renamed, findings=worse)))
    )


def test_a_checkpoint_names_its_file_and_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    damaged().write(tmp_path / "model")
    run = by_command(capsys, "lint", "model")
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    uris = {place["artifactLocation"]["uri"] for place in places}
    assert uris
    assert all(uri.startswith("model/") for uri in uris)
    assert any(result["ruleId"].startswith("MD0") for result in run["results"])
    first = list_fingerprints(run)
    config = tmp_path / "model" / "config.json"
    config.write_text("\n\n\n" + config.read_text())
    assert list_fingerprints(by_command(capsys, "lint", "model")) == first


def test_a_log_names_its_line(tmp_path, monkeypatch, capsys):
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
    assert list_fingerprints(again) == list_fingerprints(run)


def test_kernels_that_a_gpu_cannot_use_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cubin").write_bytes(fake_cubin(90))
    for path in ("kernels/a.cubin", "kernels"):  # the cubins of a folder are judged together
        (result,) = by_command(capsys, "audit", path, "--sm", "12.0")["results"]
        assert result["ruleId"] == "MD004"
        assert result["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": path}


def test_more_results_than_github_shows_are_cut_worst_first_and_counted(monkeypatch):
    assert MOST_RESULTS == 5_000
    monkeypatch.setattr(sarif, "MOST_RESULTS", 50)
    found = [Finding("MD001", "note", "t", "m", "a.py", number + 1) for number in range(255)]
    found.append(Finding("MD002", "error", "t", "m", "b.py"))
    run = read_sarif(to_sarif(Findings("check", found)))
    assert len(run["results"]) == 50
    assert run["results"][0]["ruleId"] == "MD002"
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"] == "206 more findings are left out"


def test_a_log_is_below_its_limit_and_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_BYTES <= 10_000_000
    monkeypatch.setattr(sarif, "MOST_BYTES", MOST_BYTES // 10)
    noise = Random(0)
    found = [
        Finding(f"R{number}", "error", text, text, f"{number}.py")
        for number in range(150)
        for text in ["".join(map(chr, noise.choices(range(0x4E00, 0x9FA5), k=1_024)))]
    ]
    text = to_sarif(Findings("check", found))
    assert len(text.encode()) <= MOST_BYTES // 10
    run = read_sarif(text)
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"] == f"{150 - len(run['results'])} more findings are left out"


def test_long_names_and_texts_are_cut() -> None:
    found = [Finding("R" * 300, "error", "t" * 3_000, "m" * 3_000, "a.py", logical="l" * 3_000)]
    titles = {"R" * 300: ("t" * 3_000, "e" * 30_000)}
    run = read_sarif(to_sarif(Findings("check", found, titles=titles)))
    assert run["results"][0]["message"]["text"].endswith("m…")


@given(st.text(max_size=60), st.text(max_size=3_000))
def test_any_text_is_valid_and_within_the_limits(file: str, text: str) -> None:
    finding = Finding("environment", "warning", text or "t", text or "m", make_relative(file), logical=text)
    read_sarif(to_sarif(Findings("check", [finding, finding])))


@pytest.mark.parametrize(
    "path", ["/srv/secret/models/a.yaml", "../../secret/a.yaml", "/srv/secret/../x/a.yaml"]
)
def test_no_folder_of_the_machine_is_named(path: str) -> None:
    assert make_relative(path) == "a.yaml"
    hidden = replace(full_report().scenarios[0], file=path)
    assert "secret" not in SarifReporter().render(report(hidden))


def test_the_fingerprint_is_that_of_the_release_before() -> None:
    """Whoever changes this opens every alert of every user again."""
    finding = find_in_run(full_report()).found[0]
    assert hash_finding(finding) == hash_finding(replace(finding, line=99, message="other", title="other"))
    finding = Finding("MD001", "error", "", "", "scenarios/a.yaml", key=("a",))
    assert hash_finding(finding)[:16] == "a1b371e02c889bf2"
