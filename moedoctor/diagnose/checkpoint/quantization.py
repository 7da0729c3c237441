"""The quantization that the JSON files of a checkpoint declare, for the whole and for each module."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.diagnose.checkpoint.checkpoint import JsonFile
from moedoctor.diagnose.checkpoint.name_patterns import Patterns
from moedoctor.models.config_fields import find_text_config

ALGOS: Mapping[str, str] = {
    name: scheme
    for scheme, names in {
        "fp8": "FP8 FP8_PER_CHANNEL_PER_TOKEN FP8_PB_WO FP8_PB_REAL MXFP8",
        "nvfp4": "NVFP4 NVFP4_AWQ NVFP4_SVD NVFP4_SVDQUANT W4A16_NVFP4 W4A8_NVFP4_FP8",
        "int": "W4A16_AWQ W4A8_AWQ INT4_AWQ INT8_SQ INT8_WO W8A16 W8A8_SQ_PER_CHANNEL",
        "mixed": "MIXED_PRECISION",
    }.items()
    for name in names.split()
}
"""ModelOpt's names -> scheme of the tensors."""
_STATIC_INPUTS = frozenset({"FP8", "NVFP4", "NVFP4_AWQ"})
_MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "modelopt_mxfp8")
_JUDGED = frozenset((*_MODELOPT, "compressed-tensors", "fp8"))
METHODS = _JUDGED | {
    "mxfp4", "gpt_oss_mxfp4", "awq", "gptq", "quark", "bitsandbytes", "auto-round", "auto_round", "torchao",
    "humming"
}  # fmt: skip
"""The `quant_method` values that vLLM, Transformers and their exporters know."""
_MOST_GROUPS = 64
_MOST_LISTED = 500_000
_MOST_PATTERNS = 1000
"""Patterns that are tried on each module."""
_CLASS = re.compile(r"[A-Z]\w{0,99}", re.ASCII)
_OUTER = ("model.", "language_model.")
"""Prefixes that exporters put before a module's name or leave out."""
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Projection -> the layer into which an engine fuses it; a list may name that layer instead."""


@dataclass(frozen=True)
class Rule:
    """The quantization of some modules."""

    name: str | None
    """ModelOpt's `quant_algo` in upper case, if there is one."""
    scheme: str | None
    """``nvfp4``, ``fp8``, ``int``, ``mixed``; None if it is not known."""
    static_inputs: bool
    """True if each of these modules needs an input scale."""
    group_size: int | None
    """The declared number of weights that share a block scale."""
    block: tuple[int, int] | None = None
    """Rows and columns of a weight's block, if scales are per block of a matrix."""
    targets: tuple[str, ...] = ()
    """compressed-tensors' targets: module names, ``re:`` patterns, class names; empty for all modules."""


UNCLEAR = Rule(None, None, False, None)
"""The rule of a module for which the files do not name one clearly."""


@dataclass
class Rules:
    """The rule of each module, by a list of modules (`layers`) or by the targets of groups."""

    layers: Mapping[str, Rule] | None
    """ModelOpt's `quantized_layers`, if there is one."""
    groups: Sequence[Rule] = ()

    def __post_init__(self) -> None:
        self.find = functools.cache(self._search)
        """Returns the rule of a module: None if it is not quantized, UNCLEAR if the files do not decide."""
        self._bare = {_strip_prefixes(name): rule for name, rule in (self.layers or {}).items()}
        # Experts in one tensor may be listed one by one.
        self._experts = {
            name.partition(".experts.")[0] + ".experts": rule
            for name, rule in self._bare.items()
            if ".experts." in name
        }
        names = [[target for target in rule.targets if not _CLASS.fullmatch(target)] for rule in self.groups]
        patterns = [name for group in names for name in group if name.startswith("re:") or "*" in name]
        if len(patterns) > _MOST_PATTERNS:
            self.not_read, self._patterns, self._classes = patterns[:1], [], []
            return
        self._patterns = [Patterns(group, substrings=False) for group in names]
        self.not_read = [pattern for group in self._patterns for pattern in group.not_read]
        self._classes = [
            rule
            for rule, group in zip(self.groups, names, strict=True)
            if not rule.targets or len(group) < len(rule.targets)
        ]

    def _search(self, module: str) -> Rule | None:
        if self.layers is not None:
            parts = _strip_prefixes(module).split(".")
            names = [".".join(parts[:size]) for size in range(len(parts), 0, -1)]
            if parts[-1] in _FUSED:
                names.insert(1, ".".join((*parts[:-1], _FUSED[parts[-1]])))
            listed = next((self._bare[name] for name in names if name in self._bare), None)
            fused_experts = listed is None and parts[-2:-1] == ["experts"]
            return self._experts.get(names[1]) if fused_experts else listed
        if self.not_read:
            return UNCLEAR
        # A name beats a class: the files do not say of which class a module is.
        for rule, patterns in zip(self.groups, self._patterns, strict=True):
            if patterns.match(module):
                return rule
        if len(self._classes) > 1:
            return UNCLEAR
        return self._classes[0] if self._classes else None


