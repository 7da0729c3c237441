"""Each kind of damage gives one finding with its tensor and file; a clean checkpoint gives none."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints_of_tests as builders
import pytest
from checkpoints_of_tests import Made, block_fp8, compressed, compressed_groups, f32, fused, mixed, modelopt

from moedoctor.diagnose.checkpoint import values as checkpoint_values
from moedoctor.diagnose.checkpoint.checkpoint import read_checkpoint
from moedoctor.diagnose.checkpoint.checks import scales as scale_checks
from moedoctor.diagnose.checkpoint.checks import tensors
from moedoctor.diagnose.checkpoint.findings import CHECKS, Lint
from moedoctor.diagnose.checkpoint.json_fix import correct
from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.reporters.pages.lint import LintDocument
from moedoctor.results import Case, Tier

E = "model.layers.1.mlp.experts.2"
UP, GATE, DOWN = f"{E}.up_proj", f"{E}.gate_proj", f"{E}.down_proj"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
ATTENTION = "model.layers.0.self_attn"
Q, K, V = (f"{ATTENTION}.{name}_proj" for name in "qkv")
NAN, INFINITE = float("nan"), float("inf")
Change = Callable[[Made], object]
Settings = dict[str, Any]


def change(apply: Callable[..., object]) -> Callable[..., Change]:
    """Make `apply(made, …)` a function that returns a change to a checkpoint."""
    return lambda *values, **named: lambda made: apply(made, *values, **named)


# Changes to tensors.


@change
def set_(made: Made, name: str, *values: float, shape: tuple[int, ...] = ()) -> None:
    made.tensors[name] = f32(*values, shape=shape)


@change
def drop(made: Made, *names: str) -> None:
    for name in names:
        del made.tensors[name]


@change
def without(made: Made, *parts: str) -> None:
    """Drop all tensors whose name contains every one of `parts`."""
    kept = [name for name in made.tensors if not all(part in name for part in parts)]
    made.tensors = {name: made.tensors[name] for name in kept}


@change
def rename(made: Made, old: str, new: str) -> None:
    made.tensors = {name.replace(old, new): tensor for name, tensor in made.tensors.items()}


@change
def codes(made: Made, name: str, *changed: int, every: bool = False) -> None:
    """Overwrite the first bytes of a tensor, or all with the first code."""
    dtype, shape, data = made.tensors[name]
    new = bytes(changed) * len(data) if every else bytes(changed) + data[len(changed) :]
    made.tensors[name] = (dtype, shape, new)


@change
def resize(made: Made, name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
    made.tensors[name] = (dtype, shape, made.tensors[name][2].ljust(size, b"\x38")[:size])


def zeros_behind_zeros(made: Made) -> None:
    """70 scales of 0 over weights of 0, which is right, and then 100 over weights that are not."""
    for name, places, per in (
        (f"{UP}.weight_scale", (*range(70), *range(200, 300)), 1),
        (f"{UP}.weight", range(70), 8),
    ):
        dtype, shape, data = made.tensors[name]
        changed = bytearray(data)
        for at in places:
            changed[at * per : (at + 1) * per] = bytes(per)
        made.tensors[name] = (dtype, shape, bytes(changed))


@change
def to_bf16(made: Made, module: str, *shape: int) -> None:
    without(f"{module}.")(made)
    made.tensors[f"{module}.weight"] = ("BF16", shape, b"\x01\x3c" * (shape[0] * shape[1]))


def to_fp8(made: Made) -> None:
    without(f"{DOWN}.weight_scale")(made)
    made.tensors[f"{DOWN}.weight"] = ("F8_E4M3", (64, 128), b"\x38" * (64 * 128))
    made.tensors[f"{DOWN}.weight_scale"] = f32(0.01)


@change
def add_nvfp4(made: Made, module: str, rows: int, columns: int, scale: float = 1e-4) -> None:
    weight, scales = b"\x12" * (rows * columns // 2), b"\x48" * (rows * columns // 16)
    made.tensors[f"{module}.weight"] = ("U8", (rows, columns // 2), weight)
    made.tensors[f"{module}.weight_scale"] = ("F8_E4M3", (rows, columns // 16), scales)
    made.tensors[f"{module}.weight_scale_2"] = f32(scale)
    made.tensors[f"{module}.input_scale"] = f32(1e-2)


@change
def narrow(made: Made, rows: int) -> None:
    """Give experts `rows` rows: 72 are no whole blocks of 16, and 2 GPUs cannot share the 7 blocks of 112."""
    for name, (dtype, shape, data) in list(made.tensors.items()):
        if ".experts." in name and len(shape) == 2:
            cut = (64, shape[1] * rows // 128) if "down_proj" in name else (rows, shape[1])
            made.tensors[name] = (dtype, cut, data[: cut[0] * cut[1]])
    made.config["moe_intermediate_size"] = rows


@change
def narrow_blocks(made: Made, rows: int) -> None:
    """Give the experts of `block_fp8` 97 to 128 rows, which have as many blocks of 32 as 128 rows."""
    for name, (dtype, _, data) in list(made.tensors.items()):
        if ".experts." in name and name.endswith("weight"):
            made.tensors[name] = (dtype, (64, rows) if "down" in name else (rows, 64), data[: 64 * rows])
    made.config["moe_intermediate_size"] = rows


@change
def dense(made: Made, layer: int) -> None:
    """Replace the experts and the router of a layer by a dense MLP."""
    without(f"layers.{layer}.mlp.")(made)
    for name, shape in (("gate_proj", (128, 64)), ("up_proj", (128, 64)), ("down_proj", (64, 128))):
        to_bf16(f"model.layers.{layer}.mlp.{name}", *shape)(made)
    exclude(f"model.layers.{layer}.mlp.*_proj")(made)


def hybrid(made: Made) -> None:
    """Make three layers with one mixer each: attention, experts and Mamba."""
    without("layers.0.mlp.")(made)
    without("layers.1.self_attn.")(made)
    made.tensors["model.layers.2.mixer.A_log"] = f32(*[1.0] * 8, shape=(8,))
    made.config.update(num_hidden_layers=3, hybrid_override_pattern="*EM")


def prediction_layer(made: Made) -> None:
    """Add a layer for multi-token prediction after the last: a router without experts of its own."""
    made.tensors["model.layers.2.mlp.gate.weight"] = made.tensors["model.layers.1.mlp.gate.weight"]
    to_bf16("model.layers.2.eh_proj", 64, 128)(made)
    exclude("*eh_proj")(made)


# Changes to the JSON files.


def config(**values: Any) -> Change:
    return lambda made: made.config.update(values)


@change
def in_config(made: Made, changed: Callable[[Settings], object]) -> None:
    changed(made.config["quantization_config"])


@change
def in_both(made: Made, changed: Callable[[Settings], object]) -> None:
    """Change the quantization in config.json and in hf_quant_config.json."""
    changed(made.config["quantization_config"])
    changed(made.hf_quant["quantization"])


def quant(**values: Any) -> Change:
    return in_config(lambda settings: settings.update(values))


def in_both_files(**values: Any) -> Change:
    return in_both(lambda settings: settings.update(values))


def hf_quant(**values: Any) -> Change:
    return lambda made: made.hf_quant and made.hf_quant["quantization"].update(values)


def exclude(name: str) -> Change:
    """Add a name to both lists of excluded modules."""
    return in_both(lambda settings: settings.get("ignore", settings.get("exclude_modules")).append(name))


def no_hf_quant(made: Made) -> None:
    made.hf_quant = None


def relist(**entry: Any) -> Callable[[Settings], None]:
    """Replace the entry of a projection in `quantized_layers`."""
    return lambda settings: settings["quantized_layers"].update({UP: entry})


def group(number: int, **values: Any) -> Change:
    return in_config(lambda settings: settings["config_groups"][f"group_{number}"].update(values))


def weights(number: int, **values: Any) -> Change:
    return in_config(lambda settings: settings["config_groups"][f"group_{number}"]["weights"].update(values))


def listed_by_layer(settings: Settings) -> None:
    """Experts by their layer and under an outer name; and a module that has another name here."""
    layers = settings["quantized_layers"].items()
    listed = {f"language_model.{name}": entry for name, entry in layers if "experts" not in name}
    for layer in range(2):
        listed[f"language_model.model.layers.{layer}.mlp.experts"] = {"quant_algo": "nvfp4", "group_size": 16}
    settings["quantized_layers"] = {**listed, "mtp.layers.48.mlp.experts": {"quant_algo": "NVFP4"}}


def fused_experts_listed_singly(settings: Settings) -> None:
    names = [f"model.layers.{layer}.mlp.experts.0.up_proj" for layer in range(2)]
    listed = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names}
    settings.update(quant_algo="MIXED_PRECISION", quantized_layers=listed)


def groups_in_place_of_a_list(settings: Settings) -> None:
    layers = settings.pop("quantized_layers")
    settings["config_groups"] = {
        algo: {
            "targets": [name for name, entry in layers.items() if entry["quant_algo"] == algo],
            "weights": {"num_bits": bits, "type": "float"},
        }
        for algo, bits in (("NVFP4", 4), ("FP8", 8))
    }


# Changes to the index and to files.


@change
def index(made: Made, changed: Callable[[dict[str, str]], object]) -> None:
    made.change_index = lambda value: changed(value["weight_map"]) and None


@change
def files(made: Made, changed: Callable[[Path], object]) -> None:
    made.change_files = lambda folder: changed(folder) and None


def another_shard(weight_map: dict[str, str]) -> None:
    name = f"{UP}.weight"
    weight_map[name] = next(shard for shard in weight_map.values() if shard != weight_map[name])


def repeated_key(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    text = path.read_text()
    line = next(line for line in text.splitlines() if f"{UP}.weight_scale_2" in line)
    path.write_text(text.replace(line, f"{line.rstrip(',')},\n{line}"))


def one_shard_more(folder: Path) -> None:
    data = (folder / "model-00001-of-00002.safetensors").read_bytes()
    (folder / "model-00003-of-00002.safetensors").write_bytes(data)


def twice(folder: Path) -> None:
    """Store the same tensor in two shards, as if a part of another export had been copied."""
    tensors = modelopt().tensors
    last = list(tensors)[2::3]  # what the last of three shards holds
    other = next(name for name in tensors if name not in last and name.endswith("weight_scale_2"))
    path = folder / "model-00003-of-00003.safetensors"
    builders.write_safetensors(path, {name: tensors[name] for name in (*last, other)})


def parts_of(*modules: str) -> list[str]:
    parts = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    return [f"{module}.{part}" for module in modules for part in parts]


def downs(part: str, *values: float, shape: tuple[int, ...] = ()) -> list[Change]:
    return [set_(f"{E[:-1]}{expert}.down_proj.{part}", *values, shape=shape) for expert in range(4)]


Base = Callable[[], Made]
Expected = dict[str, str]
"""A part of the tensor's name that each check must report."""
DAMAGE: dict[Base, dict[str, tuple[Change | list[Change], Expected]]] = {
    modelopt: {
        "one k scale absent": (drop(f"{K}.k_scale"), {"kv_scales_missing": ATTENTION}),
        "a k scale of zero": (set_(f"{K}.k_scale", 0.0), {"kv_scales_missing": "k_scale"}),
        "gate scale a little off": (set_(f"{GATE}.weight_scale_2", 1.57e-4), {"global_scale_mismatch": GATE}),
        "input scale absent": (drop(f"{UP}.input_scale"), {"input_scale_missing": UP}),
        "input scale zero": (set_(f"{UP}.input_scale", 0.0), {"input_scale_zero": UP}),
        "input scale denormal": (set_(f"{UP}.input_scale", 1e-40), {"input_scale_zero": UP}),
        "input scale negative": (set_(f"{UP}.input_scale", -0.1), {"scale_negative": UP}),
        "input scale infinite": (set_(f"{UP}.input_scale", INFINITE), {"scale_nan": UP}),
        "input scale far off": (set_(f"{DOWN}.input_scale", 1e-8), {"scale_spread": DOWN}),
        "global scale zero": (set_(f"{DOWN}.weight_scale_2", 0.0), {"scale_zero": DOWN}),
        "global scale denormal": (set_(f"{DOWN}.weight_scale_2", 1e-39), {"scale_subnormal": DOWN}),
        "global scale far off": (set_(f"{DOWN}.weight_scale_2", 0.9), {"scale_spread": "down_proj"}),
        "global scale inverted": (
            set_(f"{DOWN}.weight_scale_2", 8000.0),
            {"scale_inverted": DOWN, "scale_spread": "down_proj"},
        ),
        "block scale negative": (codes(f"{UP}.weight_scale", 0x30, 0xB8), {"scale_negative": UP}),
        "block scale zero": (codes(f"{UP}.weight_scale", 0x00), {"scale_zero": UP}),
        "a few subnormal": (codes(f"{UP}.weight_scale", 1, 2, 7), {"scale_subnormal": UP}),
        "block scales of one expert as small as they go": (
            [codes(f"{module}.weight_scale", 0x08, every=True) for module in (UP, GATE, DOWN)],
            {"scale_spread": E},
        ),
        "zero scales far behind zero weights": (zeros_behind_zeros, {"scale_zero": UP}),
        "algo unknown": (in_both_files(quant_algo="NVFP5"), {"quant_algo_unknown": "quant_algo"}),
        "algo absent": ([quant(quant_algo=None), no_hf_quant], {"quant_algo_missing": "quant_algo"}),
        "method of no ModelOpt": (
            [quant(quant_method="modelopt_nonsense"), no_hf_quant],
            {"quant_algo_unknown": "quant_method"},
        ),
        "declared FP8, is NVFP4": (in_both_files(quant_algo="FP8"), {"quant_algo_tensors": "fp8"}),
        "files disagree: excluded": (
            hf_quant(exclude_modules=["lm_head", "model.layers.*.self_attn*"]),
            {"config_disagrees": "mlp.gate"},
        ),
        "group size of no NVFP4": (in_both_files(group_size=32), {"group_size_tensors": "group_size"}),
        "excluded and quantized": (add_nvfp4(Q, 64, 64), {"excluded_quantised": Q}),
        "not excluded, not quantized": (
            [quant(ignore=["lm_head"]), no_hf_quant],
            {"unquantised_not_excluded": "self_attn"},
        ),
        "expert in BF16": (to_bf16(UP, 128, 64), {"experts_mixed": UP, "unquantised_not_excluded": UP}),
        "expert in FP8": (to_fp8, {"experts_mixed": DOWN, "quant_algo_tensors": DOWN}),
        "scale without weight": (drop(f"{UP}.weight"), {"weight_missing": UP, "expert_missing": UP}),
        "block scales absent": (drop(f"{UP}.weight_scale"), {"scale_missing": f"{UP}.weight_scale"}),
        "global scale absent": (drop(f"{UP}.weight_scale_2"), {"scale_missing": f"{UP}.weight_scale_2"}),
        "F4 weight: block scales for twice the columns": (
            [
                resize(f"{UP}.weight", "F4", (128, 64), 4096),
                resize(f"{UP}.weight_scale", "F8_E4M3", (128, 8), 1024),
            ],
            {"shape_mismatch": f"{UP}.weight_scale"},
        ),
        "block scales as F32": (resize(f"{UP}.weight_scale", "F32", (128, 4), 2048), {"dtype_mismatch": UP}),
        "two global scales": (set_(f"{UP}.weight_scale_2", 1e-4, 1e-4, shape=(2,)), {"shape_mismatch": UP}),
        "expert absent": (drop(*parts_of(UP, GATE, DOWN)), {"expert_missing": E}),
        "projection absent": (drop(*parts_of(UP)), {"expert_missing": UP}),
        "no experts beside a router": (without("layers.1.mlp.experts"), {"expert_missing": "layers.1.mlp"}),
        "neither experts nor a router": (without("layers.1.mlp"), {"expert_missing": "model.layers.1"}),
        "a layer absent in the middle": (
            [without("layers.0."), config(num_hidden_layers=None)],
            {"expert_missing": "model.layers.0"},
        ),
        "fewer layers than declared": (config(num_hidden_layers=5), {"expert_missing": "model.layers.4"}),
        "up absent in all layers": (without("experts", "up_proj"), {"expert_missing": "0.up_proj"}),
        "up absent in experts without gates": (
            [without("experts", "gate_proj"), without("layers.1", "up_proj"), config(hidden_act="relu2")],
            {"expert_missing": "layers.1.mlp.experts.0.up_proj"},
        ),
        "more experts than declared": (config(num_experts=3), {"expert_extra": "experts.3"}),
        "fewer experts than declared": (config(num_experts=5), {"expert_missing": "experts.4"}),
        "projections that are fused": (
            [add_nvfp4(Q, 64, 64), add_nvfp4(K, 64, 64, 2e-4), add_nvfp4(V, 64, 64, 2e-4)],
            {"fused_scale_mismatch": Q, "excluded_quantised": V},
        ),
        "AWQ without input scales": (
            [without(".input_scale"), in_both_files(quant_algo="NVFP4_AWQ")],
            {"input_scale_missing": "experts"},
        ),
        "an expert's name that is in no model": (
            rename("experts.2.gate_proj", "experts.2.w1_proj"),
            {"name_skipped": "experts.2.w1_proj", "expert_missing": "experts.2.gate_proj"},
        ),
        "names of gates that are in no model": (
            [config(architectures=["Qwen9MoeForCausalLM"]), rename("gate_proj", "w1_proj")],
            {"expert_names_unknown": "experts.0.w1_proj"},
        ),
        "all experts under another name": (
            rename("mlp.experts", "mlp.moe_experts"),
            {"expert_names_unknown": "model.layers.0.mlp.gate"},
        ),
        "experts beside the place where the model has them": (
            rename("mlp.experts", "ffn.experts"),
            {"expert_names_unknown": "ffn.experts"},
        ),
        "another width in config.json": (
            config(moe_intermediate_size=96),
            {"config_shape_mismatch": "experts.0.gate_proj"},
        ),
        "another hidden size in config.json": (config(hidden_size=80), {"config_shape_mismatch": "experts"}),
        "shapes: no whole blocks": (narrow(72), {"block_incomplete": "down_proj"}),
        "shapes: TP": (narrow(112), {"does_not_tile": "down_proj"}),
    },
    compressed: {
        "up scale": (set_(f"{UP}.weight_global_scale", 999.0, shape=(1,)), {"global_scale_mismatch": GATE}),
        "input scale absent": (drop(f"{UP}.input_global_scale"), {"input_scale_missing": UP}),
        "far off": (set_(f"{DOWN}.weight_global_scale", 9e7, shape=(1,)), {"scale_spread": "down_proj"}),
        "inverted": (
            set_(f"{DOWN}.weight_global_scale", 1e-4, shape=(1,)),
            {"scale_inverted": DOWN, "scale_spread": DOWN},
        ),
        "block scale NaN": (codes(f"{UP}.weight_scale", 0xFF), {"scale_nan": UP}),
        "quantization not declared": (
            lambda made: made.config.pop("quantization_config"),
            {"quant_algo_missing": "nvfp4"},
        ),
    },
    block_fp8: {
        "down far from gate": (
            downs("weight_scale_inv", *[1e-7] * 8, shape=(2, 4)),
            {"scale_spread": "down_proj.weight_scale_inv"},
        ),
        "scale NaN": (set_(f"{UP}.weight_scale_inv", *[NAN] * 8, shape=(4, 2)), {"scale_nan": UP}),
        "shape": (set_(f"{UP}.weight_scale_inv", *[0.1] * 4, shape=(2, 2)), {"shape_mismatch": UP}),
        "scale absent": (drop(f"{UP}.weight_scale_inv"), {"scale_missing": f"{UP}.weight_scale_inv"}),
        "TP": (config(num_attention_heads=8), {"does_not_tile": "proj"}),
        "gate and up end inside a block": (
            narrow_blocks(112),
            {"block_shared": "gate_proj"},  # no size of tensor parallelism helps: no block of 32 is full
        ),
    },
    lambda: modelopt(3): {
        "index: another shard": (index(another_shard), {"index_disagrees": UP}),
        "index: tensor not named": (
            index(lambda weight_map: weight_map.pop(f"{UP}.weight")),
            {"index_disagrees": UP},
        ),
        "index: tensor named twice": (files(repeated_key), {"tensor_duplicated": UP}),
        "a shard absent": (
            files(lambda folder: (folder / "model-00002-of-00003.safetensors").unlink()),
            {"shard_missing": "38 tensors", "expert_missing": "", "scale_missing": "", "weight_missing": ""},
        ),
        "a shard cut short": (
            files(lambda folder: os.truncate(folder / "model-00002-of-00003.safetensors", 9_000)),
            {"file_truncated": "all of its tensors"},
        ),
        "tensor in two shards": (files(twice), {"tensor_duplicated": "weight_scale_2"}),
    },
    lambda: modelopt(2): {"shard not named": (files(one_shard_more), {"index_disagrees": "all"})},
    mixed: {
        "FP8 without input scales": (without("attn", ".input_scale"), {"input_scale_missing": "attn"}),
        "another scheme": (in_both(relist(quant_algo="FP8")), {"quant_algo_tensors": UP}),
        "the files disagree": (
            in_config(relist(quant_algo="NVFP4_AWQ", group_size=16)),
            {"config_disagrees": UP},
        ),
        "unknown": (in_both(relist(quant_algo="NVFP5")), {"quant_algo_unknown": UP}),
        "mixed within": (in_both(relist(quant_algo="MIXED_PRECISION")), {"quant_algo_unknown": UP}),
        "no algorithm": (in_both(relist()), {"quant_algo_missing": UP}),
        "not listed": (
            in_both(lambda settings: settings["quantized_layers"].pop(UP)),
            {"quant_algo_tensors": UP},
        ),
        "an empty list": (in_both_files(quantized_layers={}), {"quant_algo_missing": "quantized_layers"}),
        "listed, excluded, not quantized": ([to_bf16(Q, 64, 64), exclude(Q)], {"quant_algo_tensors": Q}),
    },
    compressed_groups: {
        "input scales": (without("attn", ".input_scale"), {"input_scale_missing": "self_attn"}),
        "global input scales": (without("input_global_scale"), {"input_scale_missing": "experts"}),
        "exchanged": (group(0, targets=["re:.*self_attn.*"]), {"quant_algo_tensors": Q}),
        "no target": (group(1, targets=["re:.*o_proj"]), {"quant_algo_tensors": Q}),
        "a type": (weights(1, type="x"), {"quant_algo_unknown": "config_groups"}),
    },
    fused: {
        "input scale": (without(f"{FUSED}_input_scale"), {"input_scale_missing": f"{FUSED}_input_scale"}),
        "global scale": (without(f"{FUSED}_weight_scale_2"), {"scale_missing": f"{FUSED}_weight_scale_2"}),
        "experts": (config(num_experts=builders.EXPERTS + 1), {"expert_missing": FUSED}),
        "no experts": (without("1.mlp.experts"), {"expert_missing": "model.layers.1.mlp.gate"}),
        "block scales": (
            resize(f"{FUSED}_weight_scale", "F8_E4M3", (4, 256, 2), 2048),
            {"shape_mismatch": f"{FUSED}_weight_scale"},
        ),
        "a name that is in no model": (
            rename("gate_up_proj", "gate_up_projection"),
            {"expert_names_unknown": "experts.gate_up_projection"},
        ),
        "zero": (codes(f"{FUSED}_weight_scale", 0, every=True), {"scale_zero": f"{FUSED}_weight_scale"}),
        "NaN": (
            set_(f"{FUSED}_weight_scale_2", 1e-4, NAN, 1.0, 1.0, shape=(4,)),
            {"scale_nan": f"{FUSED}_weight_scale_2"},
        ),
    },
}


