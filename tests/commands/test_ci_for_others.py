"""The parts for other projects' CI: the action, the hooks of pre-commit, and the plug-in of pytest."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml
from checkpoints_of_tests import damaged
from every_command import explain_refusal
from processes_seen import run

from moedoctor.commands import hooks

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = ACTION["runs"]["steps"]
SCHEMA = json.loads((ROOT / "tests" / "schemas" / "github_actions.json").read_text(encoding="utf-8"))
_EXPRESSION = re.compile(r"\$\{\{ ([\w.-]+) \}\}")
_CONDITION = re.compile(r"(inputs\.\w+) (==|!=) '(\w*)'")


def test_the_action_is_as_github_describes_actions() -> None:
    jsonschema.validate(ACTION, SCHEMA)
    for step in STEPS:
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", step["uses"]), "a tag can be moved"


def test_no_input_is_part_of_a_shell_text() -> None:
    for step in STEPS:
        assert "${{" not in step.get("run", ""), f"{step['name']}: an input here is run as code"


class Runner:
    """Runs the steps of the action as GitHub's runner does: inputs go through expressions in `env`."""

    def __init__(self, folder: Path, **inputs: str) -> None:
        self.folder = folder
        self.values = {f"inputs.{key}": str(row.get("default", "")) for key, row in ACTION["inputs"].items()}
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
        env = {**os.environ, **{name: str(file) for name, file in self.files.items()}, **variables}
        shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        ended = run(shell, cwd=self.folder, env=env)
        for line in self.files["GITHUB_OUTPUT"].read_text().splitlines():
            name, _, value = line.partition("=")
            self.values[f"steps.{step.get('id')}.outputs.{name}"] = value
        return ended


@pytest.mark.slow
def test_a_damaged_checkpoint_fails_the_action(tmp_path: Path) -> None:
    damaged().write(tmp_path / "a model")
    runner = Runner(tmp_path, python=sys.executable, install="none", check="false", checkpoint="a model")
    assert runner.run() == 1
    reports = tmp_path / "moedoctor-reports"
    assert {file.name for file in reports.iterdir()} == {"lint.json", "lint.sarif"}
    assert json.loads((reports / "lint.sarif").read_text())["runs"][0]["results"]
    assert "::error file=" in runner.shown
    assert "MD014" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()


RECORDER = r"""#!/usr/bin/env bash
# A Python that keeps the words of each call in a file of its own, writes a report of one letter, and fails
# unless it is to show one.
if [[ $1 == -c ]]; then exec PYTHON "$@"; fi
printf '%s\0' "$@" > "$(mktemp "CALLS/XXXXXX")"
code=$([[ $3 == show ]] && echo 0 || echo 2)
while (($#)); do
    if [[ $1 == --output ]]; then printf x > "$2"; fi
    shift
done
exit "$code"
"""


class Recorder:
    """A Python in whose place the action runs a script, and the words of each call of it."""

    def __init__(self, folder: Path) -> None:
        self.calls, self.path = folder / "calls", folder / "python"
        self.calls.mkdir()
        self.path.write_text(RECORDER.replace("PYTHON", sys.executable).replace("CALLS", str(self.calls)))
        self.path.chmod(0o755)

    def list_calls(self, command: str) -> list[list[str]]:
        """Return the words of the calls of this command of moedoctor."""
        calls = (file.read_text().split("\0")[:-1] for file in self.calls.iterdir())
        return [words[3:] for words in calls if words[:3] == ["-m", "moedoctor", command]]


def test_the_action_asks_each_release_about_the_words_of_a_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "vllm serve 'my model'\n  --tensor-parallel-size 2"
    asked = {"preflight": command, "vllm": "0.33.0\n0.30.0\n", "sm": "9.0", "fail-on": "cannot-say"}
    recorder = Recorder(tmp_path)
    runner = Runner(tmp_path, python=str(recorder.path), install="none", check="false", **asked)
    assert runner.run() == 2
    (words,) = recorder.list_calls("preflight")
    assert words == [
        *("--fail-on=cannot-say", "--wheel=0.33.0", "--releases=0.30.0", "--sm=9.0", "--format", "json"),
        *("--output", "moedoctor-reports/preflight.json", "--", "vllm", "serve", "my model"),
        *("--tensor-parallel-size", "2"),
    ]
    assert explain_refusal(["preflight", *words]) is None
    asked = {"scenarios": "MD016\nMD019\n", "baseline": "base line.json"}
    assert Runner(tmp_path, python=str(recorder.path), install="none", check="false", **asked).run() == 2
    (words,) = recorder.list_calls("run")
    assert words[:1] == ["--baseline=base line.json"]
    assert words[-3:] == ["--", "MD016", "MD019"]
    assert explain_refusal(["run", *words]) is None


