"""Shapes read from config.json: parameter counts, latent attention, and configs that cannot be read."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.plan.kv_cache import PlanError, fit_kv_cache
from moedoctor.diagnose.plan.plan import GIB, PlanRequest, plan
from moedoctor.models.config import read_config, shape_of
from moedoctor.models.config_fields import TEXT_CONFIGS, ConfigError
from moedoctor.models.presets import find_model, list_presets, load_preset, read_preset

TINY = {
    "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "intermediate_size": 128,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "vocab_size": 129_280, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu",
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "intermediate_size": 18_432, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "tie_word_embeddings": False, "max_position_embeddings": 163_840
}  # fmt: skip
LATENT = {
    **TINY, "model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_shared_experts": 1
}  # fmt: skip
CONFIGS = {
    "tiny": TINY,
    "latent": LATENT,
    "sliding": {**TINY, "use_sliding_window": True, "sliding_window": 64},
    **{name: read_preset(name) for name in list_presets()},
}


class Recorder(Mapping[str, Any]):
    """A config that records which of its fields are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.asked = values, dict[str, None]()

    def __getitem__(self, name: str) -> Any:
        self.asked[name] = None
        return self.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


def list_asked(values: Mapping[str, Any]) -> list[str]:
    recorder = Recorder(values)
    shape_of(recorder, "any", "here")
    return list(recorder.asked)


