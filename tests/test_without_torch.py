"""Without torch: what answers, and the line that the rest prints."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from processes_seen import run
from typer.main import get_command

from moedoctor.cli import app, main
from moedoctor.text import explain_missing_torch
from tests.capsules import make_capsule
from tests.checkpoints_of_tests import f32, modelopt

ROOT = Path(__file__).resolve().parent.parent
NEEDS_TORCH = explain_missing_torch("No module named 'torch'") or "?"
BASELINE = str(ROOT / "reports" / "nvidia-h200" / "sentinel_ids.json")
TRACE = str(ROOT / "reports" / "traces" / "small_moe_decode.safetensors")
BENCH = str(ROOT / "reports" / "nvidia-h200-vllm-0.33.0" / "moe_backends.json")

# Command -> its arguments and exit code. `check` finds no vLLM in this Python: 2, with a report on stdout.
ANSWERS: Mapping[str, tuple[str, int]] = {
    "check": ("--release 0.33.0 --sm 12.0", 0),
    "triage": ("server.log", 1),
    "explain": ("MD001", 0),
    "list": ("", 0),
    "backends": ("--sm 12.0 --release 0.33.0 -- vllm serve MODEL --moe-backend marlin", 0),
    "lint": ("checkpoint", 0),
    "audit": ("checkpoint", 0),
    "autopsy": ("server.log", 0),
    "plan": ("--model qwen3-30b-a3b --gpu-memory 80", 0),
    "compare": (f"{BASELINE} {BASELINE}", 0),
    "show": (BASELINE, 0),
    "schema": ("run", 0),
    "fleet": ("check --from-reports nodes", 0),
}
# Commands that compute need torch for some or all of what they do.
NEED_TORCH: Mapping[str, str] = {
    "run": "MD001",
    "bench": "--backend REFERENCE",
    "conform": "moedoctor.fixes.routing:topk_softmax",
    "record": "-- true",
    "replay": "call.moecapsule",
    "capsule": "show call.moecapsule",
}
FIX = "lint damaged --fix repaired"
ALSO_ANSWER = (
    f"show {BENCH} --format html -o show.html",
    "run MD009",
    f"bench --cache --trace {TRACE} --capacity 8",
    "bench --cache --trace zipf:experts=16,top_k=2,layers=2,rows=64,streams=4 --capacity 8",
    "lint checkpoint --fix copy",
    "--help",
    "--version",
    "run --help",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands read."""
    from moedoctor.trace.capsule import save

    folder = tmp_path_factory.mktemp("place")
    (folder / "server.log").write_text("RuntimeError: b_scales is not on GPU\n")
    modelopt().write(folder / "checkpoint")
    damaged = modelopt()
    damaged.tensors["model.layers.0.mlp.experts.0.up_proj.input_scale"] = f32(0.0)
    damaged.write(folder / "damaged")
    save(make_capsule("nvfp4"), folder / "call.moecapsule")
    (folder / "nodes").mkdir()
    assert main(["check", "--release", "0.33.0", "-o", str(folder / "nodes" / "a.json")]) in (0, 1)
    (folder / "nodes" / "b.json").write_text((folder / "nodes" / "a.json").read_text())
    return folder


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Variables under which torch, Triton, numpy, vLLM and FlashInfer are not there, for children too."""
    folder = tmp_path_factory.mktemp("blocked")
    for name in ("torch", "triton", "numpy", "vllm", "flashinfer"):
        missing = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n"
        (folder / f"{name}.py").write_text(missing)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}


@pytest.fixture(scope="module")
def ended(place: Path, blocked: Mapping[str, str]) -> Mapping[str, Any]:
    """Run all lines in interpreters without torch: line -> exit code, stdout, stderr."""
    return _run_lines(sys.executable, place, blocked, *ALSO_ANSWER, FIX)


_RUN_LINES = """
import contextlib, functools, io, json, sys
import typer.main
typer.main.get_command = functools.cache(typer.main.get_command)
from moedoctor.cli import main
results = {}
for line in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line.split())
    results[line] = (code, out.getvalue(), err.getvalue())
