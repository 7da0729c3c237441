"""What other projects put into their CI: the action, the hooks of pre-commit, and the plug-in of pytest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from checkpoints_of_tests import f32, modelopt

from moedoctor.commands import hooks

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = ACTION["runs"]["steps"]
SCHEMA = json.loads((ROOT / "tests" / "schemas" / "github_actions.json").read_text(encoding="utf-8"))
_EXPRESSION = re.compile(r"\$\{\{ ([\w.]+) \}\}")
_CONDITION = re.compile(r"(inputs\.\w+) (==|!=) '(\w*)'")


def test_the_action_is_as_github_describes_actions() -> None:
    jsonschema.validate(ACTION, SCHEMA)
    for step in STEPS:
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@([0-9a-f]{40}|v\d+(\.\d+)*)", step["uses"])


def test_no_input_is_part_of_a_shell_text() -> None:
    for step in STEPS:
        assert "${{" not in step.get("run", ""), f"{step['name']}: an input here is run as code"


def test_the_schema_notices_a_wrong_action() -> None:
    broken = {**ACTION, "runs": {"using": "composite", "steps": [{"run": "true"}]}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


class Runner:
    """Runs the steps of the action as GitHub's runner does: inputs go through expressions in `env`."""

    def __init__(self, folder: Path, **inputs: str) -> None:
        self.folder = folder
        self.values = {
            f"inputs.{name}": str(each.get("default", "")) for name, each in ACTION["inputs"].items()
        }
        self.values |= {f"inputs.{name}": value for name, value in inputs.items()}
        self.values["github.action_path"] = str(ROOT)
        self.files = {name: folder / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        self.shown = ""

    def run(self) -> int:
        """Run every `run:` step whose condition holds; return the exit code of the one that failed, or 0."""
        for step in STEPS:
            if "run" in step and self._holds(step.get("if", "")):
                ended = self._step(step)
                self.shown += ended.stdout + ended.stderr
                if ended.returncode:
                    return ended.returncode
        return 0

    def _holds(self, condition: str) -> bool:
        if not condition:
            return True
        match = _CONDITION.fullmatch(condition)
        assert match is not None, condition
        return (self.values[match[1]] == match[3]) == (match[2] == "==")

    def _step(self, step: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        variables = {
            name: _EXPRESSION.sub(lambda match: self.values.get(match[1], ""), text)
            for name, text in step["env"].items()
        }
        self.files["GITHUB_OUTPUT"].write_text("")
        environ = {**os.environ, **{name: str(file) for name, file in self.files.items()}, **variables}
        shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        ended = subprocess.run(
            shell, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=120
        )
        for line in self.files["GITHUB_OUTPUT"].read_text().splitlines():
            name, _, value = line.partition("=")
            self.values[f"steps.{step.get('id')}.outputs.{name}"] = value
        return ended


def checkpoint(folder: Path) -> None:
    made = modelopt()
    made.tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_2"] = f32(3e-4)
    made.write(folder)


def test_a_damaged_checkpoint_fails_the_action_and_a_hostile_name_runs_nothing(tmp_path: Path) -> None:
    name = '$(touch pwned); "`touch pwned`'
    checkpoint(tmp_path / name)
    runner = Runner(tmp_path, python=sys.executable, install="none", check="false", checkpoint=name)
    assert runner.run() == 1
    assert not (tmp_path / "pwned").exists()
    reports = tmp_path / "moedoctor-reports"
    assert {file.name for file in reports.iterdir()} == {"lint.json", "lint.sarif"}
    assert json.loads((reports / "lint.sarif").read_text())["runs"][0]["results"]
    assert "::error file=" in runner.shown
    assert "MD014" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()


@pytest.mark.slow
def test_check_and_run_write_their_reports(tmp_path: Path) -> None:
    baseline = ROOT / "reports" / "baselines" / "cpu.json"
    runner = Runner(
        tmp_path,
        python=sys.executable,
        install="none",
        release="0.33.0",
        scenarios="MD016\nMD019\n",
        baseline=str(baseline),
    )
    runner.run()
    reports = tmp_path / "moedoctor-reports"
    expected = {f"{name}.{kind}" for name in ("check", "run") for kind in ("json", "sarif")}
    assert {file.name for file in reports.iterdir()} == expected, runner.shown
    assert "MD016" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert runner.values["steps.run.outputs.status"] == "0"


def test_every_hook_of_pre_commit_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios").mkdir()
    good, bad = tmp_path / "scenarios" / "good.yaml", tmp_path / "scenarios" / "bad.yaml"
    good.write_text((ROOT / "scenarios" / "sentinel_ids.yaml").read_text())
    bad.write_text("id: MD016\nsubjects: 3\n")
    checkpoint(tmp_path / "model")
    given = {
        "moedoctor-lint": (["model/config.json", "model/hf_quant_config.json"], 1),
        "moedoctor-scenario": (["scenarios/good.yaml", "scenarios/bad.yaml"], 2),
    }
    declared = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert {hook["id"] for hook in declared} == set(given)
    for hook in declared:
        files, code = given[hook["id"]]
        assert all(re.search(hook["files"], file) for file in files)
        words = hook["entry"].split()
        assert words[:3] == ["python", "-m", "moedoctor.commands.hooks"]
        assert hooks.main([*words[3:], *files]) == code
    assert hooks.main(["scenario", "scenarios/good.yaml"]) == 0
    assert hooks.main(["other"]) == 2


PROVED = "id: MD016\nsubjects: [faulty, fixed]\ntiers: [model]\n"


@pytest.fixture
def scenarios(pytester: pytest.Pytester) -> pytest.Pytester:
    folder = pytester.mkdir("scenarios")
    text = (ROOT / "scenarios" / "sentinel_ids.yaml").read_text(encoding="utf-8")
    (folder / "good.yaml").write_text(text)
    (folder / "not_one.yaml").write_text("a: 1\n")
    return pytester


def plain_pytest(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    installed = any(entry.name == "moedoctor" for entry in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "moedoctor.commands.pytest_plugin"]
    return pytester.runpytest_subprocess(*plugin, *arguments)


def test_without_the_option_nothing_is_collected_and_nothing_of_moedoctor_is_imported(
    scenarios: pytest.Pytester,
) -> None:
    scenarios.makepyfile(
        """
        import sys

        def test_modules():
            ours = {name for name in sys.modules if name.startswith("moedoctor")}
            assert ours <= {"moedoctor", "moedoctor.commands", "moedoctor.commands.pytest_plugin"}, ours
            assert "torch" not in sys.modules
        """
    )
    plain_pytest(scenarios).assert_outcomes(passed=1)


def test_a_scenario_is_a_test_and_a_file_that_is_none_is_an_error(scenarios: pytest.Pytester) -> None:
    result = plain_pytest(scenarios, "--moedoctor", "scenarios", "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*not_one.yaml*"])


def test_a_failing_scenario_shows_its_evidence(scenarios: pytest.Pytester) -> None:
    scenarios.makeconftest(
        """
        import moedoctor.runner.run as module
        from dataclasses import replace
        from moedoctor.results import ScenarioVerdict

        run = module.run

        def broken(*given):
            report = run(*given)
            change = {"verdict": ScenarioVerdict.FAILED, "reason": "broken"}
            failed = [replace(each, **change) for each in report.scenarios]
            return replace(report, scenarios=tuple(failed))

        module.run = broken
        """
    )
    result = plain_pytest(scenarios, "--moedoctor", "scenarios/good.yaml")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["MD016 sentinel_ids is failed: broken", "*moedoctor faulty model*"])
