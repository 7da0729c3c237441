"""Checkpoints of random weights by a name such as ``random:layers=1``."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from moedoctor.bench.random_model import RandomModel


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("random:layers", "expected KEY=VALUE with a key of architecture, scheme, layers"),
        ("random:colour=1", "expected KEY=VALUE"),
        ("random:layers=two", "layers is 'two', expected a number"),
        ("random:architecture=gpt", "architecture is 'gpt', expected qwen3, gemma4, nemotron_h"),
        ("random:architecture=gemma4,layers=3", "layers can be set for qwen3 only"),
        ("random:scheme=x", "scheme is 'x'"),
        ("random:hidden=8", "hidden: 8"),
    ],
)
def test_what_no_engine_loads_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomModel.parse(text).write(tmp_path)


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4"])
@pytest.mark.parametrize(
    ("name", "architecture", "left_out"),
    [
        ("qwen3", "Qwen3MoeForCausalLM", "*mlp.gate"),
        ("gemma4", "Gemma4ForCausalLM", "*router*"),
        ("nemotron_h", "NemotronHForCausalLM", "*shared_experts*"),
    ],
)
def test_each_architecture_has_a_config_and_weights(tmp_path, scheme, name, architecture, left_out):
    folder = RandomModel.parse(f"random:architecture={name},scheme={scheme}").write(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert ("quantization_config" in config) == (scheme == "nvfp4")
    assert scheme == "bf16" or left_out in config["quantization_config"]["ignore"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert len(list(file.keys())) > 20


def test_sizes_are_those_of_the_name(tmp_path: Path) -> None:
    sizes = "layers=1,experts=4,hidden=64,intermediate=64"
    folder = RandomModel.parse(f"random:{sizes}").write(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_experts"], config["hidden_size"]) == (1, 4, 64)
