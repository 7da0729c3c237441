"""Tiny checkpoints: what is written is what was asked for, and dequantizes to about the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moedoctor.reference.checkpoints import Scheme, write_qwen3_moe, write_tokenizer
from moedoctor.reference.nvfp4 import Nvfp4, dequantize

EXPERT = "model.layers.1.mlp.experts.7"


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4", "fp8", "fp8_modelopt", "fp8_compressed"])
def test_names_shapes_and_types(tmp_path: Path, scheme: Scheme) -> None:
    tensors, config = read(write_qwen3_moe(tmp_path / "made" / "model", scheme=scheme))
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert len({name.split(".")[2] for name in tensors if ".layers." in name}) == config["num_hidden_layers"]
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype is torch.bfloat16
    assert tensors["model.layers.0.mlp.gate.weight"].shape == (config["num_experts"], config["hidden_size"])
    weight = tensors[f"{EXPERT}.gate_proj.weight"]
    kinds = {"bf16": torch.bfloat16, "nvfp4": torch.uint8}
    assert weight.dtype is kinds.get(scheme, torch.float8_e4m3fn)
    columns = config["hidden_size"] // (2 if scheme == "nvfp4" else 1)
    assert weight.shape == (config["moe_intermediate_size"], columns)
    assert ("quantization_config" in config) == (scheme != "bf16")


def test_quantized_weights_are_those_of_bf16(tmp_path: Path) -> None:
    plain, _ = read(write_qwen3_moe(tmp_path / "a"))
    four, _ = read(write_qwen3_moe(tmp_path / "b", scheme="nvfp4"))
    eight, _ = read(write_qwen3_moe(tmp_path / "c", scheme="fp8"))
    of_a_matrix, _ = read(write_qwen3_moe(tmp_path / "d", scheme="fp8_modelopt"))
    of_rows, _ = read(write_qwen3_moe(tmp_path / "e", scheme="fp8_compressed"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        expected = plain[f"{EXPERT}.{name}.weight"].float()
        parts = (four[f"{EXPERT}.{name}.weight{part}"] for part in ("", "_scale", "_scale_2"))
        assert (dequantize(Nvfp4(*parts)) - expected).norm() < 0.15 * expected.norm()
        scale = eight[f"{EXPERT}.{name}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert (eight[f"{EXPERT}.{name}.weight"].float() * scale - expected).norm() < 0.05 * expected.norm()
        for tensors, size in ((of_a_matrix, ()), (of_rows, (len(expected), 1))):
            weight, scale = (tensors[f"{EXPERT}.{name}.{part}"] for part in ("weight", "weight_scale"))
            assert scale.shape == size
            assert (weight.float() * scale - expected).norm() < 0.05 * expected.norm()
    assert torch.equal(four[f"{EXPERT}.gate_proj.weight_scale_2"], four[f"{EXPERT}.up_proj.weight_scale_2"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 100}, "hidden: 100 is not a multiple of 64"),
        ({"scheme": "fp8", "intermediate": 64}, "intermediate: 64 is not a multiple of 128"),
        ({"top_k": 9}, "top_k: 9, expected 1 to experts 8"),
    ],
)
def test_sizes_that_no_engine_would_load(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_qwen3_moe(tmp_path, **options)


def test_words_and_ids(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 8)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    assert model["vocab"] == {
        "<unk>": 0, "<s>": 1, "</s>": 2, "t3": 3, "t4": 4, "t5": 5, "t6": 6, "t7": 7,
    }  # fmt: skip
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert [config[f"{name}_token"] for name in ("unk", "bos", "eos")] == list(model["vocab"])[:3]


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab: 3, expected more than 3"):
        write_tokenizer(tmp_path, 3)