def bf16() -> Made:
    """Give a checkpoint that is not quantized."""
    made = block_fp8()
    without("weight_scale_inv")(made)
    for name, (dtype, shape, data) in list(made.tensors.items()):
        if dtype == "F8_E4M3":
            made.tensors[name] = ("BF16", shape, data * 2)
    del made.config["quantization_config"]
    return made


CLEAN: dict[str, tuple[Base, list[Change]]] = {
    "modelopt": (modelopt, []),
    "modelopt sharded": (lambda: modelopt(3), []),
    "packed": (compressed, []),
    "packed sharded": (lambda: compressed(2), []),
    "block fp8": (block_fp8, []),
    "mixed": (mixed, []),
    "mixed, listed by layer": (mixed, [in_both(listed_by_layer)]),
    "mixed, by groups": (mixed, [no_hf_quant, in_config(groups_in_place_of_a_list)]),
    "groups": (compressed_groups, []),
    "groups, all by patterns": (compressed_groups, [group(1, targets=["re:.*self_attn.*"])]),
    "a group without weights": (
        compressed,
        [in_config(lambda settings: settings["config_groups"].update(a={"targets": ["A"], "weights": None}))],
    ),
    "a group with a pattern that is not read": (compressed_groups, [group(0, targets=["re:(?!x).*"])]),
    "experts in one tensor": (fused, []),
    "experts in one tensor, listed singly": (fused, [in_both(fused_experts_listed_singly)]),
    "experts in one tensor, transposed": (lambda: fused(transposed=True), []),
    "a dense layer that config.json names": (modelopt, [dense(0), config(first_k_dense_replace=1)]),
    "a dense layer that it does not name": (modelopt, [dense(0)]),
    "a layer without an MLP that it names": (
        modelopt,
        [without("layers.0.mlp."), config(mlp_only_layers=[0])],
    ),
    "every second layer": (modelopt, [without("layers.0.mlp."), config(decoder_sparse_step=2)]),
    "a hybrid": (modelopt, [hybrid]),
    "a layer of prediction": (modelopt, [prediction_layer]),
    "nothing but a layer of prediction": (
        modelopt,
        [without("layers.0."), rename("layers.1.", "layers.61."), config(num_hidden_layers=61)],
    ),
    "no gates": (modelopt, [without("experts", "gate_proj"), config(mlp_hidden_act="relu2")]),
    "other names": (
        modelopt,
        [
            config(architectures=["MixtralForCausalLM"]),
            *(rename("gate_proj", "w1"), rename("up_proj", "w3"), rename("down_proj", "w2")),
            rename(".mlp.", ".block_sparse_moe."),
        ],
    ),
    "experts in a latent space": (modelopt, [config(hidden_size=80, moe_latent_size=64)]),
    "a width for each layer": (modelopt, [config(moe_intermediate_size=[96, 128])]),
    "a width under another name": (
        modelopt,
        [config(moe_intermediate_size=None, moe_ffn_hidden_size=128, intermediate_size=96)],
    ),
    "a BF16 checkpoint": (bf16, []),
    "an F4 weight with its right scales": (modelopt, [resize(f"{UP}.weight", "F4", (128, 64), 4096)]),
    # Healthy layers are within the factor that is reported by a wide margin: 1 beside 448.
    "block scales ten times apart": (modelopt, [codes(f"{UP}.weight_scale", 0x38, every=True)]),
    "a scale of zero over weights of zero": (
        modelopt,
        [codes(f"{UP}.weight_scale", 0x00), codes(f"{UP}.weight", *[0x80] * 8)],
    ),
    "weights alone need no input scales": (
        modelopt,
        [without(".input_scale"), in_both_files(quant_algo="W4A16_NVFP4")],
    ),
}


