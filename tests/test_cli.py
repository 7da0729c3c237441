"""The command line: exit codes, streams and files."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from hostile import TEXTS, echoes_too_much, problem

from moedoctor.cli import app, main
from moedoctor.reporters.output import show_progress

pytestmark = pytest.mark.usefixtures("dying_plugin", "server_without_torch")
Run = Callable[..., tuple[int, str, str]]
TESTS = Path(__file__).resolve().parent
PATHS = (str(TESTS / "dying_plugin"), str(TESTS.parent))


@pytest.fixture
def moedoctor(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs the command line and returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


def write(folder: Path, text: str = "", name: str = "a.yaml") -> str:
    file = folder / name
    file.write_text(f"id: MD901\nname: dying\ntitle: told how to end\ntiers: [model]\n{text}")
    return str(file)


SKIP = "parameters: {fixed: [answers, skip]}\n"
FAILS = "parameters: {symptom_fixed: true}\n"


@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        ("", (), 0),
        (FAILS, (), 1),
        (FAILS, ("--fail-on", "never"), 0),
        ("parameters: {fixed: signal}\n", (), 1),  # an error, but of another project
        (SKIP, ("--strict",), 1),
    ],
)
def test_exit_code_of_a_run(tmp_path, moedoctor, text, options, code):
    ended, out, err = moedoctor("run", write(tmp_path, text), "--format", "json", *options)
    summary = json.loads(out)["summary"]
    assert (ended, summary["exit_code"], bool(summary["reasons"])) == (code, code, code != 0)
    assert err == "".join(f"moedoctor: exit code {code}: {reason}\n" for reason in summary["reasons"])


@pytest.mark.parametrize(
    "line",
    [
        "{}", "--{}", "run MD001 --subject {}", "run MD001 --device {}x", "explain {}", "plan --model {}",
        "show {}",
    ],
)  # fmt: skip
def test_no_argument_reaches_the_terminal_raw_or_in_full(line, capsys):
    for text in filter(None, TEXTS):
        assert main([part.replace("{}", text) for part in line.split(" ")]) == 2
        printed = capsys.readouterr()
        assert not problem(printed.err)
        assert not echoes_too_much(printed.err, text)
        assert len(printed.err.splitlines()) == 1


def test_an_error_of_ours_is_shown_without_what_a_terminal_acts_on(monkeypatch, capsys):
    error = RuntimeError("\x1b]0;t\x07\n::error::x\n##[error]\x9b")
    monkeypatch.setattr("moedoctor.entries.find_entry", Mock(side_effect=error))
    assert main(["explain", "MD001"]) == 3
    printed = capsys.readouterr().err
    assert "RuntimeError" in printed
    assert not problem(printed)


def test_a_scenario_whose_name_is_markup_does_not_break_the_progress_bar(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", terminal)
    with show_progress() as progress:
        progress(0, 1, "[/] [red]x[/red] \x1b]0;title\x07\n::error")
    assert "]0;" not in terminal.getvalue()


TAKES_A_FILE = {
    "run": ["run", "MD001"], "check": ["check"], "triage": ["triage", "-"],
    "backends": ["backends", "--sm", "9.0"], "lint": ["lint", "."], "audit": ["audit", "."],
    "plan": ["plan", "--model", "qwen3-30b-a3b"], "bench": ["bench", "--cache"], "show": ["show", "a.json"],
}  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [*TAKES_A_FILE.values(), ["list"], ["explain", "MD001"], ["compare", "a.json", "b.json"]]
)
def test_every_command_checks_its_format_and_output_first(arguments, capsys):
    assert main([*arguments, "--format", "pdf"]) == 2
    assert "--format pdf: expected one of " in capsys.readouterr().err
    if arguments[0] in TAKES_A_FILE:
        assert main([*arguments, "-o", "/no/such/folder/x.json"]) == 2
        assert capsys.readouterr().err.endswith("its folder does not exist; create it first\n")


def test_a_folder_runs_every_file_in_it_once(tmp_path: Path, moedoctor: Run) -> None:
    first, second, _ = (write(tmp_path, name=name) for name in ("a.yaml", "b.yml", "notes.txt"))
    _, out, _ = moedoctor("run", str(tmp_path), first, "--format", "json")
    assert [scenario["file"] for scenario in json.loads(out)["scenarios"]] == [first, second]


def test_baseline_catches_what_got_worse(tmp_path: Path, moedoctor: Run) -> None:
    file, baseline, current = write(tmp_path), str(tmp_path / "before.json"), str(tmp_path / "now.json")
    assert moedoctor("run", file, "--format", "json", "-o", baseline)[0] == 0
    assert moedoctor("run", file, "--baseline", baseline)[0] == 0
    write(tmp_path, FAILS)
    assert moedoctor("run", file, "--baseline", baseline, "--format", "json", "-o", current)[0] == 1
    findings = json.loads(Path(current).read_text())["findings"]
    assert any("proved" in finding and "failed" in finding for finding in findings)
    code, out, err = moedoctor("compare", baseline, current)
    assert code == 1
    assert "exit code 1: worse than the baseline: " in err
    assert out.splitlines()[-1] == "Next: `moedoctor explain MD901` says what it is"
    _, out, _ = moedoctor("compare", baseline, current, "--format", "json")
    assert json.loads(out)["summary"]["reasons"]
    code, out, err = moedoctor("compare", baseline, baseline)
    assert (code, out.splitlines()[-1], err) == (0, "Next: nothing changed; keep the baseline", "")


def test_a_terminal_that_shows_the_reasons_gets_them_once(tmp_path, moedoctor, monkeypatch):
    file, baseline, other = write(tmp_path), str(tmp_path / "before.json"), str(tmp_path / "out.txt")
    moedoctor("run", file, "--format", "json", "-o", baseline)
    write(tmp_path, FAILS)
    arguments = ("run", file, "--baseline", baseline)
    _, _, piped = moedoctor(*arguments)
    assert "exit code 1: worse than the baseline: MD901" in piped
    assert "exit code 1: MD901 dying: " in piped
    columns = lambda path: (False, 80 if path is None else None)  # noqa: E731
    monkeypatch.setattr("moedoctor.reporters.output.inspect_terminal", columns)
    code, out, err = moedoctor(*arguments)
    assert (code, err) == (1, "")
    assert "exit code 1: MD901 dying: " in out
    assert moedoctor(*arguments, "-o", other)[2].endswith(piped)


def test_github_format_writes_the_step_summary(tmp_path, moedoctor, monkeypatch):
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert moedoctor("run", write(tmp_path, FAILS), "--format", "github")[1].startswith("::error file=")
    assert "MD901" in summary.read_text()


COMMANDS: list[tuple[str, Any]] = [("moedoctor", typer.main.get_command(app))]
for _name, _group in COMMANDS:  # which grows by the commands of each group
    COMMANDS += [(f"{_name} {word}", each) for word, each in getattr(_group, "commands", {}).items()]


def test_commands_and_options_are_those_of_the_list() -> None:
    for (name, command), line in zip(COMMANDS, (TESTS / "options.txt").read_text().splitlines(), strict=True):
        words = [opt for each in command.params for opt in each.opts + each.secondary_opts if opt[0] == "-"]
        assert " ".join([f"{name}:", *words]) == line


def test_every_command_that_prints_can_write_to_a_file_instead() -> None:
    without = [name for name, each in COMMANDS if not any("--output" in opt.opts for opt in each.params)]
    assert without[2:] == ["moedoctor capsule copy"]  # which writes the file that it names; groups are first


def test_no_value_has_the_name_of_its_option() -> None:
    """Typer 0.27 would name the option like its value, in capitals."""
    options = [(command.name, option) for _, command in COMMANDS for option in command.params]
    named = [(command, option) for command, option in options if option.metavar == option.name.upper()]
    assert not [each for each in named if len(each[1].opts) == 1 and each[1].opts[0].startswith("--")]


def test_a_signal_kills_the_children_and_prints_what_finished(tmp_path: Path) -> None:
    """And a run that was cut short proves nothing, though its control and its fix answered as they should."""
    text = "subjects: [faulty, fixed, third]\nparameters: {third: hang}\ntimeout: 600\n"
    file, hanging = write(tmp_path, text), tmp_path / "hangs"
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('left out: it takes seconds')")
    process = subprocess.Popen(
        [sys.executable, "-m", "moedoctor", "run", file, "--format", "json", "-j", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *PATHS)), "HANGING": str(hanging)},
    )
    wait_until = time.monotonic() + 60
    while not hanging.exists() and time.monotonic() < wait_until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT, stderr
    report = json.loads(stdout)
    (scenario,) = report["scenarios"]
    assert [case["verdict"] for case in scenario["cases"]] == ["reproduced", "clean", "skipped"]
    assert scenario["cases"][2]["reason"] == "interrupted before it finished"
    assert scenario["verdict"] == "skipped"
    assert scenario["reason"] == "interrupted before every case had run"
    assert (report["summary"]["exit_code"], report["summary"]["interrupted"]) == (128 + signal.SIGINT, True)
