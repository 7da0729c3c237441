"""Tiny quantised MoE checkpoints out of plain bytes, clean, for tests that then break them."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype, shape, data"""
HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, HEADS = 64, 128, 4, 2, 8
INDEX = "model.safetensors.index.json"


def f32(*values: float, shape: tuple[int, ...] = ()) -> Tensor:
    return "F32", shape, struct.pack(f"<{len(values)}f", *values)


@dataclass
class Made:
    """A checkpoint before it is written: change it, then `write`."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    hf_quant: dict[str, Any] | None = None
    shards: int = 1
    place: dict[str, int] = field(default_factory=dict)
    """Tensor -> number of its shard."""
    change_index: Callable[[dict[str, Any]], None] = lambda index: None
    change_files: Callable[[Path], None] = lambda folder: None

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        if self.hf_quant is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(self.hf_quant, indent=1))
        if self.shards == 1:
            write_safetensors(folder / "model.safetensors", self.tensors)
        else:
            self._write_shards(folder)
        self.change_files(folder)
        return folder

    def _write_shards(self, folder: Path) -> None:
        names = [f"model-{number + 1:05d}-of-{self.shards:05d}.safetensors" for number in range(self.shards)]
        parts: list[dict[str, Tensor]] = [{} for _ in names]
        for number, (name, tensor) in enumerate(self.tensors.items()):
            parts[self.place.get(name, number % self.shards)][name] = tensor
        weight_map = {}
        for file, part in zip(names, parts, strict=True):
            write_safetensors(folder / file, part)
            weight_map.update(dict.fromkeys(part, file))
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        self.change_index(index)
        (folder / INDEX).write_text(json.dumps(index, indent=1))


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def _bf16(pick: random.Random, *shape: int) -> Tensor:
    count = 1
    for one in shape:
        count *= one
    return "BF16", shape, pick.randbytes(2 * count)


def _nvfp4(pick: random.Random, rows: int, columns: int) -> dict[str, Tensor]:
    codes = bytes(pick.randrange(256) for _ in range(rows * columns // 2))
    scales = bytes(pick.randrange(0x30, 0x7F) for _ in range(rows * columns // 16))
    return {
        "weight": ("U8", (rows, columns // 2), codes),
        "weight_scale": ("F8_E4M3", (rows, columns // 16), scales),
    }


def _shapes() -> dict[str, tuple[int, int]]:
    return {
        "gate_proj": (INTERMEDIATE, HIDDEN),
        "up_proj": (INTERMEDIATE, HIDDEN),
        "down_proj": (HIDDEN, INTERMEDIATE),
    }


def _dense(pick: random.Random) -> dict[str, Tensor]:
    tensors = {
        "model.embed_tokens.weight": _bf16(pick, 32, HIDDEN),
        "lm_head.weight": _bf16(pick, 32, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = _bf16(pick, HIDDEN, HIDDEN)
        tensors[f"{prefix}.mlp.gate.weight"] = _bf16(pick, EXPERTS, HIDDEN)
        tensors[f"{prefix}.input_layernorm.weight"] = _bf16(pick, HIDDEN)
    return tensors


def _config(quantization: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "quantization_config": quantization,
    }


def modelopt(shards: int = 1) -> Made:
    """NVFP4 as ModelOpt exports it, with an FP8 KV cache and its scales."""
    pick = random.Random(3)
    tensors = _dense(pick)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, (rows, columns) in _shapes().items():
                module = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                for part, tensor in _nvfp4(pick, rows, columns).items():
                    tensors[f"{module}.{part}"] = tensor
                tensors[f"{module}.weight_scale_2"] = f32(1.25e-4 * (1 + expert / 8))
                tensors[f"{module}.input_scale"] = f32(3e-3 * (1 + expert))
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.k_proj.k_scale"] = f32(0.02)
        tensors[f"{attention}.v_proj.v_scale"] = f32(0.03)
    excluded = ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"]
    config = _config(
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
            "ignore": excluded,
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        }
    )
    hf_quant = {
        "producer": {"name": "modelopt", "version": "0.40"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": list(excluded),
        },
    }
    return Made(tensors, config, hf_quant, shards)


def compressed(shards: int = 1) -> Made:
    """NVFP4 as compressed-tensors stores it."""
    pick = random.Random(4)
    tensors = _dense(pick)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, (rows, columns) in _shapes().items():
                module = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                parts = _nvfp4(pick, rows, columns)
                tensors[f"{module}.weight_packed"] = parts["weight"]
                tensors[f"{module}.weight_scale"] = parts["weight_scale"]
                tensors[f"{module}.weight_global_scale"] = f32(8000.0 * (1 + expert / 8), shape=(1,))
                tensors[f"{module}.input_global_scale"] = f32(300.0, shape=(1,))
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config = _config(
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"},
                }
            },
        }
    )
    return Made(tensors, config, None, shards)


def block_fp8() -> Made:
    """FP8 in blocks of 32 × 32, as published FP8 checkpoints have them at 128 × 128."""
    pick = random.Random(5)
    tensors = _dense(pick)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, (rows, columns) in _shapes().items():
                module = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{module}.weight"] = ("F8_E4M3", (rows, columns), pick.randbytes(rows * columns))
                count = rows // 32 * (columns // 32)
                scales = [0.001 + pick.random() / 100 for _ in range(count)]
                tensors[f"{module}.weight_scale_inv"] = f32(*scales, shape=(rows // 32, columns // 32))
    excluded = ["lm_head"]
    for layer in range(LAYERS):
        excluded.append(f"model.layers.{layer}.mlp.gate")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            excluded.append(f"model.layers.{layer}.self_attn.{name}")
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "modules_to_not_convert": excluded,
    }
    # 128 rows in blocks of 32 divide by 4 and no further.
    return Made(tensors, {**_config(quantization), "num_attention_heads": 4}, None)


def mixed() -> Made:
    """ModelOpt's MIXED_PRECISION: experts in NVFP4 and attention in FP8, each listed in both files."""
    made, pick = modelopt(), random.Random(6)
    listed: dict[str, dict[str, Any]] = {}
    for name in list(made.tensors):
        if name.endswith(".weight_scale_2"):
            listed[name.removesuffix(".weight_scale_2")] = {"quant_algo": "NVFP4", "group_size": 16}
    for module in _attention():
        made.tensors[f"{module}.weight"] = _fp8(pick, HIDDEN, HIDDEN)
        made.tensors[f"{module}.weight_scale"] = f32(0.01)
        made.tensors[f"{module}.input_scale"] = f32(0.02)
        listed[module] = {"quant_algo": "FP8"}
    assert made.hf_quant is not None
    for said in (made.config["quantization_config"], made.hf_quant["quantization"]):
        said.update(quant_algo="MIXED_PRECISION", quantized_layers=copy.deepcopy(listed))
        said["ignore" if "ignore" in said else "exclude_modules"] = ["lm_head", "model.layers.*.mlp.gate"]
        said.pop("config_groups", None)
        said.pop("group_size", None)
    return made