def checked(made: Made, folder: Path) -> tuple[Lint, dict[str, str]]:
    result = lint(made.write(folder))
    names = {each.check: " ".join(place.tensor for place in each.places) for each in result.findings}
    return result, names


@pytest.mark.parametrize(("base", "changes"), CLEAN.values(), ids=CLEAN)
def test_a_clean_checkpoint_has_no_findings(base: Base, changes: list[Change], tmp_path: Path) -> None:
    made = base()
    for change in changes:
        change(made)
    result, found = checked(made, tmp_path)
    assert found == {}
    assert result.tensors == len(made.tensors)
    assert result.block_scales_seen == 1


CASES = [
    pytest.param(base, changes if isinstance(changes, list) else [changes], expected, id=name)
    for base, cases in DAMAGE.items()
    for name, (changes, expected) in cases.items()
]


@pytest.mark.parametrize(("base", "changes", "expected"), CASES)
def test_each_damage_gives_its_finding_and_no_other(base, changes, expected, tmp_path):
    made = base()
    for change in changes:
        change(made)
    result, found = checked(made, tmp_path)
    assert found.keys() == expected.keys(), found
    for check, tensor in expected.items():
        assert tensor in found[check]
    for finding in result.findings:
        assert finding.count >= 1
        assert all(place.shard and place.value for place in finding.places)


