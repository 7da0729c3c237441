"""Recordings on the CPU, in a stub of the parts of vLLM 0.21.0 and 0.33.0 that they hook."""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from real_vllm import ask_child, skip_unless_made_for

from moedoctor.diagnose.capsule.replay import judge
from moedoctor.plugin import record, record_layers
from moedoctor.plugin.extensions import TRACES
from moedoctor.plugin.record import EngineRecorder
from moedoctor.plugin.register import OptionError
from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.trace import call_judge
from moedoctor.trace.call_judge import CallJudge
from moedoctor.trace.capsule import SUFFIX, Capsule, add_weights, load
from moedoctor.trace.crash_watcher import write_calls
from moedoctor.trace.expert_weights import ExpertFiles
from tests.plugin import record_stub
from tests.plugin.nan_stub import run_script, step
from tests.plugin.record_stub import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, Model, write_stub

SECOND = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "experts": EXPERTS, "vocab": 8}
    return write_qwen3_moe(folder, layers=LAYERS, **sizes)


class Engine:
    """A process of the stub that records."""

    def __init__(self, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.checkpoint = tmp_path / "capsules", checkpoint
        self._stub, self._patch = tmp_path, monkeypatch

    def start(self, when: str, *, newer: bool = True, monolithic: bool = False, size: str = "") -> Model:
        """Return the model of an engine that records what `when` says."""
        write_stub(self._stub, self.checkpoint, newer=newer)
        self._patch.syspath_prepend(str(self._stub))
        self._patch.setattr(record, "_active", None)
        self._patch.setattr(record, "_PAUSE", 0.001)
        for name, value in (("", str(self.folder)), ("_WHEN", when), ("_SIZE", size)):
            self._patch.setenv(f"MOEDOCTOR_RECORD{name}", value)
        assert record.apply("0.33.0" if newer else "0.21.0").startswith("MoE calls are watched")
        model = Model(self.checkpoint, newer=newer, monolithic=monolithic)
        model(torch.zeros(4))  # the profile run, in which no step runs
        return model

    def recorder(self) -> EngineRecorder:
        """Return what records in this process."""
        assert record._active is not None
        found: EngineRecorder = record._active[0]
        return found

    def finish(self) -> None:
        """End the process."""
        assert record._active is not None
        record._active[1].run()

    def capsules(self) -> list[Capsule]:
        """End the process and return what it left."""
        self.finish()
        return [load(file) for file in sorted(self.folder.glob(f"*{SUFFIX}"))]


@pytest.fixture
def engine(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> Engine:
    return Engine(tmp_path, checkpoint, monkeypatch)


@pytest.mark.parametrize("newer", [False, True])
def test_the_call_that_makes_nan_is_kept_with_what_the_backend_and_the_checkpoint_have(engine, newer):
    model = engine.start("nan", newer=newer)
    assert [file.name for file in engine.folder.iterdir()] == [f"{os.getpid()}.watched"]
    step(model)

    def one_row(output: torch.Tensor) -> torch.Tensor:
        output[1, 5] = float("nan")
        output[3] = float("inf")  # padding
        return output

    model.spoil[1] = one_row
    step(model)
    model.spoil.clear()
    step(model)  # what comes later is not kept
    (capsule,) = engine.capsules()
    kept = capsule.record
    assert (kept.layer, kept.call, kept.tokens, kept.call_tokens) == (SECOND, 2, (1,), 4)
    assert (kept.weights, kept.activation, kept.quantization) == ("recorded", "silu", "bf16")
    assert kept.reason == "its output holds NaN or Inf, its input does not"
    assert capsule.tensors["output"].isnan().nonzero().tolist() == [[0, 5]]
    assert capsule.tensors["router_logits"].shape == (1, EXPERTS)
    assert torch.equal(capsule.tensors["backend.w13_weight"], capsule.tensors["w13"])
    assert len(capsule.expert_ids) == 2 == len(capsule.tensors["w13"])
    assert "MOEDOCTOR_RECORD_WHEN" in kept.environment
    assert kept.environment["MOEDOCTOR_RECORD"] == "…/capsules", "a capsule names no folder of the machine"


@pytest.mark.parametrize(
    ("when", "layer", "call"), [("first", "model.layers.0.mlp.experts", 1), ("call=layers.1:3", SECOND, 3)]
)
def test_the_call_that_was_asked_for_is_kept_and_is_right(engine, when, layer, call):
    model = engine.start(when)
    for _ in range(4):
        step(model)
    (capsule,) = engine.capsules()
    assert (capsule.record.layer, capsule.record.call, capsule.record.tokens) == (layer, call, (0, 1, 2))
    assert judge(capsule)["right"] is True


def test_a_backend_that_routes_by_itself_gets_the_ids_of_vllms_router(engine: Engine) -> None:
    model = engine.start("first", monolithic=True)
    step(model)
    (capsule,) = engine.capsules()
    weights, ids = record_stub.route(capsule.tensors["x"][:, :EXPERTS])
    assert torch.equal(capsule.tensors["topk_ids"], ids)
    assert torch.allclose(capsule.tensors["topk_weights"], weights, atol=1e-6)


@pytest.fixture
def judged_here(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare calls here: the process of `test_call_judge.py` takes seconds to import torch."""
    files, child = ExpertFiles(checkpoint), subprocess.Popen("true")

    def is_right(judge: CallJudge, call: Capsule) -> bool:
        layer, kind = call.record.layer, call.record.quantization
        return call_judge.is_right(add_weights(call, lambda ids: files.read_tensors(layer, ids, kind)))

    monkeypatch.setattr(CallJudge, "start", lambda judge: setattr(judge, "_child", child))
    monkeypatch.setattr(CallJudge, "is_right", is_right)


@pytest.mark.usefixtures("judged_here")
def test_only_a_call_past_the_bound_is_kept(engine, caplog, monkeypatch):
    asked = Mock(side_effect=record_layers._read_backend_tensors)
    monkeypatch.setattr(record_layers, "_read_backend_tensors", asked)
    model = engine.start("mismatch=1")
    recorder = engine.recorder()
    assert recorder._judge._child is not None, "what compares starts while the model loads"
    steps = _run_until(model, lambda: recorder.keeper.compared > 1)
    assert not list(engine.folder.glob(f"*{SUFFIX}"))
    assert not asked.called, "the device has no memory to spare for calls that are right"
    model.spoil = {0: lambda output: output * 1.5, 1: lambda output: output * 1.5}
    _run_until(model, lambda: list(engine.folder.glob(f"*{SUFFIX}")))
    (capsule,) = engine.capsules()
    assert capsule.record.reason == "its output is past the bound of the reference"
    assert capsule.record.call >= steps
    assert torch.equal(capsule.tensors["backend.w13_weight"], capsule.tensors["w13"])
    right = rf"record: {recorder.keeper.compared} compared calls were right; a comparison took \d+ ms"
    assert re.search(right, caplog.text)


@pytest.mark.parametrize("reason", ["the model is not a local folder with safetensors", "OSError: no memory"])
def test_a_comparison_that_cannot_be_made_ends_the_recording_with_a_reason(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason.startswith("OSError"):
        monkeypatch.setattr(
            "moedoctor.trace.call_judge.subprocess.Popen", Mock(side_effect=OSError("no memory"))
        )
    model = engine.start("mismatch=1")
    if not reason.startswith("OSError"):
        engine.recorder().model = None
    _run_until(model, lambda: engine.recorder().keeper.done)
    assert engine.capsules() == []
    assert f"there is no capsule: {reason}" in caplog.text


def test_that_no_call_was_compared_is_said(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    step(engine.start("mismatch=0.000000001"))
    engine.finish()
    assert "record: no call was compared with the reference" in caplog.text


def _run_until(model: Model, condition: Callable[[], object]) -> int:
    """Return after how many steps the condition held."""
    until, steps = time.monotonic() + 60, 0
    while not condition():
        assert time.monotonic() < until
        step(model)
        steps += 1
        time.sleep(0.02)
    return steps


def test_an_unknown_layer_ends_the_recording_and_not_the_engine(engine, caplog):
    model = engine.start("call=layers.9:1")
    for _ in range(2):
        step(model)
    assert engine.capsules() == []
    assert "no MoE layer is called 'layers.9'; expected one such as model.layers.0.mlp.experts" in caplog.text


@pytest.mark.parametrize(("when", "size"), [("always", ""), ("nan", "0"), ("nan", "much")])
def test_a_bad_variable_stops_the_engine(engine: Engine, when: str, size: str) -> None:
    with pytest.raises(OptionError, match=r"MOEDOCTOR_RECORD_(WHEN|SIZE) is"):
        engine.start(when, size=size)


@pytest.mark.slow
def test_what_the_last_step_showed_is_saved_when_the_process_ends(tmp_path: Path, checkpoint: Path) -> None:
    write_stub(tmp_path, checkpoint, newer=True)
    environ = {"MOEDOCTOR_RECORD": str(tmp_path / "capsules"), "MOEDOCTOR_RECORD_WHEN": "nan"}
    run_script(record_stub.__file__, str(tmp_path), str(checkpoint), **environ)
    (file,) = (tmp_path / "capsules").glob(f"*{SUFFIX}")
    kept = load(file).record
    assert (kept.layer, kept.call, kept.weights) == (SECOND, 1, "recorded")


def test_an_error_of_the_experts_is_the_reason_of_the_calls_that_the_watcher_writes(engine, monkeypatch):
    monkeypatch.setattr("moedoctor.trace.crash_ring.subprocess.run", lambda *given, **options: None)
    model = engine.start("crash")

    step(model)
    model.spoil[1] = Mock(side_effect=RuntimeError("b_scales is not on GPU"))
    with pytest.raises(RuntimeError, match="b_scales"):
        step(model)
    engine.finish()
    ring = engine.recorder().ring
    write_calls(ring._memory.fileno(), ring._notes.fileno(), 10**7, engine.folder, 1)
    capsules = [load(file) for file in engine.folder.glob(f"*{SUFFIX}")]
    (last,) = [capsule for capsule in capsules if capsule.record.weights == "recorded"]
    assert (last.record.layer, last.record.call, len(last.tensors["x"])) == (SECOND, 2, 4)
    assert last.record.reason == "the last call before RuntimeError: b_scales is not on GPU"
    assert len(capsules) == 2 * LAYERS


@pytest.mark.parametrize(
    ("when", "broken"),
    [
        ("nan", "moedoctor.kernels.kept_rows.KeptRows.keep_on_host"),
        ("nan", "moedoctor.plugin.record.overwrites"),
        ("nan", "moedoctor.kernels.kept_rows.begin_step_on_host"),
        ("nan", "moedoctor.trace.call_keeper.HeaderCopy.begin"),
        ("nan", "moedoctor.plugin.record.threading.Thread"),
        ("crash", "moedoctor.trace.crash_ring.subprocess.run"),
        ("crash", "moedoctor.trace.crash_ring.os.ftruncate"),
        ("crash", "moedoctor.kernels.kept_rows.SavedCalls.save_on_host"),
    ],
)
def test_an_error_of_ours_is_one_line_and_never_ends_a_forward(engine, caplog, monkeypatch, when, broken):
    monkeypatch.setattr(broken, Mock(side_effect=OSError("no space left")))
    model = engine.start(when)
    for _ in range(3):
        step(model)
    assert all(output.isfinite().all() for output in model.outputs)
    (line,) = [line.message for line in caplog.records if "record" in line.message]
    assert line == "moedoctor: record: no more calls are watched: OSError: no space left"
    if engine.recorder().ring is not None:
        engine.finish()  # so that the watcher writes nothing for this process


def test_a_layer_that_is_not_as_expected_is_left_out(engine, caplog, monkeypatch):
    monkeypatch.setattr(record_layers, "_read_block", lambda method: method.missing)
    step(engine.start("nan"))
    for number in range(LAYERS):
        assert f"record: model.layers.{number}.mlp.experts is not watched: AttributeError: " in caplog.text


def test_quantization_is_what_method_and_kernel_say() -> None:
    e4m3, given = torch.float8_e4m3fn, torch.ones(())
    for (kind, block, scale), activations in {
        (None, None, None): "none",
        ("nvfp4", None, None): "nvfp4",
        (e4m3, (128, 128), None): "fp8_block",
        (e4m3, None, None): "fp8_token",
        (e4m3, None, given): "fp8",
    }.items():
        config = SimpleNamespace(quant_dtype=kind, block_shape=block, a1_scale=scale)
        experts = SimpleNamespace(quant_config=config)
        method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))
        assert record_layers._name_activations(method) == activations
    for size, strategy, block in (
        ([128, 64], None, (128, 64)),
        (None, None, None),
        (None, "channel", (1, 0)),
        (None, "tensor", None),
    ):
        method = SimpleNamespace(weight_block_size=size, weight_quant=SimpleNamespace(strategy=strategy))
        assert record_layers._read_block(method) == block


REAL = """
import inspect, json
from dataclasses import fields
from vllm.model_executor.layers.fused_moe import activation, config, fused_moe_method_base, modular_kernel
from vllm.model_executor.layers.fused_moe.runner import moe_runner
names = lambda owner: sorted({*(field.name for field in fields(owner)), *vars(owner)})
print("\\nANSWER " + json.dumps({
    "config": names(config.FusedMoEConfig),
    "parallel": names(config.FusedMoEParallelConfig),
    "quant": names(config.FusedMoEQuantConfig),
    "method": inspect.getsource(fused_moe_method_base.FusedMoEMethodBase),
    "kernel": list(vars(modular_kernel.FusedMoEKernel)),
    "runner": inspect.getsource(moe_runner),
    "activations": [value.value for value in activation.MoEActivation],
}))
"""


@pytest.mark.upstream
def test_the_installed_release_has_what_a_record_is_made_of() -> None:
    skip_unless_made_for(TRACES["record"])
    real, _ = ask_child(REAL)
    needed = {"hidden_dim", "intermediate_size_per_partition", "num_experts", "experts_per_token"}
    assert needed | {"activation", "moe_parallel_config"} <= set(real["config"])
    assert {"tp_size", "dp_size", "ep_size"} <= set(real["parallel"])
    assert {"quant_dtype", "block_shape", "a1_scale"} <= set(real["quant"])
    assert {"silu", "relu2_no_mul"} <= set(real["activations"])
    assert {"fused_experts", "is_monolithic"} <= set(real["kernel"])
    for text in ("self.moe: FusedMoEConfig = moe", "self.moe_kernel"):
        assert text in real["method"]
    for text in ("self._quant_method", "def _apply_quant_method", "self.router.select_experts("):
        assert text in real["runner"]
