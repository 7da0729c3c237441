"""Shapes against the parameter counts that the models are named after, and configs that cannot be read."""

import json

import pytest

from moedoctor.models.config import read_config, shape_of
from moedoctor.models.config_fields import ConfigError
from moedoctor.models.presets import find_model, names, preset

TINY = {
    "hidden_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("name", "billions", "experts"),
    [
        ("qwen3-30b-a3b", 30.5, 128),
        ("qwen3.5-35b-a3b", 34.7, 256),
        ("nemotron-cascade-2-30b-a3b", 31.6, 128),
        ("nemotron-3-super-120b", 120.6, 512),
        ("gemma-4-26b-a4b", 25.2, 128),
    ],
)
def test_the_presets_have_the_parameters_that_the_models_have(name, billions, experts):
    shape = preset(name.upper())
    total = shape.expert_parameters() + shape.other_parameters()
    assert total / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.experts.layer.experts == experts
    assert name in names()


def test_every_parameter_of_a_tiny_model_is_counted():
    shape = shape_of(TINY, "tiny", "here")
    attention = 64 * (4 * 16 + 2 * 2 * 16) + 4 * 16 * 64  # q, k, v, o
    assert shape.other_parameters() == 2 * 100 * 64 + 3 * (attention + 64 * 8)
    assert shape.expert_parameters() == 3 * 8 * 3 * 64 * 32


@pytest.mark.parametrize(
    ("named", "ours", "factor"),
    [("silu", "silu", 3), ("gelu_pytorch_tanh", "gelu_tanh", 3), ("swish", "silu", 3), ("relu2", "relu2", 2)],
)
def test_an_activation_decides_whether_there_is_a_gate(named, ours, factor):
    layer = shape_of({**TINY, "hidden_act": named}, "tiny", "here").experts.layer
    assert layer.activation == ours
    assert layer.expert_parameters == factor * 64 * 32


def test_a_nested_text_config_and_dense_layers_are_read():
    shape = shape_of({"text_config": {**TINY, "first_k_dense_replace": 1}}, "tiny", "here")
    assert shape.experts.count == 2
    assert shape.dense_parameters == 3 * 64 * 128


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_experts": None}, "num_experts or n_routed_experts"),
        ({"num_experts_per_tok": "2"}, "is '2', expected a whole number"),
        ({"num_experts_per_tok": 9}, "top_k: 9 is more than experts 8"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0, expected a whole number, at least 1"),
        ({"moe_latent_size": "64"}, "moe_latent_size is '64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hybrid_override_pattern": "MEX"}, "holds 'X'"),
        ({"text_config": [1]}, "text_config is no object"),
        ({"text_config": []}, "text_config is no object"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a whole number, at least 1"),
        ({"num_hidden_layers": 10**13}, "num_hidden_layers is 10000000000000, expected .* 1 to 10000"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": None, "num_attention_heads": 65}, "head_dim or attention_head_dim is 0"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings is '4096'"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"layer_types": 5}, "layer_types is 5, expected a list"),
        ({"layer_types": []}, "layer_types is .., expected a list"),
        ({"layer_types": ["full_attention"] * 2}, "has 2 layers and num_hidden_layers is 3"),
        ({"layer_types": ["full_attention", "chunked_attention", "moe"]}, "holds 'chunked_attention'"),
        ({"layer_types": ["full_attention", "mamba2", "moe"]}, "holds 'mamba2'"),
        ({"layer_types": ["full_attention", "mamba", "linear_attention"]}, "both mamba and linear_attention"),
        ({"hybrid_override_pattern": 5}, "hybrid_override_pattern is 5"),
        ({"hybrid_override_pattern": ""}, "hybrid_override_pattern is ''"),
        ({"hybrid_override_pattern": "M*-"}, "at least one E"),
        ({"hybrid_override_pattern": "M*EE"}, "has 4 layers and num_hidden_layers is 3"),
        ({"full_attention_interval": "4"}, "full_attention_interval is '4'"),
        ({"first_k_dense_replace": "x"}, "first_k_dense_replace is 'x'"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace 3 leaves none of 3 layers with experts"),
        ({"mlp_only_layers": 5}, "mlp_only_layers is 5"),
        ({"mlp_only_layers": [0, 1, 2]}, r"mlp_only_layers \[0, 1, 2\] leaves none"),
        ({"decoder_sparse_step": "4"}, "decoder_sparse_step is '4'"),
        ({"decoder_sparse_step": 5}, "decoder_sparse_step 5 leaves none"),
        ({"moe_shared_expert_intermediate_size": "x"}, "moe_shared_expert_intermediate_size is 'x'"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size is 8192, expected layer_types beside it"),
        (
            {"interleave_moe_layer_step": 2},
            "interleave_moe_layer_step is 2, expected 1: experts in every layer",
        ),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
    ],
)
def test_a_config_that_says_too_little_is_refused_by_name(change, said):
    with pytest.raises(ConfigError, match=said):
        shape_of({**TINY, **change}, "tiny", "here")


def test_a_sparse_frequency_leaves_the_layers_between_dense():
    shape = shape_of({**TINY, "moe_layer_freq": 2}, "tiny", "here")
    assert (shape.experts.count, shape.dense_parameters) == (2, 3 * 64 * 128)


def test_the_names_of_layers_decide_what_they_are():
    kinds = ["sliding_attention", "sliding_attention", "attention"]
    shape = shape_of({**TINY, "layer_types": kinds, "sliding_window": 128}, "tiny", "here")
    assert [(one.count, one.sliding_window) for one in shape.attention] == [(1, None), (2, 128)]


def test_a_folder_is_read_and_an_unknown_name_lists_the_presets(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert find_model(str(tmp_path)).hidden_size == 64
    with pytest.raises(ConfigError, match=r"no such preset or folder.*qwen3-30b-a3b"):
        find_model("nothing")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="no JSON"):
        read_config(tmp_path / "config.json")