def test_every_check_has_a_case() -> None:
    named = {check for cases in DAMAGE.values() for _, expected in cases.values() for check in expected}
    # test_names.py has a case for releases before the newest one.
    assert named == {name for name, row in CHECKS.items() if not row.asked} - {"name_skipped_before"}


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (mixed, in_both(relist(quant_algo="FP8"))),
        (mixed, in_both(relist(quant_algo="NVFP5"))),
        (mixed, in_both(lambda settings: settings["quantized_layers"].pop(UP))),
        (mixed, in_both_files(quantized_layers={})),
        (mixed, in_config(relist(quant_algo="FP8"))),
        (mixed, in_both(relist(quant_algo="NVFP4", group_size=32))),
        (mixed, to_bf16(Q, 64, 64)),
        (modelopt, in_both_files(group_size=32)),
        (modelopt, quant(quant_algo="FP8")),
        (modelopt, hf_quant(kv_cache_quant_algo=None, group_size=32, exclude_modules=["lm_head"])),
        (modelopt, quant(ignore=["lm_head", "model.layers.0.mlp.experts*"])),
    ],
)
def test_corrected_files_are_clean(base: Base, change: Change, tmp_path: Path) -> None:
    made = base()
    change(made)
    folder = made.write(tmp_path)
    result = lint(folder)
    assert result.findings
    for name, text in correct(result, CHECKS).items():
        (folder / name).write_text(text)
    assert lint(folder).findings == ()