ORDER = "touch pwned; $(touch pwned) `touch pwned`\ntouch pwned\n::error::$IFS*"
HOSTILE = ["-x$(touch pwned)`touch pwned`", f"-x;{ORDER}", f"-x ';{ORDER}", f'-x ";{ORDER}']
VALUES = ("output", "release", "sm", "checkpoint", "preflight", "vllm", "fail-on", "scenarios", "baseline")


@pytest.mark.parametrize("text", HOSTILE, ids=["substitution", "lines", "quotes", "double quotes"])
def test_a_hostile_input_runs_nothing(tmp_path: Path, text: str) -> None:
    recorder = Recorder(tmp_path)
    runner = Runner(tmp_path, python=str(recorder.path), install="none", **dict.fromkeys(VALUES, text))
    assert runner.run() == 2
    assert not list(tmp_path.rglob("*pwned"))
    assert f"--release={text}" in recorder.list_calls("check")[0]
    assert recorder.list_calls("lint")[0][-2:] == ["--", text]
    assert f"--fail-on={text}" in recorder.list_calls("preflight")[0]
    assert f"--baseline={text}" in recorder.list_calls("run")[0]
    assert len(recorder.list_calls("show")) == 2 * 4
    runner.values |= {f"inputs.{name}": text for name in ("check", "sarif")}
    assert runner.run() == 2
    runner.values["inputs.install"] = text
    assert runner.run() == 2
    runner.values["inputs.python"] = text
    assert runner.run() == 127
    assert not list(tmp_path.rglob("*pwned"))


@pytest.mark.slow
def test_the_action_installs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the defaults, from the action's own folder; what it needs is there."""
    source = tmp_path / "action"
    source.mkdir()
    for name in ("moedoctor", "scenarios", "reports"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "setup.py"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]  # pip and what moedoctor needs
    (site / "others.pth").write_text("\n".join(others))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's word for: build with what is there
    damaged().write(tmp_path / "model")
    inputs = {"python": str(tmp_path / "venv" / "bin" / "python"), "checkpoint": "model"}
    runner = Runner(tmp_path, release="0.33.0", sm="12.0", **inputs)
    runner.values["github.action_path"] = str(source)
    assert runner.run() == 1, runner.shown
    reports = {file.name for file in (tmp_path / "moedoctor-reports").iterdir()}
    assert reports == {f"{name}.{kind}" for name in ("check", "lint") for kind in ("json", "sarif")}


