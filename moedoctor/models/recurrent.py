"""State and parameters of the recurrent layers of hybrid models, as vLLM's mamba_utils.py sizes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moedoctor.models.shape import RecurrentLayers

if TYPE_CHECKING:
    from moedoctor.models.config_fields import Fields

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _state_bytes(config: Fields, *names: str) -> int:
    # vLLM falls back to float32 for the recurrent state: the only type known to be exact enough.
    named = config.text(*names, default="float32")
    if named not in _BYTES:
        raise config.error(" or ".join(names), named, ", ".join(_BYTES))
    return _BYTES[named]


def mamba2_layers(config: Fields, count: int, hidden: int) -> RecurrentLayers:
    """Mamba 2: the convolution sees x, B and C of the last tokens; the state is [heads, head_dim, state]."""
    heads = config.integer("mamba_num_heads")
    head_dim = config.integer("mamba_head_dim")
    groups = config.integer("n_groups", "mamba_n_groups")
    state = config.integer("ssm_state_size", "mamba_d_state")
    kernel = config.integer("conv_kernel", "mamba_d_conv")
    inner = heads * head_dim
    conv = inner + 2 * groups * state
    return RecurrentLayers(
        count=count,
        conv_elements=conv * (kernel - 1),
        state_elements=heads * head_dim * state,
        state_bytes=_state_bytes(config, "mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
        parameters_each=hidden * (inner + conv + heads) + inner * hidden + conv * kernel,
    )


def gated_delta_layers(config: Fields, count: int, hidden: int) -> RecurrentLayers:
    """Gated delta net: the convolution sees q, k and v; the state is [value heads, value dim, key dim]."""
    key_heads = config.integer("linear_num_key_heads")
    value_heads = config.integer("linear_num_value_heads")
    key_dim = config.integer("linear_key_head_dim")
    value_dim = config.integer("linear_value_head_dim")
    kernel = config.integer("linear_conv_kernel_dim")
    values = value_heads * value_dim
    conv = 2 * key_heads * key_dim + values
    return RecurrentLayers(
        count=count,
        conv_elements=conv * (kernel - 1),
        state_elements=value_heads * value_dim * key_dim,
        state_bytes=_state_bytes(config, "mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
        parameters_each=hidden * (conv + values + 2 * value_heads) + values * hidden + conv * kernel,
    )