def _strip_prefixes(name: str) -> str:
    while name.startswith(_OUTER):
        name = name.partition(".")[2]
    return name


@dataclass(frozen=True)
class Declared:
    """The quantization that one file declares."""

    file: JsonFile
    method: str | None
    algo: str | None
    """ModelOpt's `quant_algo` in upper case, or compressed-tensors' format."""
    rules: Rules
    """The rule of each module."""
    kv: str | None
    """``FP8`` or another type that needs scales; None if none is declared."""
    group_size: int | None
    excluded: tuple[str, ...]
    exclude_key: str

    @property
    def scheme(self) -> str | None:
        """``nvfp4``, ``fp8``, ``int``, ``mixed`` for several; None if it is not known."""
        if self.rules.layers is not None or len({rule.scheme for rule in self.rules.groups}) > 1:
            return "mixed"
        return self.rules.groups[0].scheme if self.rules.groups else None

    @property
    def judged(self) -> bool:
        """True if the layout is checked in full."""
        return self.method in _JUDGED

    @property
    def excluded_patterns(self) -> Patterns:
        """The list of excluded modules. vLLM takes a plain name in ModelOpt's list as a substring."""
        return self.make_patterns(self.excluded)

    def make_patterns(self, names: Sequence[str]) -> Patterns:
        return Patterns(names, substrings=self.method != "compressed-tensors")


def find_quantization_config(config: Mapping[str, Any]) -> Any:
    """Return the value of ``quantization_config`` in config.json, at its top or in the language model's part.

    An object is preferred; None if there is neither.
    """
    values = [part.get("quantization_config") for part in (config, find_text_config(config))]
    given = [value for value in values if value is not None]
    return next((value for value in given if isinstance(value, dict)), given[0] if given else None)


def from_config(file: JsonFile) -> Declared | None:
    value = find_quantization_config(file.value)
    if not isinstance(value, dict):
        return None
    method = value.get("quant_method")
    method = method.lower() if isinstance(method, str) else None
    if "config_groups" in value and method in (None, "compressed-tensors"):
        groups, algo = read_groups(value), value.get("format")
        algo, size = algo if isinstance(algo, str) else None, groups[0].group_size if groups else None
        return _declare(file, value, method, algo, Rules(None, groups), size, "ignore")
    if method == "fp8":
        static = value.get("activation_scheme") == "static"
        rule = Rule("fp8", "fp8", static, None, _read_block(value.get("weight_block_size")))
        keys = ("modules_to_not_convert", "ignored_layers")
        return _declare(file, value, method, "fp8", Rules(None, (rule,)), None, *keys)
    inner = value.get("quantization")
    return _read_modelopt(file, inner if isinstance(inner, dict) else value, method)


def from_hf_quant(file: JsonFile | None) -> Declared | None:
    """Return what hf_quant_config.json declares, or None without that file."""
    if file is None:
        return None
    value = file.value.get("quantization")
    return _read_modelopt(file, value if isinstance(value, dict) else {}, "modelopt")


