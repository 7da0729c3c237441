"""MoE calls that are saved when their process dies."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from moedoctor.kernels.kept_rows import MoeInput
from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.trace import crash_ring, crash_watcher
from moedoctor.trace.capsule import SUFFIX, Capsule, Record, load
from moedoctor.trace.crash_ring import CrashRing
from tests.interpreted import needs_triton
from tests.plugin.nan_stub import run_script

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
LAYERS = 3
LEFT = {(0, 2), (0, 3), (1, 2), (1, 3), (2, 1), (2, 2)}
"""Layer and step of the calls that are saved when the last step ends in the second layer."""


def name_of(layer: int, step: int) -> str:
    return f"model.layers.{layer}.mlp.experts-call{step}"


def save_calls(folder: Path, model: Path, change: str = "", **options: object) -> CrashRing:
    """Return a ring that saved four steps, the last up to the second layer.

    `change`: ``wide``, a call of another size, or ``stopped``, an error of ours.
    """
    ring = CrashRing(folder, 10**6, **options)  # type: ignore[arg-type]
    record = {"hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2}
    kind = {"activation": "silu", "quantization": "bf16"}
    for layer in range(LAYERS):
        layer_name = {"layer": f"model.layers.{layer}.mlp.experts"}
        ring.add(Record.model_validate(record | kind | layer_name), model)
    for step in range(4):
        if step:
            ring.begin()
        for layer in range(LAYERS if step < 3 else 2):
            x = torch.full((4, 64), step * 10.0 + layer, dtype=torch.bfloat16)  # [T, H]
            if change == "wide" and (step, layer) == (2, 0):
                x = torch.zeros(4, 128, dtype=torch.bfloat16)
            if change == "stopped" and step == 2:
                ring.save(layer, None)  # type: ignore[arg-type]
            ids = torch.arange(8, dtype=torch.int64).view(4, 2)  # [T, K]
            ring.save(layer, MoeInput(x, ids, torch.rand(4, 2), torch.randn(4, 8)))
    return ring


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_qwen3_moe(folder, layers=LAYERS, hidden=64, intermediate=64, experts=8, vocab=8)


def read_capsules(folder: Path) -> dict[str, Capsule]:
    """Return capsules by the names of their files without the process."""
    return {file.name.rpartition("-")[0]: load(file) for file in sorted(folder.glob(f"*{SUFFIX}"))}


def check_left(capsules: dict[str, Capsule], end: str) -> None:
    assert set(capsules) == {name_of(*place) for place in LEFT}
    for layer, step in LEFT:
        capsule, last = capsules[name_of(layer, step)], (layer, step) == (1, 3)
        assert bool((capsule.tensors["x"] == step * 10 + layer).all())
        assert capsule.tensors["topk_ids"].flatten().tolist() == list(range(8))
        assert "output" not in capsule.tensors
        sizes = {"x": 512, "topk_ids": 64, "topk_weights": 32, "router_logits": 128}
        assert {key: size for key, (_, size) in capsule.record.addresses.items()} == sizes
        assert all(address > 0 for address, _ in capsule.record.addresses.values())
        assert capsule.record.weights == ("recorded" if last else "none")
        assert capsule.record.reason == f"{'the last call' if last else 'a call'} before {end}"
    assert capsules[name_of(1, 3)].tensors["w13"].shape == (8, 128, 64)


@needs_triton
@pytest.mark.slow
def test_the_last_calls_of_every_layer_outlive_their_process(tmp_path: Path, model: Path) -> None:
    """The process is a copy of this one: another would take seconds to import torch."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(write, 2)
        os.close(write)
        save_calls(tmp_path, model)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    with os.fdopen(read) as errors:
        printed = errors.read()  # until the watcher is through as well, for it has the same stderr
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL, printed
    check_left(read_capsules(tmp_path), "the process died")


@needs_triton
@pytest.mark.slow
def test_the_last_calls_outlive_a_process_that_aborts_with_kernels(tmp_path: Path, model: Path) -> None:
    done = run_script(__file__, str(tmp_path), str(model), TRITON_INTERPRET="1")
    assert done.returncode < 0, done.stderr
    check_left(read_capsules(tmp_path), "the process died")


@pytest.mark.parametrize("error", [None, "RuntimeError: b_scales is not on GPU", ""])
@pytest.mark.parametrize("change", ["", "wide", "stopped"])
def test_the_end_of_the_process_decides_what_is_written(tmp_path, model, monkeypatch, change, error):
    """An empty error stands for a process that ends without `finish`."""
    monkeypatch.setattr(crash_ring.subprocess, "run", lambda *given, **options: None)  # no watcher
    warned: list[str] = []
    ring = save_calls(tmp_path, model, change, warn=warned.append)
    if error != "":
        ring.finish(error)
    memory, notes = ring._memory.fileno(), ring._notes.fileno()
    crash_watcher.write_calls(memory, notes, ring.max_bytes, tmp_path, os.getpid())
    capsules = read_capsules(tmp_path)
    if error is None:
        assert capsules == {}
    elif change == "wide":
        (line,) = warned
        assert "layers.0.mlp.experts is no longer watched: its x is torch.bfloat16 [4, 128], expected" in line
        assert set(capsules) == {name_of(*place) for place in (LEFT - {(0, 2), (0, 3)}) | {(0, 0), (0, 1)}}
    elif change == "stopped":
        assert {capsule.record.call for capsule in capsules.values()} == {0, 1}
        reason = capsules[name_of(2, 1)].record.reason
        assert reason.startswith("the last call before AttributeError: 'NoneType' object has no")
    else:
        check_left(capsules, error or "the process died")


if __name__ == "__main__":
    save_calls(Path(sys.argv[1]), Path(sys.argv[2]))
    os.abort()
