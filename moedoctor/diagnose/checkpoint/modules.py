"""The tensors of a checkpoint grouped by module, and the quantization of each module by its tensors."""

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
GLOBAL_SCALES = ("weight_scale_2", "weight_global_scale")
INPUT_SCALES = ("input_scale", "input_global_scale")
SCALES = frozenset({"weight_scale", "weight_scale_inv", *GLOBAL_SCALES, *INPUT_SCALES})
KV_SCALES = frozenset({"k_scale", "v_scale", "kv_scale"})
PAIRS = {"gate_proj": "up_proj", "w1": "w3"}
"""Gate -> up, by the names that checkpoints use."""
_PROJECTION = re.compile(r"(?:\w*_proj|w[123])", re.ASCII)
_FUSED_EXPERTS = re.compile(
    r"(?P<projection>gate_up_proj|down_proj)"
    r"(?:_(?P<part>weight_scale|weight_scale_2|weight_scale_inv|input_scale|scale_inv|scale|bias))?",
    re.ASCII,
)
"""All experts of a layer in one tensor, [experts, N, K]; ``experts.gate_up_proj_weight_scale`` beside it."""
_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d{1,9})\.(?P<projection>\w+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ExpertName:
    """One projection of one expert."""

    layer: str
    """``model.layers.3.mlp.experts``."""
    expert: int
    projection: str


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer, or all experts of a layer in one tensor."""

    name: str
    parts: Parts
    kind: str | None
    """``nvfp4``, ``fp8``, ``int`` or ``none`` by its tensors; None without a weight."""
    weight: TensorInfo | None
    """``weight`` or ``weight_packed``."""
    expert: ExpertName | None

    @property
    def stored(self) -> TensorInfo:
        """The weight in any layout, also AWQ's and GPTQ's ``qweight``. Raises KeyError without a weight."""
        return self.weight or self.parts["qweight"]

    @property
    def fused_experts(self) -> bool:
        """True if all experts of a layer are in this one tensor."""
        return self.name.endswith((".experts.gate_up_proj", ".experts.down_proj"))

    @property
    def is_projection(self) -> bool:
        """True if its name belongs to a linear layer that is usually quantized: no router, no head."""
        return _PROJECTION.fullmatch(self.name.rpartition(".")[2]) is not None

    @property
    def shape(self) -> tuple[int, int] | None:
        """[N, K] of the unpacked weight, or None if it is not a matrix."""
        if self.weight is None or len(self.weight.shape) != 2:
            return None
        rows, columns = self.weight.shape
        return rows, columns * {"U8": 2, "I32": 8}.get(self.weight.dtype, 1)

    @property
    def block(self) -> float | None:
        """The weights of an NVFP4 module that share a block scale, or None without such scales."""
        scales = self.parts.get("weight_scale")
        if self.kind != "nvfp4" or self.weight is None or scales is None or not scales.elements:
            return None
        return self.weight.elements * (2 if self.weight.dtype == "U8" else 1) / scales.elements

    def name_tensor(self, part: str) -> str:
        """Return the name of one of its tensors in the file."""
        if not self.fused_experts:
            return f"{self.name}.{part}"
        return self.name if part == "weight" else f"{self.name}_{part}"


def group(checkpoint: Checkpoint) -> dict[str, Module]:
    grouped: dict[str, Parts] = {}
    for name, info in checkpoint.tensors.items():
        module, _, part = name.rpartition(".")
        if module.endswith(".experts") and (fused := _FUSED_EXPERTS.fullmatch(part)):
            module, part = f"{module}.{fused['projection']}", fused["part"] or "weight"
        grouped.setdefault(module, {})[part] = info
    modules = {}
    for name, parts in grouped.items():
        weight = parts.get("weight_packed") or parts.get("weight")
        match = _EXPERT.fullmatch(name)
        expert = ExpertName(match["layer"], int(match["expert"]), match["projection"]) if match else None
        modules[name] = Module(name, parts, _find_kind(parts), weight, expert)
    return modules


def _find_kind(parts: Parts) -> str | None:
    packed, weight = parts.get("weight_packed"), parts.get("weight")
    if packed is not None:
        return "nvfp4" if packed.dtype == "U8" else "int"
    if "qweight" in parts:
        return "int"
    if weight is None:
        return None
    if weight.dtype in ("U8", "F4"):
        return "nvfp4"
    if weight.dtype.startswith("F8_"):
        return "fp8"
    return "int" if weight.dtype in ("I8", "I32") else "none"


def find_whole_number(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first positive whole number among `keys`, or None."""
    values = (config.get(key) for key in keys)
    return next((value for value in values if type(value) is int and 0 < value < 1 << 32), None)
