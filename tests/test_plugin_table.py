"""The table of the plug-in: what counts as a run in an engine, and that releases and reasons are told."""

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
    asked = "MOEDOCTOR_FIXES=expert_cache,moe MOEDOCTOR_EXPERT_CACHE=8"
    row = {"settings": asked, "failed": None, "wrong": None}
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


def test_reports_that_the_data_names_are_there() -> None:
    for rows in load_evidence().values():
        for row in rows.values():
            assert all((ROOT / "reports" / f"{name}.json").exists() for name in row.reports)
            assert all((ROOT / "reports" / f"{name}.md").exists() for name in row.reports)
