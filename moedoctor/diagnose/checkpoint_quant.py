"""What the JSON files of a checkpoint say about its quantisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.diagnose.checkpoint import Checkpoint, JsonFile

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
}
"""ModelOpt's names -> scheme of the tensors."""
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
    scheme: str | None
    """``nvfp4``, ``fp8``, ``int``, ``mixed``; None where it is not known."""
    static_inputs: bool
    """Whether every quantised module needs an input scale."""
    kv: str | None
    """``FP8`` or another type that needs scales; None where none is declared."""
    group_size: int | None
    block: tuple[int, int] | None
    """Rows and columns of a weight's block, where scales are per block of a matrix."""
    excluded: tuple[str, ...]
    exclude_key: str
    layers: frozenset[str]
    """Modules of MIXED_PRECISION that are quantised."""

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
    algo = found.get("quant_algo")
    algo = algo.upper() if isinstance(algo, str) and algo else None
    key = "exclude_modules" if "exclude_modules" in found else "ignore"
    kv = found.get("kv_cache_quant_algo")
    layers = found.get("quantized_layers")
    group = found.get("group_size")
    if group is None:
        group = _first_group(found).get("weights", {}).get("group_size")
    return Declared(
        file,
        method,
        algo,
        ALGOS.get(algo) if algo else None,
        algo in _STATIC_INPUTS,
        kv.upper() if isinstance(kv, str) and kv.lower() not in ("", "none", "auto") else _kv_scheme(found),
        group if type(group) is int else None,
        None,
        _strings(found.get(key)),
        key,
        frozenset(_strings(list(layers))) if isinstance(layers, dict) else frozenset(),
    )


def _compressed(file: JsonFile, found: Mapping[str, Any], method: str | None) -> Declared:
    group = _first_group(found)
    weights, inputs = group.get("weights", {}), group.get("input_activations", {})
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
    block = tuple(structure) if isinstance(structure, list) and len(structure) == 2 else None
    algo = found.get("format")
    return Declared(
        file,
        method,
        algo if isinstance(algo, str) else None,
        scheme,
        static,
        _kv_scheme(found),
        size if type(size) is int else None,
        block if block and all(type(one) is int and one > 0 for one in block) else None,
        _strings(found.get("ignore")),
        "ignore",
        frozenset(),
    )


def _block_fp8(file: JsonFile, found: Mapping[str, Any]) -> Declared:
    size = found.get("weight_block_size")
    block = (size[0], size[1]) if isinstance(size, list) and len(size) == 2 else None
    if block and not all(type(one) is int and one > 0 for one in block):
        block = None
    key = "modules_to_not_convert" if "modules_to_not_convert" in found else "ignored_layers"
    static = found.get("activation_scheme") == "static"
    excluded = _strings(found.get(key))
    return Declared(
        file, "fp8", "fp8", "fp8", static, _kv_scheme(found), None, block, excluded, key, frozenset()
    )


def _kv_scheme(found: Mapping[str, Any]) -> str | None:
    kv = found.get("kv_cache_scheme")
    if not isinstance(kv, dict) or kv.get("dynamic") is True:
        return None
    return "FP8" if kv.get("num_bits") == 8 and kv.get("type") == "float" else None


def _first_group(found: Mapping[str, Any]) -> dict[str, Any]:
    """The first group of `config_groups`, with objects in place of anything else."""
    groups = found.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    if not isinstance(first, dict):
        return {}
    return {key: value for key, value in first.items() if isinstance(value, dict)}


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    return tuple(one for one in value if isinstance(one, str) and len(one) <= 500)[:20_000]
