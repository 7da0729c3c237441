"""Tiny checkpoints of Gemma-4 and Nemotron-H: names, sizes, and what is quantized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moedoctor.reference import activation_checkpoints as checkpoints
from moedoctor.reference.checkpoints import Scheme
from moedoctor.reference.nvfp4 import Nvfp4, dequantize


def read(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4"])
def test_gemma_experts_have_a_gate_and_full_attention_has_no_values(tmp_path: Path, scheme: Scheme) -> None:
    config = checkpoints.GEMMA
    folder = checkpoints.write_gemma4(tmp_path / "model", config, scheme)
    tensors = read(folder)
    assert json.loads((folder / "config.json").read_text()) == config
    prefix, width = "model.layers.1.experts.7", config["moe_intermediate_size"]
    columns = config["hidden_size"] // (1 if scheme == "bf16" else 2)
    for name in ("gate_proj", "up_proj"):
        assert tuple(tensors[f"{prefix}.{name}.weight"].shape) == (width, columns)
    assert "model.layers.0.self_attn.v_proj.weight" in tensors
    assert "model.layers.1.self_attn.v_proj.weight" not in tensors
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype is torch.bfloat16
    if scheme == "nvfp4":
        scales = [tensors[f"{prefix}.{name}_proj.weight_scale_2"] for name in ("gate", "up", "down")]
        assert torch.equal(scales[0], scales[1])
        assert not torch.equal(scales[0], scales[2])


def test_nemotron_experts_have_no_gate_and_see_the_latent(tmp_path: Path) -> None:
    config = checkpoints.NEMOTRON
    plain = read(checkpoints.write_nemotron_h(tmp_path / "a", config))
    four = read(checkpoints.write_nemotron_h(tmp_path / "b", config, "nvfp4"))
    layers = [index for index, kind in enumerate(config["hybrid_override_pattern"]) if kind == "E"]
    assert layers == [1, 3]
    for layer in layers:
        prefix = f"backbone.layers.{layer}.mixer"
        assert not any("gate_proj" in name for name in plain)
        assert f"{prefix}.gate.e_score_correction_bias" in plain
        for tensors in (plain, four):
            assert tensors[f"{prefix}.shared_experts.up_proj.weight"].dtype is torch.bfloat16
            assert tuple(tensors[f"{prefix}.fc1_latent_proj.weight"].shape) == (128, 256)
        for name, shape in (("up_proj", (128, 128)), ("down_proj", (128, 128))):
            expected = plain[f"{prefix}.experts.3.{name}.weight"]
            assert tuple(expected.shape) == shape
            parts = (
                four[f"{prefix}.experts.3.{name}.{part}"]
                for part in ("weight", "weight_scale", "weight_scale_2")
            )
            error = dequantize(Nvfp4(*parts)) - expected.float()
            assert error.norm() < 0.15 * expected.float().norm()
    channels = plain["backbone.layers.0.mixer.conv1d.weight"].shape[0]
    assert tuple(plain["backbone.layers.0.mixer.in_proj.weight"].shape) == (channels + 512 + 8, 256)


def test_a_layer_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    config: Mapping[str, Any] = {**checkpoints.NEMOTRON, "hybrid_override_pattern": "ME-E"}
    with pytest.raises(ValueError, match="got '-', expected M, E or"):
        checkpoints.write_nemotron_h(tmp_path / "model", config)


def test_another_seed_draws_other_weights(tmp_path: Path) -> None:
    first, again, other = (
        read(checkpoints.write_gemma4(tmp_path / str(number), checkpoints.GEMMA, seed=seed))
        for number, seed in enumerate((0, 0, 1))
    )
    name = "model.layers.0.experts.0.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