def _read_modelopt(file: JsonFile, value: Mapping[str, Any], method: str | None) -> Declared:
    algo, groups = _read_upper(value.get("quant_algo")), read_groups(value)
    size = value.get("group_size")
    if size is None and groups:
        size = groups[0].group_size
    size = _read_integer(size)
    rule = Rule(algo, ALGOS.get(algo) if algo else None, algo in _STATIC_INPUTS, size)
    rules = Rules(None, (rule,))
    if rule.scheme == "mixed":
        # Without a list of layers, the groups that ModelOpt writes for other readers have the rules.
        layers = value.get("quantized_layers")
        rules = Rules(None, groups) if layers is None and groups else Rules(read_layers(layers))
    kv = value.get("kv_cache_quant_algo")
    kv = kv.upper() if isinstance(kv, str) and kv.lower() not in ("", "none", "auto") else None
    return _declare(file, value, method, algo, rules, size, "exclude_modules", "ignore", kv=kv)


def _declare(
    file: JsonFile,
    value: Mapping[str, Any],
    method: str | None,
    algo: str | None,
    rules: Rules,
    size: int | None,
    *keys: str,
    kv: str | None = None,
) -> Declared:
    """Return a declaration whose excluded modules are under the first of `keys` that `value` has."""
    key = next((key for key in keys if key in value), keys[-1])
    excluded = _read_strings(value.get(key))
    return Declared(file, method, algo, rules, kv or _read_kv_scheme(value), size, excluded, key)


def read_layers(layers: Any) -> dict[str, Rule]:
    """Return the rules of ModelOpt's `quantized_layers`, by module."""
    rules: dict[str, Rule] = {}
    for module in _read_strings(list(layers), _MOST_LISTED) if isinstance(layers, dict) else ():
        entry = layers[module] if isinstance(layers[module], dict) else {}
        algo = _read_upper(entry.get("quant_algo"))
        scheme = ALGOS.get(algo) if algo else None
        scheme = None if scheme == "mixed" else scheme
        rules[module] = Rule(algo, scheme, algo in _STATIC_INPUTS, _read_integer(entry.get("group_size")))
    return rules


def read_groups(value: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Return the rules of compressed-tensors' `config_groups`, in their order."""
    groups = value.get("config_groups")
    if not isinstance(groups, dict):
        return ()
    all_groups = [group if isinstance(group, dict) else {} for group in groups.values()]
    # A group without weights is about activations alone, of attention for example.
    weighted = [group for group in all_groups if group.get("weights")] or all_groups
    return tuple(_read_group(group) for group in weighted[:_MOST_GROUPS])


def _read_group(group: Mapping[str, Any]) -> Rule:
    weights, inputs = (
        value if isinstance(value := group.get(key), dict) else {} for key in ("weights", "input_activations")
    )
    bits, kind = weights.get("num_bits"), weights.get("type")
    scheme = None
    if kind == "int":
        scheme = "int"
    elif kind == "float" and type(bits) is int:
        scheme = {4: "nvfp4", 8: "fp8"}.get(bits)
    static = inputs.get("num_bits") == 4 if scheme == "nvfp4" else inputs.get("dynamic") is False
    block, size = _read_block(weights.get("block_structure")), _read_integer(weights.get("group_size"))
    return Rule(None, scheme, static, size, block, _read_strings(group.get("targets"), _MOST_LISTED))


def _read_block(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        return None
    return value[0], value[1]


def _read_kv_scheme(value: Mapping[str, Any]) -> str | None:
    kv = value.get("kv_cache_scheme")
    if not isinstance(kv, dict) or kv.get("dynamic") is True:
        return None
    return "FP8" if kv.get("num_bits") == 8 and kv.get("type") == "float" else None


def _read_integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _read_upper(value: Any) -> str | None:
    return value.upper() if isinstance(value, str) and value else None


def _read_strings(value: Any, limit: int = 20_000) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    return tuple(item for item in value if isinstance(item, str) and len(item) <= 500)[:limit]
