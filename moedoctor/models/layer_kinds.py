"""What each layer of a model is, and which layers have a dense MLP in place of experts."""

from __future__ import annotations

from collections.abc import Sequence

from moedoctor.models.config_fields import ConfigError, Fields, short

_PATTERN = {"M": "mamba", "E": "moe", "*": "full_attention", "-": "mlp"}
_NAMES = {
    "attention": "full_attention",
    "full_attention": "full_attention",
    "sliding_attention": "sliding_attention",
    "linear_attention": "linear_attention",
    "mamba": "mamba",
    "moe": "moe",
    "mlp": "mlp",
}
"""Names that configs use -> ours. Of chunked attention and of convolutions we do not know the memory."""
_OTHER_PATTERNS = (
    "attention_chunk_size",
    "attn_layer_period",
    "attn_type_list",
    "hybrid_layer_pattern",
    "sliding_window_pattern",
)
"""Other ways to say that not every layer sees the whole context; which layers they mean is not read here."""
_MOST_LAYERS = 10_000


def layer_kinds(config: Fields) -> Sequence[str]:
    """What each layer is: full_attention, sliding_attention, linear_attention, mamba, moe or mlp.

    Raises ConfigError, also for a kind that is not known: to leave a layer out would make the plan wrong.
    """
    if "hybrid_override_pattern" in config:
        return _of_pattern(config)
    for name in ("layer_types", "layers_block_type"):
        if name in config:
            return _of_names(config, name)
    other = next((one for one in _OTHER_PATTERNS if one in config), None)
    if other is not None:
        raise config.error(other, config.values[other], "layer_types beside it, a name for every layer")
    count = config.integer("num_hidden_layers", most=_MOST_LAYERS)
    every = config.integer("full_attention_interval", default=0, least=0)
    if every:
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)]
    slides = config.flag("use_sliding_window") and config.integer("sliding_window", default=0, least=0)
    return ["sliding_attention" if slides else "full_attention"] * count


def dense_layers(config: Fields, kinds: Sequence[str]) -> Sequence[int]:
    """Indices of the layers that have a dense MLP in place of experts. Raises ConfigError."""
    first = config.integer("first_k_dense_replace", default=0, least=0)
    every = config.integer("moe_layer_freq", default=1)
    only = set(config.indices("mlp_only_layers"))
    step = config.integer("decoder_sparse_step", default=1)
    for name in ("interleave_moe_layer_step", "expert_layer_period"):
        if config.integer(name, default=1) != 1:
            raise config.error(name, config.values[name], "1: experts in every layer")
    return [i for i in range(len(kinds)) if i < first or i % every or i in only or (i + 1) % step]


def expert_layers(config: Fields, kinds: Sequence[str]) -> int:
    """How many layers have experts. Raises ConfigError where none has."""
    count = kinds.count("moe") if "moe" in kinds else len(kinds) - len(dense_layers(config, kinds))
    if not count:
        named = ("first_k_dense_replace", "moe_layer_freq", "mlp_only_layers", "decoder_sparse_step")
        given = " and ".join(f"{one} {short(config.values[one])}" for one in named if one in config)
        raise ConfigError(
            f"{config.where}: {given} leaves none of {len(kinds)} layers with experts, expected at least one"
        )
    return count


def _of_pattern(config: Fields) -> Sequence[str]:
    name = "hybrid_override_pattern"
    pattern = config.text(name, default="")
    unknown = sorted(set(pattern) - set(_PATTERN))
    if unknown:
        raise ConfigError(f"{config.where}: {name} holds {unknown[0]!r}, expected {' '.join(_PATTERN)}")
    if "E" not in pattern:
        raise config.error(name, pattern, "at least one E, a layer of experts")
    _check_count(config, name, len(pattern))
    return [_PATTERN[one] for one in pattern]


def _of_names(config: Fields, name: str) -> Sequence[str]:
    listed = config.texts(name)
    unknown = next((one for one in listed if one not in _NAMES), None)
    if unknown is not None:
        raise ConfigError(f"{config.where}: {name} holds {short(unknown)}, expected {', '.join(_NAMES)}")
    _check_count(config, name, len(listed))
    return [_NAMES[one] for one in listed]


def _check_count(config: Fields, name: str, count: int) -> None:
    layers = config.integer("num_hidden_layers", default=count, most=_MOST_LAYERS)
    if count != layers:
        raise ConfigError(
            f"{config.where}: {name} has {count} layers and num_hidden_layers is {layers}, "
            "expected the same number"
        )
