"""The script that makes the shipped trace, at a size that a CPU trains in seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moedoctor.trace.format import RoutingTrace, load

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "train_trace_model.py"
TINY = {
    "layers": 2,
    "experts": 8,
    "top-k": 2,
    "width": 32,
    "expert-width": 16,
    "heads": 2,
    "vocabulary": 512,
    "length": 32,
    "batch": 4,
    "steps": 60,
    "streams": 3,
    "prompt": 8,
    "recorded": 16,
}


def make(folder: Path, text: Path, **more: object) -> subprocess.CompletedProcess[str]:
    options = [f"--{name}={value}" for name, value in {**TINY, **more}.items()]
    command = [sys.executable, str(SCRIPT), str(folder / "t.safetensors"), f"--text={text}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of source files: ours."""
    folder = tmp_path_factory.mktemp("text")
    sources = sorted((SCRIPT.parent.parent / "moedoctor").rglob("*.py"))
    for index, path in enumerate(sources[:60]):
        (folder / f"{index:03}.py").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, text: Path) -> RoutingTrace:
    folder = tmp_path_factory.mktemp("trace")
    done = make(folder, text)
    assert done.returncode == 0, done.stderr
    return load(folder / "t.safetensors")


def test_the_trace_has_the_rows_and_the_shape_that_were_asked_for(trace: RoutingTrace) -> None:
    assert (trace.num_experts, trace.top_k, len(trace.layers)) == (8, 2, 2)
    assert trace.stream_rows == (16, 16, 16)
    assert all(len(call) == 2 for layer in range(2) for call in trace.calls(layer))


def test_the_metadata_says_how_it_was_made_and_the_model_learned(trace: RoutingTrace) -> None:
    made = trace.made
    assert made["steps_done"] == 60
    assert made["files"] == 60
    assert len(made["text_sha256"]) == len(made["file_names_sha256"]) == 64
    assert made["held_out_loss"] < 6.0, "512 tokens: a model that knows nothing has 6.2"
    assert 0 < made["load_entropy_least"] <= made["load_entropy_most"] <= 1
    assert made["settings"]["seed"] == 20261121


def test_too_little_text_is_said(tmp_path: Path, text: Path) -> None:
    done = make(tmp_path, text, streams=9999, steps=1)
    assert done.returncode == 1
    assert "too little text" in done.stderr
