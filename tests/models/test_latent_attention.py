"""Multi-head latent attention: what DeepSeek-V3 keeps of a token, and what is refused."""

import dataclasses

import pytest

from moedoctor.diagnose.plan.kv_cache import kv_cache
from moedoctor.models.config import shape_of
from moedoctor.models.config_fields import ConfigError

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "vocab_size": 129_280, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu",
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "intermediate_size": 18_432, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "tie_word_embeddings": False, "max_position_embeddings": 163_840
}  # fmt: skip


@pytest.mark.parametrize(("kv_bytes", "expected"), [(2, 70_272), (1, 35_136)])
def test_one_latent_a_token_and_layer_whatever_the_heads(kv_bytes, expected):
    """(512 + 64) x 61 layers x bytes of an element."""
    shape = shape_of(DEEPSEEK_V3, "deepseek-v3", "here")
    kv = kv_cache(shape, available_bytes=expected * 16 * 100, context=1600, kv_bytes=kv_bytes)
    assert kv.bytes_per_token == expected
    assert (kv.blocks, kv.tokens_printed_to_0_20, kv.concurrency) == (100, 1600, 1.0)


def test_its_parameters_are_the_published_671_billion():
    shape = shape_of(DEEPSEEK_V3, "deepseek-v3", "here")
    assert (shape.expert_parameters() + shape.other_parameters()) / 1e9 == pytest.approx(671.0, rel=0.001)
    assert shape.experts.count == 58


def test_queries_need_not_be_compressed():
    """DeepSeek-V2-Lite has no q_lora_rank: queries are one product."""
    shape = shape_of({**DEEPSEEK_V3, "q_lora_rank": None}, "lite", "here")
    assert shape.attention[0].query_rank is None
    compressed = dataclasses.replace(shape.attention[0], query_rank=1536)
    more = shape.attention[0].parameters(7168) - compressed.parameters(7168)
    assert more == 7168 * 128 * 192 - 1536 * (7168 + 128 * 192)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "minicpm3"}, "model_type is 'minicpm3', expected deepseek_v2"),
        ({"index_topk": 2048}, "index_topk is 2048, expected latent attention alone"),
        ({"linear_attn_config": {}}, "linear_attn_config is {}"),
        ({"full_attention_interval": 4}, "kv_lora_rank .* beside layers of other kinds"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
    ],
)
def test_latent_attention_that_is_more_than_that_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        shape_of({**DEEPSEEK_V3, **change}, "any", "here")