print("RESULTS", json.dumps(results))
"""


def _run_lines(python: str, place: Path, environ: Mapping[str, str], *more: str) -> Mapping[str, Any]:
    """Run the lines of all commands, and more, in one process of that interpreter."""
    lines = [f"{name} {words}" for name, (words, _) in ANSWERS.items()]
    lines += [f"{name} {words}" for name, words in NEED_TORCH.items()]
    answer = run([python, "-c", _RUN_LINES, *lines, *more], cwd=place, env=environ)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.rpartition("RESULTS ")[2])  # type: ignore[no-any-return]


def test_every_command_is_tried_without_torch() -> None:
    commands: Any = get_command(app)
    assert set(commands.commands) == {*ANSWERS, *NEED_TORCH, "preflight"}  # it asks a Python with vLLM


@pytest.mark.parametrize("command", ANSWERS)
def test_what_answers_without_torch_answers(ended: Mapping[str, Any], command: str) -> None:
    words, expected = ANSWERS[command]
    code, out, err = ended[f"{command} {words}"]
    assert (code, bool(out.strip())) == (expected, True), out + err
    assert "torch" not in err


@pytest.mark.parametrize("line", ALSO_ANSWER)
def test_a_part_of_a_command_answers_without_torch(ended: Mapping[str, Any], line: str) -> None:
    code, out, err = ended[line]
    assert code == 0, out + err


@pytest.mark.parametrize("command", NEED_TORCH)
def test_what_needs_torch_says_so_in_one_line(ended: Mapping[str, Any], command: str) -> None:
    code, out, err = ended[f"{command} {NEED_TORCH[command]}"]
    assert (code, out) == (2, ""), err
    assert err.splitlines()[-1].endswith(NEEDS_TORCH)
    assert "Traceback" not in err
    assert "pip install torch" in NEEDS_TORCH


def test_a_repair_that_needs_torch_leaves_the_findings_and_no_folder(ended, place):
    code, out, err = ended[FIX]
    assert (code, "input scale" in out) == (2, True), err
    assert err.splitlines()[-1].endswith(NEEDS_TORCH)
    assert not [path.name for path in place.iterdir() if "repaired" in path.name]


def test_a_torch_that_is_there_and_broken_is_another_matter() -> None:
    assert explain_missing_torch(ImportError("libcudart.so.13: cannot open shared object file")) is None
    assert explain_missing_torch(ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")) is None


@pytest.mark.slow
def test_the_wheel_answers_in_an_environment_without_torch(place: Path, tmp_path: Path) -> None:
    """Build the wheel, install it as a person would, and run every command."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    built = run([*pip, str(ROOT), "-w", str(tmp_path)], cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bin = tmp_path / "venv" / "bin"
    assert run([sys.executable, "-m", "venv", str(bin.parent)], cwd=tmp_path, env=environ).returncode == 0
    install = [str(bin / "pip"), "install", "-q", "--no-compile", str(wheel)]
    installed = run(install, cwd=tmp_path, env=environ)
    if "No matching distribution" in installed.stderr or "ConnectionError" in installed.stderr:
        pytest.skip(f"needs a package index: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    heavy = "import importlib.util as u; print([n for n in ('torch', 'triton', 'numpy') if u.find_spec(n)])"
    assert run([str(bin / "python"), "-c", heavy], cwd=tmp_path, env=environ).stdout.strip() == "[]"
    ended = _run_lines(str(bin / "python"), place, environ)
    for command in ANSWERS:
        test_what_answers_without_torch_answers(ended, command)
    for command in NEED_TORCH:
        test_what_needs_torch_says_so_in_one_line(ended, command)
    # A torch that is broken is a finding.
    (site,) = bin.parent.glob("lib/python*/site-packages")
    (site / "torch").mkdir()
    broken = "raise ImportError('libcudart.so.13: cannot open shared object file')"
    (site / "torch" / "__init__.py").write_text(broken)
    answer = run([str(bin / "moedoctor"), "run", "MD016"], cwd=place, env=environ)
    assert answer.returncode == 1
    assert "torch cannot be imported: ImportError: libcudart.so.13" in answer.stderr
    assert "pip install torch" not in answer.stdout + answer.stderr
