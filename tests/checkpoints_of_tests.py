"""Tiny valid quantized MoE checkpoints, which tests then damage."""

import copy
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
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
    """The number of each tensor's shard."""
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
    return "BF16", shape, pick.randbytes(2 * math.prod(shape))


def _fp8(pick: random.Random, rows: int, columns: int) -> Tensor:
    return "F8_E4M3", (rows, columns), pick.randbytes(rows * columns)


def _nvfp4(pick: random.Random, rows: int, columns: int) -> dict[str, Tensor]:
    codes = pick.randbytes(rows * columns // 2)
    scales = bytes(pick.randrange(0x30, 0x7F) for _ in range(rows * columns // 16))
    return {
        "weight": ("U8", (rows, columns // 2), codes),
        "weight_scale": ("F8_E4M3", (rows, columns // 16), scales),
    }


def _attention() -> list[str]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return [f"model.layers.{layer}.self_attn.{name}" for layer in range(LAYERS) for name in names]


def _experts() -> Iterator[tuple[str, int, int, int]]:
    """Yield (module, expert, rows, columns) for each projection of each expert."""
    up, down = (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, shape in (("gate_proj", up), ("up_proj", up), ("down_proj", down)):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}", expert, *shape


def _dense(pick: random.Random) -> dict[str, Tensor]:
    tensors = {name: _bf16(pick, 32, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors |= {f"{module}.weight": _bf16(pick, HIDDEN, HIDDEN) for module in _attention()}
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = _bf16(pick, EXPERTS, HIDDEN)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = _bf16(pick, HIDDEN)
    return tensors


def _config(quantization: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS, "quantization_config": quantization, **values,
    }  # fmt: skip


def modelopt(shards: int = 1) -> Made:
    """NVFP4 as ModelOpt exports it, with an FP8 KV cache and its scales."""
    pick = random.Random(3)
    tensors = _dense(pick)
    for module, expert, rows, columns in _experts():
        tensors |= {f"{module}.{part}": tensor for part, tensor in _nvfp4(pick, rows, columns).items()}
        tensors[f"{module}.weight_scale_2"] = f32(1.25e-4 * (1 + expert / 8))
        tensors[f"{module}.input_scale"] = f32(3e-3 * (1 + expert))
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = f32(0.02)
        tensors[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = f32(0.03)
    excluded = ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"]
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "ignore": excluded,
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
    }
    hf_quant = {
        "producer": {"name": "modelopt", "version": "0.40"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": list(excluded),
        },
    }
    return Made(tensors, _config(quantization), hf_quant, shards)


def compressed(shards: int = 1) -> Made:
    """NVFP4 as compressed-tensors stores it."""
    pick = random.Random(4)
    tensors = _dense(pick)
    for module, expert, rows, columns in _experts():
        parts = _nvfp4(pick, rows, columns)
        tensors[f"{module}.weight_packed"] = parts["weight"]
        tensors[f"{module}.weight_scale"] = parts["weight_scale"]
        tensors[f"{module}.weight_global_scale"] = f32(8000.0 * (1 + expert / 8), shape=(1,))
        tensors[f"{module}.input_global_scale"] = f32(300.0, shape=(1,))
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }
    return Made(tensors, _config(quantization), None, shards)


def block_fp8() -> Made:
    """FP8 in blocks of 32 × 32, as published FP8 checkpoints have them at 128 × 128."""
    pick = random.Random(5)
    tensors = _dense(pick)
    for module, _, rows, columns in _experts():
        tensors[f"{module}.weight"] = _fp8(pick, rows, columns)
        blocks = rows // 32, columns // 32
        scales = [0.001 + pick.random() / 100 for _ in range(math.prod(blocks))]
        tensors[f"{module}.weight_scale_inv"] = f32(*scales, shape=blocks)
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)]
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "modules_to_not_convert": ["lm_head", *gates, *_attention()],
    }
    # 128 rows in blocks of 32 can be divided by at most 4 GPUs.
    return Made(tensors, _config(quantization, num_attention_heads=4), None)


def mixed() -> Made:
    """ModelOpt's MIXED_PRECISION: experts in NVFP4 and attention in FP8, each listed in both files."""
    made, pick = modelopt(), random.Random(6)
    listed = {module: {"quant_algo": "NVFP4", "group_size": 16} for module, *_ in _experts()}
    for module in _attention():
        made.tensors[f"{module}.weight"] = _fp8(pick, HIDDEN, HIDDEN)
        made.tensors[f"{module}.weight_scale"] = f32(0.01)
        made.tensors[f"{module}.input_scale"] = f32(0.02)
        listed[module] = {"quant_algo": "FP8"}
    assert made.hf_quant is not None
    for settings in (made.config["quantization_config"], made.hf_quant["quantization"]):
        settings.update(quant_algo="MIXED_PRECISION", quantized_layers=copy.deepcopy(listed))
        excluded = "ignore" if "ignore" in settings else "exclude_modules"
        settings[excluded] = ["lm_head", "model.layers.*.mlp.gate"]
        settings.pop("config_groups", None)
        settings.pop("group_size", None)
    return made


def compressed_groups() -> Made:
    """compressed-tensors with two groups: experts in NVFP4 by a pattern, all other linear layers in FP8."""
    made, pick = compressed(), random.Random(7)
    for module in _attention():
        made.tensors[f"{module}.weight"] = _fp8(pick, HIDDEN, HIDDEN)
        made.tensors[f"{module}.weight_scale"] = f32(0.01, shape=(1,))
        made.tensors[f"{module}.input_scale"] = f32(0.02, shape=(1,))
    settings = made.config["quantization_config"]
    settings.update(format="mixed-precision", ignore=["lm_head", "re:.*mlp.gate$"])
    settings["config_groups"]["group_0"]["targets"] = ["re:.*mlp.experts.*(gate|up|down)_proj$"]
    settings["config_groups"]["group_1"] = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": False},
    }
    return made


def fused(transposed: bool = False) -> Made:
    """NVFP4 with all experts of a layer in one tensor: [experts, N, K], or `transposed` [experts, K, N]."""
    made, pick = modelopt(), random.Random(8)
    made.config["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    made.tensors = {name: tensor for name, tensor in made.tensors.items() if ".experts." not in name}
    shapes = {"gate_up_proj": (2 * INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
    for layer in range(LAYERS):
        for name, (rows, columns) in shapes.items():
            tensor = f"model.layers.{layer}.mlp.experts.{name}"
            parts = _nvfp4(pick, EXPERTS * rows, columns)
            for part, end, per in (("weight", "", 2), ("weight_scale", "_weight_scale", 16)):
                dtype, _, data = parts[part]
                shape = (columns // per, rows) if transposed else (rows, columns // per)
                made.tensors[f"{tensor}{end}"] = (dtype, (EXPERTS, *shape), data)
            made.tensors[f"{tensor}_weight_scale_2"] = f32(*[1.25e-4] * EXPERTS, shape=(EXPERTS,))
            made.tensors[f"{tensor}_input_scale"] = f32(3e-3)
    return made


def damaged() -> Made:
    """Give a checkpoint with MD014: an up half whose global scale is not that of its gate half."""
    made = modelopt()
    made.tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_2"] = f32(3e-4)
    return made
