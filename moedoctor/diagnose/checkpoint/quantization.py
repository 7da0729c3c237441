"""What the JSON files of a checkpoint say about its quantisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.diagnose.checkpoint.checkpoint import Checkpoint, JsonFile
from moedoctor.diagnose.checkpoint.rules import Rule, Rules

ALGOS: Mapping[str, str] = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "NVFP4_SVD": "nvfp4",
    "NVFP4_SVDQUANT": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "W4A8_NVFP4_FP8": "nvfp4",
    "MXFP8": "fp8",
    "MIXED_PRECISION": "mixed",
    "W4A16_AWQ": "int",
    "W4A8_AWQ": "int",
    "INT4_AWQ": "int",
    "INT8_SQ": "int",
    "INT8_WO": "int",
    "W8A16": "int",
    "W8A8_SQ_PER_CHANNEL": "int",
    "FP8_PB_REAL": "fp8",
}
"""ModelOpt's names -> scheme of the tensors."""
_MOST_GROUPS = 64
_MOST_LISTED = 500_000
_STATIC_INPUTS = frozenset({"FP8", "NVFP4", "NVFP4_AWQ"})
_JUDGED = frozenset(
    {
        "modelopt",
        "modelopt_fp4",
        "modelopt_fp8",
        "modelopt_mixed",
        "modelopt_mxfp8",
        "compressed-tensors",
        "fp8",
    }
)
METHODS = _JUDGED | frozenset(
    {
        "mxfp4",
        "gpt_oss_mxfp4",
        "awq",
        "gptq",
        "quark",
        "bitsandbytes",
        "auto-round",
        "auto_round",
        "torchao",
        "humming",
    }
)
"""The `quant_method` values that vLLM, Transformers and their exporters know."""


@dataclass(frozen=True)
class Declared:
    """One file's statement."""

    file: JsonFile
    method: str | None
    algo: str | None
    """ModelOpt's `quant_algo` in upper case, or compressed-tensors' format."""
    rules: Rules
    """How each module is quantised."""
    kv: str | None
    """``FP8`` or another type that needs scales; None where none is declared."""
    group_size: int | None
    excluded: tuple[str, ...]
    exclude_key: str

    @property
    def scheme(self) -> str | None:
        """``nvfp4``, ``fp8``, ``int``, ``mixed`` for several; None where it is not known."""
        if self.rules.layers is not None or len({one.scheme for one in self.rules.groups}) > 1:
            return "mixed"
        return self.rules.groups[0].scheme if self.rules.groups else None

    @property
    def judged(self) -> bool:
        """Whether the layout is one of those that are checked in full."""
        return self.method in _JUDGED


def from_config(checkpoint: Checkpoint) -> Declared | None:
    """What config.json says; None where it says nothing."""
    config = checkpoint.config.value
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        text = config.get("text_config")
        found = text.get("quantization_config") if isinstance(text, dict) else None
    if not isinstance(found, dict):
        return None
    method = found.get("quant_method")
    method = method.lower() if isinstance(method, str) else None
    if "config_groups" in found and method in (None, "compressed-tensors"):
        return _compressed(checkpoint.config, found, method)
    if method == "fp8":
        return _block_fp8(checkpoint.config, found)
    inner = found.get("quantization")
    return _modelopt(checkpoint.config, inner if isinstance(inner, dict) else found, method)


def from_hf_quant(checkpoint: Checkpoint) -> Declared | None:
    """What hf_quant_config.json says; None where there is none."""
    if checkpoint.hf_quant is None:
        return None
    found = checkpoint.hf_quant.value.get("quantization")
    return _modelopt(checkpoint.hf_quant, found if isinstance(found, dict) else {}, "modelopt")


