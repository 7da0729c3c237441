"""The tensors of a checkpoint grouped by module, and how each module is quantised by its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moedoctor.diagnose.checkpoint.checkpoint import Checkpoint
from moedoctor.diagnose.checkpoint.safetensors_header import TensorInfo

Parts = dict[str, TensorInfo]
"""Last part of the name (``weight``, ``weight_scale``, …) -> tensor."""
BLOCK = 16
FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
SCALES = frozenset(
    {
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_global_scale",
        "input_scale",
        "input_global_scale",
    }
)
KV_SCALES = frozenset({"k_scale", "v_scale", "kv_scale"})
GLOBAL_SCALES = ("weight_scale_2", "weight_global_scale")
INPUT_SCALES = ("input_scale", "input_global_scale")
PAIRS = {"gate_proj": "up_proj", "w1": "w3"}
"""Gate -> up, by the names that checkpoints use."""
_PROJECTION = re.compile(r"(?:\w*_proj|w[123])", re.ASCII)
_FUSED_EXPERTS = re.compile(
    r"(?P<projection>gate_up_proj|down_proj)"
    r"(?:_(?P<part>weight_scale|weight_scale_2|weight_scale_inv|input_scale|scale_inv|scale|bias))?",
    re.ASCII,
)
"""All experts of a layer in one tensor, (experts, N, K); ``experts.gate_up_proj_weight_scale`` beside it."""
_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d{1,9})\.(?P<projection>\w+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ExpertName:
    """Where an expert's projection belongs."""

    layer: str
    """``model.layers.3.mlp.experts``."""
    expert: int
    projection: str


def group(checkpoint: Checkpoint) -> dict[str, Parts]:
    """Module -> its tensors. ``experts.gate_up_proj``, a tensor of all experts, is a module with a weight."""
    modules: dict[str, Parts] = {}
    for name, info in checkpoint.tensors.items():
        module, _, part = name.rpartition(".")
        if module.endswith(".experts") and (fused := _FUSED_EXPERTS.fullmatch(part)):
            module, part = f"{module}.{fused['projection']}", fused["part"] or "weight"
        modules.setdefault(module, {})[part] = info
    return modules


def tensor_name(module: str, part: str) -> str:
    """The name that a module's tensor has in its file."""
    if not fused_experts(module):
        return f"{module}.{part}"
    return module if part == "weight" else f"{module}_{part}"


def expert_name(module: str) -> ExpertName | None:
    """What part of which expert a module is; None where it is none."""
    found = _EXPERT.fullmatch(module)
    return None if found is None else ExpertName(found["layer"], int(found["expert"]), found["projection"])


def fused_experts(module: str) -> bool:
    """Whether a module is one tensor of all experts of a layer."""
    return module.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def is_projection(module: str) -> bool:
    """Whether a module is a linear layer of the kind that quantisation is about: no router, no head."""
    return _PROJECTION.fullmatch(module.rpartition(".")[2]) is not None


def scheme(parts: Mapping[str, TensorInfo]) -> str | None:
    """``nvfp4``, ``fp8``, ``int`` or ``none`` by the tensors of a module; None where it has no weight."""
    packed = parts.get("weight_packed")
    if packed is not None:
        return "nvfp4" if packed.dtype == "U8" else "int"
    if "qweight" in parts:
        return "int"
    weight = parts.get("weight")
    if weight is None:
        return None
    if weight.dtype in ("U8", "F4"):
        return "nvfp4"
    if weight.dtype.startswith("F8_"):
        return "fp8"
    if weight.dtype in ("I8", "I32"):
        return "int"
    return "none"


def shape_of(parts: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
    """(N, K) of the unpacked weight; None where it is not a matrix."""
    info = parts.get("weight_packed") or parts.get("weight")
    if info is None or len(info.shape) != 2:
        return None
    rows, columns = info.shape
    per_element = {"U8": 2, "I32": 8}.get(info.dtype, 1)
    return rows, columns * per_element


def block_of(parts: Mapping[str, TensorInfo]) -> float | None:
    """How many weights of an NVFP4 module share a block scale; None where it has no such scales."""
    weight, scales = parts.get("weight_packed") or parts.get("weight"), parts.get("weight_scale")
    if weight is None or scales is None or not scales.elements:
        return None
    return weight.elements * (2 if weight.dtype == "U8" else 1) / scales.elements


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that is about the language model."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), dict):
            inner: Mapping[str, Any] = config[key]
            return inner
    return config


def whole_number(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first of `keys` that is a positive whole number."""
    for key in keys:
        value = config.get(key)
        if type(value) is int and 0 < value < 1 << 32:
            return value
    return None
