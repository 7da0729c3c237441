"""Calls are compared with the reference by a process beside the one that serves; experts of a checkpoint."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.reference.fp8 import Fp8
from moedoctor.trace import call_judge
from moedoctor.trace.call_judge import CallJudge
from moedoctor.trace.call_keeper import make_capsule
from moedoctor.trace.capsule import Capsule, CapsuleError, Record, add_weights
from moedoctor.trace.expert_weights import ExpertFiles

LAYER = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("checkpoint"), scheme="nvfp4")


@pytest.fixture(scope="module")
def judge(checkpoint: Path) -> Iterator[CallJudge]:
    judge = CallJudge(checkpoint)
    yield judge
    judge.close()


@pytest.fixture(scope="module")
def call(checkpoint: Path) -> Capsule:
    """A call without weights whose output is what the reference computes."""
    sizes = {"hidden": 256, "intermediate": 128, "experts": 8, "top_k": 2}
    kind = {"layer": LAYER, "activation": "silu", "quantization": "nvfp4"}
    record = Record.model_validate(sizes | kind)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()  # [T, H]
    tensors = {
        "x": x,
        "output": torch.zeros_like(x),
        "topk_ids": torch.tensor([[0, 3], [5, 0], [3, 5]], dtype=torch.int32),
        "topk_weights": torch.full((3, 2), 0.5),
    }
    bare = make_capsule(record, tensors, {"call": 1})
    files = ExpertFiles(checkpoint)
    whole = add_weights(bare, lambda experts: files.read_tensors(LAYER, experts, "nvfp4"))
    return replace(bare, tensors={**bare.tensors, "output": whole.compute_expected().bfloat16()})


def test_right_and_wrong_calls_are_told_apart(judge: CallJudge, call: Capsule) -> None:
    assert "w13" not in call.tensors
    wrong = call.tensors["output"].clone()
    wrong[2] *= 1.2
    assert judge.is_right(call) is True
    assert judge.is_right(replace(call, tensors={**call.tensors, "output": wrong})) is False
    assert judge.is_right(call) is True, "the process goes on after a wrong call"


def test_what_cannot_be_compared_has_a_reason_and_the_process_goes_on(judge, call):
    unknown = call.record.model_copy(update={"layer": "model.layers.9.mlp.experts"})
    with pytest.raises(CapsuleError, match=r"has no weights of model\.layers\.9\.mlp\.experts\.0"):
        judge.is_right(replace(call, record=unknown))
    assert judge.is_right(call) is True


def test_the_process_gives_way_and_is_in_a_session_of_its_own(judge: CallJudge, call: Capsule) -> None:
    judge.is_right(call)
    child = judge._child
    assert child is not None
    assert os.getpriority(os.PRIO_PROCESS, child.pid) >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == 0, "it ends with its input, as at the end of an engine"
    judge.close()


def test_a_process_that_ends_or_hangs_is_said_and_the_next_call_starts_another(call, tmp_path, monkeypatch):
    """It ends after one call, or hangs before it has read a long one. This one does not import torch."""
    (tmp_path / "judge_of_one.py").write_text(
        "import sys\n"
        "sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), 'little'))\n"
        """print('{"right": true, "error": null}', flush=True)\n"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(call_judge, "_MODULE", "judge_of_one")
    judge = CallJudge(tmp_path)
    assert judge.is_right(call)
    child = judge._child
    assert child is not None
    assert child.wait(60) == 0
    with pytest.raises(CapsuleError, match="the process that compares calls ended with 0"):
        judge.is_right(call)
    judge.start()
    child = judge._child
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    long = {name: tensor[:1].expand(600, -1) for name, tensor in call.tensors.items() if tensor.dim() == 2}
    monkeypatch.setattr(judge, "_seconds", 0.2)
    with pytest.raises(CapsuleError, match=r"gave no answer within 0\.2 s"):
        judge.is_right(replace(call, tensors={**call.tensors, **long}))
    assert (child.returncode, judge._child) == (-signal.SIGKILL, None)


def test_bf16_experts_are_gate_then_up(tmp_path: Path) -> None:
    folder = write_qwen3_moe(tmp_path, scheme="bf16")
    stored = load_file(folder / "model.safetensors")
    tensors = ExpertFiles(folder).read_tensors(LAYER, [2, 5], "bf16")
    for place, expert in enumerate((2, 5)):
        gate, up, down = (stored[f"{LAYER}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(tensors["w13"][place], torch.cat((gate, up)))
        assert torch.equal(tensors["w2"][place], down)
    assert set(tensors) == {"w13", "w2"}


def _unequal_scales(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    name = f"{LAYER}.5.up_proj.weight_scale_2"
    tensors[name] = tensors[name] * 2


def test_nvfp4_experts_keep_both_scales_if_they_differ(tmp_path: Path) -> None:
    folder = write_qwen3_moe(tmp_path, scheme="nvfp4", change=_unequal_scales)
    stored = load_file(folder / "model.safetensors")
    tensors = ExpertFiles(folder).read_tensors(LAYER, [5], "nvfp4")
    gate = stored[f"{LAYER}.5.gate_proj.weight_scale_2"]
    assert tensors["w13_scale"].tolist() == [[gate.item(), 2 * gate.item()]]
    assert tensors["w2_scale"].shape == (1,)
    assert tensors["w13_block_scales"].dtype == torch.float8_e4m3fn
    assert tensors["input_scale"].item() == stored[f"{LAYER}.5.gate_proj.input_scale"].item()
    alike = ExpertFiles(folder).read_tensors(LAYER, [0, 1], "nvfp4")
    assert alike["w13_scale"].shape == (2,)


def test_fp8_blocks_of_gate_and_up_follow_each_other(tmp_path: Path) -> None:
    folder = write_qwen3_moe(tmp_path, scheme="fp8", hidden=256, intermediate=128)
    stored = load_file(folder / "model.safetensors")
    tensors = ExpertFiles(folder).read_tensors(LAYER, [5], "fp8")
    gate, up, down = (stored[f"{LAYER}.5.{name}_proj.weight_scale_inv"] for name in ("gate", "up", "down"))
    assert torch.equal(tensors["w13_scale"][0], torch.cat((gate, up)))
    assert torch.equal(tensors["w2_scale"][0], down)
    spread = up.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight = stored[f"{LAYER}.5.up_proj.weight"].float() * spread
    held = Fp8(tensors["w13"], tensors["w13_scale"], (128, 128), 2).dequantize(0)
    assert torch.equal(held[128:], weight)


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    files = ExpertFiles(write_qwen3_moe(tmp_path / "model", scheme="bf16"))
    with pytest.raises(CapsuleError, match=r"model has no weights of model\.layers\.9\.mlp\.experts\.0"):
        files.read_tensors("model.layers.9.mlp.experts", [0], "bf16")
    with pytest.raises(CapsuleError, match="has no safetensors files"):
        ExpertFiles(tmp_path)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    index = '{"weight_map": {"a": "../secret.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(CapsuleError, match="expected one of its own folder"):
        ExpertFiles(tmp_path)