def _modelopt(file: JsonFile, found: Mapping[str, Any], method: str | None) -> Declared:
    algo = _upper(found.get("quant_algo"))
    key = "exclude_modules" if "exclude_modules" in found else "ignore"
    kv = found.get("kv_cache_quant_algo")
    groups, listed = _groups(found), found.get("quantized_layers")
    group = found.get("group_size")
    if group is None:
        group = groups[0].group_size if groups else None
    group = group if type(group) is int else None
    rule = Rule(algo, ALGOS.get(algo) if algo else None, algo in _STATIC_INPUTS, group)
    rules = Rules(None, (rule,))
    if rule.scheme == "mixed":
        # Without a list, the groups that ModelOpt writes for other readers say it.
        rules = Rules(None, groups) if listed is None and groups else Rules(_listed(listed))
    return Declared(
        file,
        method,
        algo,
        rules,
        kv.upper() if isinstance(kv, str) and kv.lower() not in ("", "none", "auto") else _kv_scheme(found),
        group,
        _strings(found.get(key)),
        key,
    )


def _listed(layers: Any) -> dict[str, Rule]:
    """`quantized_layers`: module -> how it is quantised."""
    rules: dict[str, Rule] = {}
    for module in _strings(list(layers), _MOST_LISTED) if isinstance(layers, dict) else ():
        entry = layers[module] if isinstance(layers[module], dict) else {}
        algo, size = _upper(entry.get("quant_algo")), entry.get("group_size")
        scheme = ALGOS.get(algo) if algo else None
        scheme = None if scheme == "mixed" else scheme
        rules[module] = Rule(algo, scheme, algo in _STATIC_INPUTS, size if type(size) is int else None)
    return rules


def _compressed(file: JsonFile, found: Mapping[str, Any], method: str | None) -> Declared:
    groups, algo = _groups(found), found.get("format")
    return Declared(
        file,
        method,
        algo if isinstance(algo, str) else None,
        Rules(None, groups),
        _kv_scheme(found),
        groups[0].group_size if groups else None,
        _strings(found.get("ignore")),
        "ignore",
    )


def _groups(found: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The groups of compressed-tensors' `config_groups`, in their order."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict):
        return ()
    made = [one if isinstance(one, dict) else {} for one in groups.values()]
    # A group without weights is about activations alone, of attention for example.
    about = [one for one in made if one.get("weights")] or made
    return tuple(_group(one) for one in about[:_MOST_GROUPS])


def _group(found: Mapping[str, Any]) -> Rule:
    weights, inputs = (
        one if isinstance(one := found.get(key), dict) else {} for key in ("weights", "input_activations")
    )
    bits, kind = weights.get("num_bits"), weights.get("type")
    scheme = None
    if kind == "int":
        scheme = "int"
    elif kind == "float" and type(bits) is int:
        scheme = {4: "nvfp4", 8: "fp8"}.get(bits)
    if scheme == "nvfp4":
        static = bool(inputs) and inputs.get("num_bits") == 4
    else:
        static = bool(inputs) and inputs.get("dynamic") is False
    size = weights.get("group_size")
    structure = weights.get("block_structure")
    block = (structure[0], structure[1]) if isinstance(structure, list) and len(structure) == 2 else None
    return Rule(
        None,
        scheme,
        static,
        size if type(size) is int else None,
        block if block and all(type(one) is int and one > 0 for one in block) else None,
        _strings(found.get("targets"), _MOST_LISTED),
    )


def _block_fp8(file: JsonFile, found: Mapping[str, Any]) -> Declared:
    size = found.get("weight_block_size")
    block = (size[0], size[1]) if isinstance(size, list) and len(size) == 2 else None
    if block and not all(type(one) is int and one > 0 for one in block):
        block = None
    key = "modules_to_not_convert" if "modules_to_not_convert" in found else "ignored_layers"
    rule = Rule("fp8", "fp8", found.get("activation_scheme") == "static", None, block)
    excluded = _strings(found.get(key))
    return Declared(file, "fp8", "fp8", Rules(None, (rule,)), _kv_scheme(found), None, excluded, key)


def _kv_scheme(found: Mapping[str, Any]) -> str | None:
    kv = found.get("kv_cache_scheme")
    if not isinstance(kv, dict) or kv.get("dynamic") is True:
        return None
    return "FP8" if kv.get("num_bits") == 8 and kv.get("type") == "float" else None


def _upper(value: Any) -> str | None:
    return value.upper() if isinstance(value, str) and value else None


def _strings(value: Any, limit: int = 20_000) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    return tuple(one for one in value if isinstance(one, str) and len(one) <= 500)[:limit]