KNOWN = [(config, key) for config, values in CONFIGS.items() for key in list_asked(values)]
NAMED = ("hidden_act", "hidden_activation", "mlp_hidden_act", "_source")
"""Fields that take any text."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def test_the_reader_knows_these_fields():
    keys = {key for _, key in KNOWN}
    assert {"layer_types", "decoder_sparse_step", "kv_lora_rank", "linear_conv_kernel_dim"} <= keys
    assert len(keys) > 50


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
    shape = load_preset(name.upper())
    total = shape.count_expert_parameters() + shape.count_other_parameters()
    assert total / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.experts.layer.experts == experts
    assert name in list_presets()


@pytest.mark.parametrize(
    ("named", "ours", "factor"),
    [("silu", "silu", 3), ("gelu_pytorch_tanh", "gelu_tanh", 3), ("swish", "silu", 3), ("relu2", "relu2", 2)],
)
def test_an_activation_decides_whether_there_is_a_gate(named, ours, factor):
    layer = shape_of({**TINY, "hidden_act": named}, "tiny", "here").experts.layer
    assert layer.activation == ours
    assert layer.expert_parameters == factor * 64 * 32


@pytest.mark.parametrize(
    "config", [{"text_config": {**TINY, "first_k_dense_replace": 1}}, {**TINY, "moe_layer_freq": 2}]
)
def test_a_nested_text_config_and_dense_layers_are_read(config):
    shape = shape_of(config, "tiny", "here")
    assert (shape.experts.count, shape.dense_parameters) == (2, 3 * 64 * 128)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (TINY, {"hidden_size": None}, "hidden_size is missing"),
        (TINY, {"num_experts": None}, "num_experts or n_routed_experts"),
        (TINY, {"num_experts_per_tok": 9}, "top_k: 9 is more than experts 8"),
        (TINY, {"hybrid_override_pattern": "MEX"}, "holds 'X'"),
        (TINY, {"num_hidden_layers": 10**13}, "num_hidden_layers is 10000000000000, expected .* 1 to 10000"),
        (TINY, {"head_dim": None, "num_attention_heads": 65}, "head_dim or attention_head_dim is 0"),
        (TINY, {"layer_types": ["full_attention"] * 2}, "has 2 layers and num_hidden_layers is 3"),
        (TINY, {"layer_types": ["full_attention", "chunked_attention", "moe"]}, "holds 'chunked_attention'"),
        (TINY, {"layer_types": ["moe", "mamba", "linear_attention"]}, "both mamba and linear_attention"),
        (TINY, {"hybrid_override_pattern": "M*-"}, "at least one E"),
        (TINY, {"first_k_dense_replace": 3}, "first_k_dense_replace 3 leaves none of 3 layers with experts"),
        (TINY, {"decoder_sparse_step": 5}, "decoder_sparse_step 5 leaves none"),
        (TINY, {"attention_chunk_size": 8192}, "is 8192, expected layer_types beside it"),
        (TINY, {"interleave_moe_layer_step": 2}, "is 2, expected 1: experts in every layer"),
        (DEEPSEEK_V3, {"model_type": "minicpm3"}, "model_type is 'minicpm3', expected deepseek_v2"),
        (DEEPSEEK_V3, {"index_topk": 2048}, "index_topk is 2048, expected latent attention alone"),
        (DEEPSEEK_V3, {"linear_attn_config": {}}, "linear_attn_config is {}"),
        (DEEPSEEK_V3, {"full_attention_interval": 4}, "kv_lora_rank .* beside layers of other kinds"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
    ],
)
def test_a_bad_config_field_is_named(base, change, message):
    with pytest.raises(ConfigError, match=message):
        shape_of({**base, **change}, "tiny", "here")


def test_the_names_of_layers_decide_what_they_are():
    kinds = ["sliding_attention", "sliding_attention", "attention"]
    shape = shape_of({**TINY, "layer_types": kinds, "sliding_window": 128}, "tiny", "here")
    assert [(layers.count, layers.sliding_window) for layers in shape.attention] == [(1, None), (2, 128)]


def test_a_folder_is_read_and_an_unknown_name_lists_the_presets(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert find_model(str(tmp_path)).hidden_size == 64
    with pytest.raises(ConfigError, match=r"no such preset or folder.*qwen3-30b-a3b"):
        find_model("nothing")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="no JSON"):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize(("kv_bytes", "expected"), [(2, 70_272), (1, 35_136)])
def test_one_latent_a_token_and_layer_whatever_the_heads(kv_bytes, expected):
    """(512 + 64) x 61 layers x bytes of an element."""
    shape = shape_of(DEEPSEEK_V3, "deepseek-v3", "here")
    kv = fit_kv_cache(shape, available_bytes=expected * 16 * 100, context=1600, kv_bytes=kv_bytes)
    assert kv.bytes_per_token == expected
    assert (kv.blocks, kv.tokens_printed_to_0_20, kv.concurrency) == (100, 1600, 1.0)


def test_its_parameters_are_the_published_671_billion():
    shape = shape_of(DEEPSEEK_V3, "deepseek-v3", "here")
    total = shape.count_expert_parameters() + shape.count_other_parameters()
    assert total / 1e9 == pytest.approx(671.0, rel=0.001)
    assert shape.experts.count == 58


def test_queries_need_not_be_compressed():
    """DeepSeek-V2-Lite has no q_lora_rank: queries are one product."""
    shape = shape_of({**DEEPSEEK_V3, "q_lora_rank": None}, "lite", "here")
    assert shape.attention[0].query_rank is None
    compressed = dataclasses.replace(shape.attention[0], query_rank=1536)
    more = shape.attention[0].count_parameters(7168) - compressed.count_parameters(7168)
    assert more == 7168 * 128 * 192 - 1536 * (7168 + 128 * 192)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_wrong_type_is_named_with_what_was_expected(config: str) -> None:
    for key in list_asked(CONFIGS[config]):
        size = isinstance(CONFIGS[config].get(key), int) and not isinstance(CONFIGS[config][key], bool)
        for wrong in (1.5, "4", [None], {"a": 1}, *((-1, True) if size else ())):
            if (key in TEXT_CONFIGS and isinstance(wrong, dict)) or (wrong == "4" and key in NAMED):
                continue
            with pytest.raises(ConfigError) as error:
                shape_of({**CONFIGS[config], key: wrong}, "any", "here")
            text = str(error.value)
            assert text.startswith("here: ")
            assert key in text, (key, wrong)
            assert "expected" in text
            assert "\n" not in text


@settings(max_examples=200)
@given(known=st.sampled_from(KNOWN), value=JSON | st.sampled_from(["4", "MEM*E", ["full_attention"] * 4]))
def test_any_field_value_gives_a_plan_or_a_one_line_error(known: tuple[str, str], value: Any) -> None:
    config, key = known
    try:
        shape = shape_of({**CONFIGS[config], key: value}, "any", "here")
        plan(PlanRequest(shape, "nvfp4", gpu_bytes=400 * GIB, context=shape.max_context or 100))
    except (ConfigError, PlanError) as raised:
        lines = str(raised).splitlines()
    else:
        lines = [""]
    assert len(lines) == 1