def test_sizes_for_some_tp_only_are_a_remark_and_come_last(tmp_path: Path) -> None:
    made = modelopt()
    narrow(112)(made)
    drop(f"{K}.k_scale")(made)
    result, _ = checked(made, tmp_path)
    assert [finding.check for finding in result.findings] == ["kv_scales_missing", "does_not_tile"]
    assert [finding.check for finding in result.damage] == ["kv_scales_missing"]
    document = LintDocument.from_result(result, "m", ())
    assert [row.evidence.remark for row in document.findings] == [False, True]
    assert result.findings[1].places[0].value == "112 columns in units of 16: not for TP 2, 4, 8 (fits: 1)"


def test_a_dense_quantized_layer_is_cut_too(tmp_path: Path) -> None:
    made, module = modelopt(), "model.layers.0.mlp.shared_expert.down_proj"
    add_nvfp4(module, 64, 96)(made)
    result, found = checked(made, tmp_path)
    assert found == {"does_not_tile": module}
    assert result.findings[0].places[0].value.endswith("not for TP 4, 8 (fits: 1, 2)")


@pytest.mark.parametrize("chunk", [1, 7, 512, 4096])
def test_block_scales_are_counted_in_parts_as_at_once(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_values, "_CHUNK", chunk)
    odd = (0x7F, 0xFF, 0x80, 0x81, 0x90, 0, 3, 3, 0xFE, 0x7D, 8, 9, 10, 11, 1, 2)
    data = bytes(range(0x7C)) * 4 + bytes(odd)
    made = modelopt()
    made.tensors[f"{UP}.weight_scale"] = ("F8_E4M3", (128, 4), data)
    folder = made.write(tmp_path)
    info = read_checkpoint(folder).tensors[f"{UP}.weight_scale"]
    with checkpoint_values.Reader(folder) as reader:
        counts = reader.count_block_scales(info, whole=True)
    values = [checkpoint_values.E4M3[code] for code in data]
    assert counts == checkpoint_values.BlockScaleCounts(
        read=512,
        nan=2,
        zero=sum(value == 0 for value in values),
        negative=sum(value < 0 for value in values),
        subnormal=sum(0 < value < 2.0**-6 for value in values),
        largest=416,
    )