def compressed_groups() -> Made:
    """compressed-tensors with two groups: experts in NVFP4 by a pattern, all other linear layers in FP8."""
    made, pick = compressed(), random.Random(7)
    for module in _attention():
        made.tensors[f"{module}.weight"] = _fp8(pick, HIDDEN, HIDDEN)
        made.tensors[f"{module}.weight_scale"] = f32(0.01, shape=(1,))
        made.tensors[f"{module}.input_scale"] = f32(0.02, shape=(1,))
    said = made.config["quantization_config"]
    said.update(format="mixed-precision", ignore=["lm_head", "re:.*mlp.gate$"])
    said["config_groups"]["group_0"]["targets"] = ["re:.*mlp.experts.*(gate|up|down)_proj$"]
    said["config_groups"]["group_1"] = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": False},
    }
    return made


def fused(transposed: bool = False) -> Made:
    """NVFP4 with all experts of a layer in one tensor: (experts, N, K), or `transposed` (experts, K, N)."""
    made, pick = modelopt(), random.Random(8)
    for name in [one for one in made.tensors if ".experts." in one]:
        del made.tensors[name]
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("gate_up_proj", 2 * INTERMEDIATE, HIDDEN),
            ("down_proj", HIDDEN, INTERMEDIATE),
        ):
            tensor = f"model.layers.{layer}.mlp.experts.{name}"
            parts = _nvfp4(pick, EXPERTS * rows, columns)
            for part, end, per in (("weight", "", 2), ("weight_scale", "_weight_scale", 16)):
                dtype, _, data = parts[part]
                shape = (columns // per, rows) if transposed else (rows, columns // per)
                made.tensors[f"{tensor}{end}"] = (dtype, (EXPERTS, *shape), data)
            made.tensors[f"{tensor}_weight_scale_2"] = f32(*[1.25e-4] * EXPERTS, shape=(EXPERTS,))
            made.tensors[f"{tensor}_input_scale"] = f32(3e-3)
    return made


def _attention() -> list[str]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return [f"model.layers.{layer}.self_attn.{name}" for layer in range(LAYERS) for name in names]


def _fp8(pick: random.Random, rows: int, columns: int) -> Tensor:
    return "F8_E4M3", (rows, columns), pick.randbytes(rows * columns)


def clone(made: Made) -> Made:
    return copy.deepcopy(made)
