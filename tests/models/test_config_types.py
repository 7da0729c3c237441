"""Whatever stands in a config.json for a field that the reader knows: a shape, or one line that names it."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.plan.kv_cache import PlanError
from moedoctor.diagnose.plan.plan import GIB, PlanRequest, plan
from moedoctor.models.config import shape_of
from moedoctor.models.config_fields import TEXT_CONFIGS, ConfigError
from moedoctor.models.presets import names, preset_document

TINY = {
    "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128
}  # fmt: skip
LATENT = {
    **TINY, "model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_shared_experts": 1
}  # fmt: skip
CONFIGS = {
    "tiny": TINY,
    "latent": LATENT,
    "sliding": {**TINY, "use_sliding_window": True, "sliding_window": 64},
    **{name: preset_document(name) for name in names()},
}
_OBJECTS = TEXT_CONFIGS


class Recorder(Mapping[str, Any]):
    """A config that notes which of its fields are asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.asked = values, dict[str, None]()

    def __getitem__(self, name: str) -> Any:
        self.asked[name] = None
        return self.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


def asked(values: Mapping[str, Any]) -> list[str]:
    recorder = Recorder(values)
    shape_of(recorder, "any", "here")
    return list(recorder.asked)


KNOWN = [(config, key) for config, values in CONFIGS.items() for key in asked(values)]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def test_the_reader_knows_the_fields_that_this_is_about():
    keys = {key for _, key in KNOWN}
    assert {
        "layer_types",
        "mlp_only_layers",
        "decoder_sparse_step",
        "global_head_dim",
        "kv_lora_rank",
    } <= keys
    assert {"mamba_ssm_cache_dtype", "linear_conv_kernel_dim", "max_position_embeddings"} <= keys
    assert len(keys) > 50


@pytest.mark.parametrize(("config", "key"), KNOWN)
def test_a_wrong_type_is_named_with_what_was_expected(config: str, key: str) -> None:
    for wrong in (1.5, [None], {"a": 1}):
        if key in _OBJECTS and isinstance(wrong, dict):
            continue
        with pytest.raises(ConfigError) as error:
            shape_of({**CONFIGS[config], key: wrong}, "any", "here")
        text = str(error.value)
        assert text.startswith("here: ")
        assert key in text
        assert "expected" in text
        assert "\n" not in text


@settings(max_examples=600)
@given(known=st.sampled_from(KNOWN), value=JSON | st.sampled_from(["4", "MEM*E", ["full_attention"] * 4]))
def test_no_value_of_any_field_ends_in_anything_but_a_plan_or_one_line(
    known: tuple[str, str], value: Any
) -> None:
    config, key = known
    try:
        shape = shape_of({**CONFIGS[config], key: value}, "any", "here")
        plan(PlanRequest(shape, "nvfp4", gpu_bytes=400 * GIB, context=shape.max_context or 100))
    except (ConfigError, PlanError) as raised:
        lines = str(raised).splitlines()
    else:
        lines = [""]
    assert len(lines) == 1