def test_the_value_the_id_and_the_line(tmp_path: Path) -> None:
    made = modelopt()
    for change in (set_(f"{UP}.weight_scale_2", 6.25e-4), quant(quant_algo="NVFP5"), no_hf_quant):
        change(made)
    findings = {finding.check: finding for finding in checked(made, tmp_path)[0].findings}
    mismatch = findings["global_scale_mismatch"]
    assert (mismatch.id, mismatch.line) == ("MD014", None)
    assert mismatch.places[0].value == "gate 0.00015625, up 0.000625"
    assert mismatch.places[0].shard == "model.safetensors"
    line = findings["quant_algo_unknown"].line
    assert '"quant_algo": "NVFP5"' in (tmp_path / "config.json").read_text().splitlines()[line - 1]
    assert {name: check.id for name, check in CHECKS.items() if check.id} == {
        "kv_scales_missing": "MD012",
        "global_scale_mismatch": "MD014",
        "input_scale_missing": "MD015",
        "input_scale_zero": "MD015",
        **dict.fromkeys(("expert_names_unknown", "name_skipped", "name_skipped_before"), "MD021"),
        **dict.fromkeys(("block_shared", "does_not_tile"), "MD022"),
        **dict.fromkeys(("excluded_quantised", "unquantised_not_excluded", "weights_converted"), "MD023"),
        **dict.fromkeys(("adapter_refused", "adapter_unused"), "MD029"),
    }


