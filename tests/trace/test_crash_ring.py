"""What is left of MoE calls when their process dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.trace.capsule import SUFFIX, Capsule, load
from tests.interpreted import ROOT, needs_triton

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
LAYERS, TOKENS = 3, 4

_CHILD = """
import os, signal, sys
from pathlib import Path
import torch
from moedoctor.kernels.kept_rows import MoeInput
from moedoctor.trace.capsule import Record
from moedoctor.trace.crash_ring import CrashRing

folder, model, how = sys.argv[1:]
ring = CrashRing(Path(folder), 10**6)
record = dict(hidden=64, intermediate=64, experts=8, top_k=2, activation="silu", quantization="bf16")
if how == "wide":
    ring.warn = print
for layer in range(3):
    name = f"model.layers.{layer}.mlp.experts"
    ring.add(Record.model_validate({**record, "layer": name}), Path(model))
for step in range(4):
    if step:
        ring.begin()
    for layer in range(3):
        # The last step ends in the second layer.
        if (step, layer) == (3, 2):
            break
        x = torch.full((4, 64), step * 10.0 + layer, dtype=torch.bfloat16)
        ids = torch.arange(8, dtype=torch.int64).view(4, 2)
        if how == "wide" and (step, layer) == (2, 0):
            x = torch.zeros(4, 128, dtype=torch.bfloat16)
        if how == "stopped" and step == 2:
            ring.save(layer, None)  # raises inside
        ring.save(layer, MoeInput(x, ids, torch.rand(4, 2), torch.randn(4, 8)))
if how == "end":
    ring.finish()
elif how == "error":
    ring.finish("RuntimeError: b_scales is not on GPU")
elif how == "abort":
    os.abort()
elif how in ("wide", "stopped"):
    os._exit(1)
else:
    os.kill(os.getpid(), getattr(signal, how))
"""


def capsules_after(tmp_path: Path, how: str, **environ: str) -> dict[str, Capsule]:
    """Return what a process leaves that ends like that, by the name of its file without the process."""
    return run_child(tmp_path, how, **environ)[0]


def run_child(tmp_path: Path, how: str, **environ: str) -> tuple[dict[str, Capsule], str]:
    """Return the same, and what the process printed."""
    model = write_qwen3_moe(tmp_path / "model", layers=LAYERS, hidden=64, intermediate=64, experts=8, vocab=8)
    folder = tmp_path / "capsules"
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(folder), str(model), how],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,  # until the watcher is through as well, for it has the same stderr
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode == 0) == (how in ("end", "error")), done.stderr
    found = sorted(folder.glob(f"*{SUFFIX}"))
    return {file.name.rpartition("-")[0]: load(file) for file in found}, done.stdout


@needs_triton
@pytest.mark.parametrize("interpret", ["0", "1"])
def test_the_last_calls_of_every_layer_outlive_a_kill(tmp_path: Path, interpret: str) -> None:
    capsules = capsules_after(tmp_path, "SIGKILL", TRITON_INTERPRET=interpret)
    expected = {(0, 2), (0, 3), (1, 2), (1, 3), (2, 1), (2, 2)}  # layer and step
    assert set(capsules) == {f"model.layers.{layer}.mlp.experts-call{step}" for layer, step in expected}
    for name, capsule in capsules.items():
        layer, step = (layer_step for layer_step in expected if name == _name(*layer_step)).__next__()
        assert bool((capsule.tensors["x"] == step * 10 + layer).all())
        assert capsule.tensors["topk_ids"].flatten().tolist() == list(range(8))
        assert "output" not in capsule.tensors
        last = (layer, step) == (1, 3)
        assert capsule.record.weights == ("recorded" if last else "none")
        assert capsule.record.reason == f"{'the last call' if last else 'a call'} before the process died"
    weights = capsules[_name(1, 3)].tensors["w13"]
    assert weights.shape == (8, 128, 64)


def _name(layer: int, step: int) -> str:
    return f"model.layers.{layer}.mlp.experts-call{step}"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGSEGV", "abort", "error"])
def test_calls_outlive_other_ends(tmp_path: Path, how: str) -> None:
    capsules = capsules_after(tmp_path, how)
    assert len(capsules) == 2 * LAYERS
    reason = "RuntimeError: b_scales is not on GPU" if how == "error" else "the process died"
    assert capsules[_name(1, 3)].record.reason == f"the last call before {reason}"


@needs_triton
@pytest.mark.parametrize("interpret", ["0", "1"])
def test_a_call_of_another_size_is_refused_and_other_layers_are_saved(tmp_path: Path, interpret: str) -> None:
    capsules, printed = run_child(tmp_path, "wide", TRITON_INTERPRET=interpret)
    expected = "model.layers.0.mlp.experts is no longer watched: its x is torch.bfloat16 [4, 128], expected"
    assert printed.count(expected) == 1
    assert {_name(*of) for of in ((0, 0), (0, 1), (1, 2), (1, 3), (2, 1), (2, 2))} == set(capsules)


def test_what_stopped_the_recording_is_the_reason_of_its_last_calls(tmp_path: Path) -> None:
    """Else they would be taken for the last calls before the process died."""
    capsules = capsules_after(tmp_path, "stopped")
    assert {capsule.record.call for capsule in capsules.values()} == {0, 1}
    reason = capsules[_name(2, 1)].record.reason
    assert reason.startswith("the last call before AttributeError: 'NoneType' object has no")


def test_a_process_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    assert capsules_after(tmp_path, "end") == {}