def test_a_folder_without_weights_is_named_and_not_passed_in_silence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "config.json").write_text("{}")
    assert hooks.main(["lint", "app/config.json"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "moedoctor: app: not looked at: it has no safetensors files\n")
    declared = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    (lint,) = [hook for hook in declared if hook["id"] == "moedoctor-lint"]
    assert lint["verbose"] is True  # else pre-commit shows nothing of a hook that passes
    assert lint["require_serial"] is True  # else two processes lint the folder of two files


def test_a_hook_lints_a_folder_once_and_takes_options(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    damaged().write(tmp_path / "model")
    files = ["model/config.json", "model/hf_quant_config.json"]
    assert hooks.main(["lint", "--ignore=MD014=known", *files]) == 0
    assert capsys.readouterr().out.count("known") == 1
    assert hooks.main(["lint", "--fail-on=never", *files]) == 0
    assert hooks.main(["lint", "--fail-on=error", *files]) == 1


def test_every_hook_of_pre_commit_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios").mkdir()
    good, bad = tmp_path / "scenarios" / "good.yaml", tmp_path / "scenarios" / "bad.yaml"
    good.write_text((ROOT / "scenarios" / "sentinel_ids.yaml").read_text())
    bad.write_text("id: MD016\nsubjects: 3\n")
    damaged().write(tmp_path / "model")
    given = {
        "moedoctor-lint": (["model/config.json", "model/hf_quant_config.json"], 1),
        "moedoctor-preflight": (["--sm=9.0", "--wheel=nowhere.whl", "model.headers.zip"], 2),
        "moedoctor-scenario": (["scenarios/good.yaml", "scenarios/bad.yaml"], 2),
    }
    declared = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert {hook["id"] for hook in declared} == set(given)
    for hook in declared:
        files, code = given[hook["id"]]
        assert all(re.search(hook["files"], file) for file in files if not file.startswith("--"))
        words = hook["entry"].split()
        assert words[:3] == ["python", "-m", "moedoctor.commands.hooks"]
        assert hooks.main([*words[3:], *files]) == code
    assert hooks.main(["scenario", "scenarios/good.yaml"]) == 0
    assert hooks.main(["other"]) == 2


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    installed = any(entry.name == "moedoctor" for entry in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "moedoctor.commands.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *arguments]
    (folder / "torch.py").write_text("raise ModuleNotFoundError('left out: it takes seconds')")
    places = (folder, ROOT / "tests" / "dying_plugin", ROOT, os.environ.get("PYTHONPATH", ""))
    search = os.pathsep.join(map(str, places))
    return run(command, cwd=folder, env={**os.environ, "PYTHONPATH": search})


def test_without_the_option_nothing_is_collected_and_nothing_of_moedoctor_is_imported(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    (tmp_path / "test_modules.py").write_text(
        """
import sys

def test_modules():
    ours = {name for name in sys.modules if name.startswith("moedoctor")}
    assert ours <= {"moedoctor", "moedoctor.commands", "moedoctor.commands.pytest_plugin"}, ours
    assert "torch" not in sys.modules
"""
    )
    ended = run_pytest(tmp_path)
    assert "1 passed in" in ended.stdout, ended.stdout


SCENARIO = "id: MD901\ntiers: [model]\n"
BREAK_ONE = """
import moedoctor.runner.run as module
from dataclasses import replace
from moedoctor.results import ScenarioVerdict

run = module.run

def break_one(*given):
    report = run(*given)
    change = {"verdict": ScenarioVerdict.FAILED, "reason": "broken"}
    changed = [replace(each, **change) if "bad" in each.file else each for each in report.scenarios]
    return replace(report, scenarios=tuple(changed))

module.run = break_one
"""


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, ElementTree.Element]]:
    """Run pytest once on a folder of scenarios and a file that is none: its output, and name -> test."""
    folder = tmp_path_factory.mktemp("scenarios")
    (folder / "conftest.py").write_text(BREAK_ONE)
    inside = {
        "good": SCENARIO,
        "bad": f"{SCENARIO}subjects: [faulty]\n",
        "absent": "id: MD013\nname: offload_noop\nsubjects: [installed]\n",
        "wrong": "id: MD016\nsubjects: 3\n",
        "docker_compose": "services: {}",
    }
    (folder / "below").mkdir()
    for name, text in inside.items():
        (folder / "below" / f"{name}.yaml").write_text(text)
    (folder / "named.yaml").write_text("services: {}")
    more = ("--continue-on-collection-errors", "-rs", "--junitxml", "junit.xml")
    ended = run_pytest(folder, "--moedoctor", "below", "named.yaml", *more)
    tests = ElementTree.parse(folder / "junit.xml").iter("testcase")
    return ended.stdout, {f"{test.get('classname')} {test.get('name')}": test for test in tests}


def find_test(tests: dict[str, ElementTree.Element], part: str) -> ElementTree.Element:
    (found,) = (test for name, test in tests.items() if part in name)
    return found


def test_a_scenario_is_a_test_and_its_evidence_is_in_junit(scenarios: Any) -> None:
    output, tests = scenarios
    assert "1 failed, 1 passed, 1 skipped, 2 errors" in output, output
    case = find_test(tests, "good")
    properties = {each.get("name"): each.get("value") for each in case.iter("property")}
    assert properties["moedoctor verdict"] == "proved"
    figures = [value for name, value in properties.items() if "faulty model" in str(name)]
    assert figures
    assert all('"symptom": true' in str(value) for value in figures)


def test_what_is_no_scenario_is_an_error_where_it_is_named_or_looks_like_one(scenarios: Any) -> None:
    output, tests = scenarios
    assert find_test(tests, "wrong").find("error") is not None
    assert find_test(tests, "named").find("error") is not None
    assert "docker_compose" not in output


def test_a_scenario_that_cannot_run_here_is_skipped_with_the_reason(scenarios: Any) -> None:
    assert re.search(r"SKIPPED.*absent\.yaml.*: \S", scenarios[0])


def test_a_failing_scenario_shows_its_evidence(scenarios: Any) -> None:
    assert re.search(r"MD901 dying is failed: broken.*moedoctor faulty model", scenarios[0], re.DOTALL)