def test_every_value_of_a_scale_is_decoded_as_it_is() -> None:
    torch = pytest.importorskip("torch")
    every = torch.arange(256, dtype=torch.uint8)
    ours = torch.tensor(checkpoint_values.E4M3)
    assert torch.equal(ours.nan_to_num(-1e9), every.view(torch.float8_e4m3fn).float().nan_to_num(-1e9))
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float64, "F64")):
        values = torch.tensor([1.5, -0.0078125, 3e4], dtype=dtype)
        raw = values.view(torch.uint8).numpy().tobytes()
        assert checkpoint_values._decode(name, raw) == tuple(values.tolist())


def test_large_block_scales_are_sampled_and_the_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(scale_checks, "FULL_BYTES", 1000)
    monkeypatch.setattr(checkpoint_values, "_SAMPLE", 64)
    made = modelopt()
    dtype, shape, data = made.tensors[f"{UP}.weight_scale"]
    made.tensors[f"{UP}.weight_scale"] = (dtype, shape, data[:-1] + struct.pack("B", 0x7F))
    result, found = checked(made, tmp_path)
    assert found.keys() == {"scale_nan"}, "the last sample ends with the last scale"
    assert result.block_scales_seen == pytest.approx(192 / 512)


@pytest.mark.parametrize("width", [64, 96, 160, 192, 320, 448, 576, 704, 1088])
def test_the_sizes_that_fit_are_those_with_which_the_loader_of_0_33_0_gives_every_weight_its_scale(width):
    pytest.importorskip("torch")
    from moedoctor.faults.loading import block_shards_lab
    from moedoctor.faults.loading.block_shards import BlockShardsParameters

    for tp in tensors.TP_SIZES:
        loads = False
        if width % tp == 0:
            sizes = {"intermediate": width, "tensor_parallel": tp, "hidden": 256, "loader": "0.33.0"}
            case = Case("MD022", "faulty", Tier.MODEL, sizes)
            answer = block_shards_lab.model(case, BlockShardsParameters.model_validate(sizes), None)
            loads = answer["stopped"] is None and answer["wrong"] is None
        assert tensors._is_split((width, 256), (128, 128), tp) is loads, tp
