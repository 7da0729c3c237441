"""The table of the plug-in: what counts as a run in an engine, and that releases and reasons are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts_of_tests import load_script

from moedoctor.plugin.extensions import load_evidence

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_script("plugin_table", monkeypatch)


def report(**changes: Any) -> dict[str, Any]:
    """A stored report in which an engine ran with the fix `offload`, and engines with the trace `nan`."""
    case = {"tier": "engine", "verdict": "clean", "evidence": {"fixes": "offload (weights are copied)"}}
    claim = {"verdict": "refuted", "evidence": {"rows": [{"error": "load: killed"}, {"steps": 3}]}}
    scenario = {"file": "scenarios/engine/nan_padding.yaml", "cases": [case], "claims": [claim]}
    environment = {"vllm": "0.33.0", "gpu": "NVIDIA H200"}
    return {"command": "run", "environment": environment, "scenarios": [{**scenario, **changes}]}


def test_only_engines_that_ran_count(script: Any) -> None:
    ran_with = script.ran_with
    assert ran_with(report()) == {"offload", "nan"}
    assert ran_with({**report(), "environment": {"vllm": "0.33.0", "gpu": None}}) == set()
    row = {
        "settings": "MOEDOCTOR_FIXES=expert_cache,moe MOEDOCTOR_EXPERT_CACHE=8",
        "failed": None,
        "wrong": None,
    }
    bench = {**report(), "command": "bench", "bench": {"engines": {"engines": [row]}}}
    assert ran_with(bench) == {"expert_cache", "moe"}
    assert ran_with({**bench, "bench": {"engines": {"engines": [{**row, "failed": "stopped"}]}}}) == set()
    assert ran_with({**bench, "bench": {"backends": {}}}) == set()
    failed = {"verdict": "refuted", "evidence": {"rows": [{"error": "load: killed"}]}}
    untested = {"verdict": "untested", "evidence": {"rows": [{"steps": 3}]}}
    assert ran_with(report(claims=[failed, untested])) == {"offload"}
    assert ran_with(report(file="scenarios/engine/own_model.yaml")) == {"offload"}
    crashed = {"tier": "engine", "verdict": "reproduced", "evidence": {"fixes": "offload (copies)"}}
    other = {"tier": "engine", "verdict": "clean", "evidence": {"fixes": "none"}}
    assert ran_with(report(cases=[crashed, other])) == {"nan"}


def test_layers_that_moe_computed_count_whatever_became_of_engines_beside(script: Any) -> None:
    ours = {"outcome": "same tokens", "layers_by_moedoctor": 2}
    other = {"outcome": "crash", "layers_by_moedoctor": None}

    def ran(*rows: dict[str, Any]) -> set[str]:
        claim = {"verdict": "untested", "evidence": {"rows": list(rows)}}
        found: set[str] = script.ran_with(report(cases=[], claims=[claim]))
        return found

    assert ran(ours, other) == {"moe"}
    assert ran(other, {**ours, "layers_by_moedoctor": 0}, {**ours, "outcome": "other tokens"}) == set()


def test_a_call_that_an_engine_recorded_counts_where_it_was_replayed(script: Any) -> None:
    record = {"packages": {"vllm": "0.33.0"}, "environment": {"MOEDOCTOR_RECORD": "…/calls"}}
    replayed = {**report(), "command": "replay", "capsule": {"record": record}}
    assert script.ran_with(replayed) == {"record"}
    elsewhere = {**replayed, "environment": {"vllm": "0.21.0", "gpu": "NVIDIA H200"}}
    assert script.ran_with(elsewhere) == set()
    of_a_model = {**replayed, "capsule": {"record": {**record, "environment": {}}}}
    assert script.ran_with(of_a_model) == set()


def test_a_new_report_changes_the_table(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a-gpu"
    folder.mkdir()
    (folder / "new.json").write_text(json.dumps(report()))
    monkeypatch.setattr(script, "REPORTS", tmp_path)
    known = script.evidence()
    assert known["0.33.0"]["offload"] == {"basis": "ran in an engine", "reports": ["a-gpu/new"]}
    assert known["0.30.0"]["offload"] == {"basis": "source checked"}
    table = script.table(known)
    assert "ran in an engine ([report](../reports/a-gpu/new.md))" in table
    assert "| 0.17.1 to 0.19.1 |" in table, "releases that are alike share a row"
    assert "- `routing` is not needed in 0.20.0 to 0.33.0: 0.20.0 and later" in table
    assert "- `expert_cache` is refused in 0.17.1 to 0.20.2, 0.22.0 to 0.27.0: " in table


def test_a_scenario_says_itself_what_its_engines_start(script: Any) -> None:
    assert script.started_by("nan_padding_dp.yaml") == {"nan"}
    assert script.started_by("own_model.yaml") == script.started_by("") == set()


def test_reports_that_the_data_names_are_there() -> None:
    for rows in load_evidence().values():
        for row in rows.values():
            assert all((ROOT / "reports" / f"{name}.json").exists() for name in row.reports)
            assert all((ROOT / "reports" / f"{name}.md").exists() for name in row.reports)
