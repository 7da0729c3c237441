"""The experts of a checkpoint come into a capsule as they were written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.reference.fp8 import Fp8
from moedoctor.trace.capsule import CapsuleError
from moedoctor.trace.expert_weights import ExpertFiles

LAYER = "model.layers.1.mlp.experts"


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
