"""The command line: exit codes, streams, files, and which commands import torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from moedoctor.cli import app, main

PLUGIN = Path(__file__).parent / "plugin"


def moedoctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moedoctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(PLUGIN), **environ},
    )


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return write(tmp_path / "dying.yaml", "")


def write(file: Path, text: str) -> Path:
    file.write_text(f"id: MD901\nname: dying\ntitle: told how to end\ntiers: [model]\n{text}")
    return file


def test_exit_0_and_the_report_on_stdout(scenario: Path) -> None:
    ended = moedoctor("run", str(scenario), "--format", "json")
    report = json.loads(ended.stdout)
    assert (ended.returncode, report["summary"]["exit_code"], report["summary"]["proved"]) == (0, 0, 1)
    assert ended.stderr == ""


def test_table_has_no_colour_away_from_a_terminal_and_ends_with_the_counts(scenario: Path) -> None:
    ended = moedoctor("run", str(scenario))
    assert "\x1b" not in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("1 proved · 0 found")


def test_a_fix_that_fails_gives_exit_code_1(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "parameters: {symptom_fixed: true}\n")
    assert moedoctor("run", str(file)).returncode == 1
    assert moedoctor("run", str(file), "--fail-on", "never").returncode == 0


def test_a_child_that_crashes_gives_exit_code_3(tmp_path: Path) -> None:
    assert moedoctor("run", str(write(tmp_path / "a.yaml", "parameters: {fixed: signal}\n"))).returncode == 3


def test_strict_counts_a_skip_as_found(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "parameters: {fixed: [answers, skip]}\n")
    assert moedoctor("run", str(file)).returncode == 0
    assert moedoctor("run", str(file), "--strict").returncode == 1
    assert moedoctor("run", str(file), "--fail-on", "warning").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "MD0011"], "did you mean MD011?"),
        (["run", "no/such/file.yaml"], "no/such/file.yaml:1:"),
        (["run", "--format", "pdf"], "--format pdf: expected one of"),
        (["run", "--fail-on", "sometimes"], "--fail-on sometimes: expected one of error, warning, never"),
        (
            ["run", "--subject", "vllm-0.19.1"],
            "--subject vllm-0.19.1: expected faulty, fixed, installed, vllm@X.Y.Z or flashinfer@X.Y.Z",
        ),
        (["run", "--only", "experts"], "--only experts: expected KEY=VALUE"),
        (["run", "--only", "experts=7"], "leave no case to run"),
        (["run", "--vllm-kernels", "0.19.1"], "expected X.Y.Z=PATH"),
        (["run", "--vllm-kernels", "0.19.1=/no/such.whl"], "/no/such.whl: no such file"),
        (["run", "--device", "tpu"], "--device tpu: expected auto, cpu or cuda:N"),
        (["run", "--timeout", "0"], "--timeout 0: expected seconds, more than 0"),
        (["run", "--timeout", "soon"], "--timeout soon: expected seconds, more than 0"),
        (["run", "--jobs", "0"], "Invalid value for '--jobs'"),
        (["run", "--tolerance", "a lot"], "a lot"),
        (["run", "--baseline", "/no/such.json"], "/no/such.json:1:"),
        (["run", "-o", "/no/such/folder/report.json"], "its folder does not exist"),
        (["run", "--bogus"], "--bogus"),
        (["explain", "MD0001"], "did you mean MD001?"),
        (["plan", "--model", "x", "--scheme", "int3"], "--scheme int3: expected one of bf16, fp8"),
        (["audit"], "Missing argument"),
        (["compare", "a.json", "b.json"], "a.json:1:"),
        (["compare", "a.json"], "Missing argument"),
        (["frob"], "No such command 'frob'"),
    ],
)
def test_bad_input_is_exit_2_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


TAKES_A_FILE = {
    "run": ["run", "MD001"],
    "check": ["check"],
    "triage": ["triage", "-"],
    "backends": ["backends", "--sm", "9.0"],
    "lint": ["lint", "."],
    "audit": ["audit", "."],
    "plan": ["plan", "--model", "qwen3-30b-a3b"],
    "bench": ["bench", "--cache"],
    "show": ["show", "a.json"],
}


@pytest.mark.parametrize(
    "arguments", [*TAKES_A_FILE.values(), ["list"], ["explain", "MD001"], ["compare", "a.json", "b.json"]]
)
def test_every_command_checks_its_format_and_output_first(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--format", "pdf"]) == 2
    assert "--format pdf: expected one of " in capsys.readouterr().err
    if arguments[0] in TAKES_A_FILE:
        assert main([*arguments, "-o", "/no/such/folder/x.json"]) == 2
        assert capsys.readouterr().err.endswith("its folder does not exist; create it first\n")


def test_the_file_holds_the_whole_report(scenario: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    ended = moedoctor("run", str(scenario), "--format", "json", "-o", str(target))
    assert (ended.returncode, ended.stdout) == (0, "")
    assert json.loads(target.read_text())["summary"]["proved"] == 1
    assert "1 proved" in ended.stderr
    assert [file.name for file in tmp_path.iterdir() if "out" in file.name] == ["out.json"]


def test_a_stored_report_is_shown_in_every_format(scenario: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    moedoctor("run", str(scenario), "--format", "json", "-o", str(target))
    assert json.loads(moedoctor("show", str(target), "--format", "json").stdout) == json.loads(
        target.read_text()
    )
    assert moedoctor("show", str(target)).stdout.splitlines()[-1].startswith("1 proved")
    assert main(["show", str(tmp_path / "none.json")]) == 2


def test_folder_runs_every_file_in_it_once(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yml", "notes.txt"):
        write(tmp_path / name, "")
    ended = moedoctor("run", str(tmp_path), str(tmp_path / "a.yaml"), "--format", "json")
    assert [scenario["file"] for scenario in json.loads(ended.stdout)["scenarios"]] == [
        str(tmp_path / "a.yaml"),
        str(tmp_path / "b.yml"),
    ]


def test_baseline_catches_what_got_worse(tmp_path: Path) -> None:
    file, baseline = tmp_path / "a.yaml", tmp_path / "baseline.json"
    write(file, "")
    assert moedoctor("run", str(file), "--format", "json", "-o", str(baseline)).returncode == 0
    assert moedoctor("run", str(file), "--baseline", str(baseline)).returncode == 0
    write(file, "parameters: {symptom_fixed: true}\n")
    worse = moedoctor("run", str(file), "--baseline", str(baseline), "--format", "json")
    assert worse.returncode == 1
    assert any(
        "proved" in finding and "failed" in finding for finding in json.loads(worse.stdout)["findings"]
    )
    current = tmp_path / "current.json"
    current.write_text(worse.stdout)
    assert moedoctor("compare", str(baseline), str(current)).returncode == 1
    assert moedoctor("compare", str(baseline), str(baseline)).returncode == 0


def test_github_format_writes_the_step_summary(tmp_path: Path) -> None:
    file, summary = write(tmp_path / "a.yaml", "parameters: {symptom_fixed: true}\n"), tmp_path / "summary.md"
    ended = moedoctor("run", str(file), "--format", "github", GITHUB_STEP_SUMMARY=str(summary))
    assert ended.stdout.startswith("::error file=")
    assert "MD901" in summary.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_kills_the_children_and_prints_what_finished(tmp_path: Path, number: signal.Signals) -> None:
    file, hanging = (
        write(tmp_path / "a.yaml", "parameters: {fixed: hang}\ntimeout: 600\n"),
        tmp_path / "hangs",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "moedoctor", "run", str(file), "--format", "json", "-j", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PLUGIN), "HANGING": str(hanging)},
    )
    wait_until = time.monotonic() + 60
    while not hanging.exists() and time.monotonic() < wait_until:
        time.sleep(0.05)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    report = json.loads(stdout)
    assert [case["verdict"] for case in report["scenarios"][0]["cases"]] == ["reproduced", "skipped"]
    assert (report["summary"]["exit_code"], report["summary"]["interrupted"]) == (130, True)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["list"], ["explain", "MD001"], ["run", "--help"], ["--version"]]
)
def test_what_answers_without_torch_does_not_import_it(arguments: list[str]) -> None:
    probe = (
        "import sys\nfrom moedoctor.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, stdout=subprocess.DEVNULL)


def test_list_and_explain_know_the_catalogue() -> None:
    listed = json.loads(moedoctor("list", "--format", "json").stdout)["catalogue"]
    assert {"id": "MD001", "name": "nan_routing"}.items() <= listed[0].items()
    explained = moedoctor("explain", "nan-routing").stdout
    for heading in ("What happens", "Who is affected", "Fix", "Claims", "Links"):
        assert f"\n{heading}" in explained


def test_the_help_names_the_type_of_every_value() -> None:
    """Without a metavar of ours the help would show the name of a Python type."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    unnamed = [
        f"{name} {option.opts[-1]}"
        for name, command in commands.items()
        for option in command.params
        if option.param_type_name == "option" and not option.is_flag and option.metavar is None
    ]
    assert unnamed == []
