"""Checkpoints whose layers differ: several schemes, dense and recurrent layers, experts in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints_of_tests import EXPERTS, Made, compressed, compressed_groups, f32, fused, mixed, modelopt

from moedoctor.diagnose.checkpoint.json_fix import corrected
from moedoctor.diagnose.checkpoint.lint import lint

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
Q = "model.layers.0.self_attn.q_proj"
Change = Callable[[Made], object]


def found_in(made: Made, folder: Path) -> dict[str, str]:
    result = lint(made.write(folder))
    return {one.check: " ".join(place.tensor for place in one.places) for one in result.findings}


def both(change: Callable[[dict[str, Any]], object]) -> Change:
    """The same change to what both files say."""

    def change_both(made: Made) -> None:
        assert made.hf_quant is not None
        change(made.config["quantization_config"])
        change(made.hf_quant["quantization"])

    return change_both


def in_config(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda made: change(made.config["quantization_config"])


def exclude(name: str) -> Change:
    """Add a name to both lists of excluded modules."""
    return both(lambda said: said["ignore" if "ignore" in said else "exclude_modules"].append(name))


def drop(*parts: str) -> Change:
    def change(made: Made) -> None:
        for name in [one for one in made.tensors if all(part in one for part in parts)]:
            del made.tensors[name]

    return change


def rename(old: str, new: str) -> Change:
    def change(made: Made) -> None:
        made.tensors = {name.replace(old, new): tensor for name, tensor in made.tensors.items()}

    return change


def to_bf16(module: str) -> Change:
    def change(made: Made) -> None:
        drop(f"{module}.")(made)
        made.tensors[f"{module}.weight"] = ("BF16", (64, 64), b"\x01\x3c" * 4096)

    return change


def dense(layer: int) -> Change:
    """A dense MLP in place of a layer's experts and router."""

    def change(made: Made) -> None:
        drop(f"layers.{layer}.mlp.")(made)
        for name, shape in (("gate_proj", (128, 64)), ("up_proj", (128, 64)), ("down_proj", (64, 128))):
            made.tensors[f"model.layers.{layer}.mlp.{name}.weight"] = ("BF16", shape, b"\x01\x3c" * 8192)
        exclude(f"model.layers.{layer}.mlp.*_proj")(made)

    return change


def hybrid(made: Made) -> None:
    """Layers of one mixer each: attention, then experts, then Mamba."""
    drop("layers.0.mlp.")(made)
    drop("layers.1.self_attn.")(made)
    made.tensors["model.layers.2.mixer.A_log"] = f32(*[1.0] * 8, shape=(8,))
    made.config.update(num_hidden_layers=3, hybrid_override_pattern="*EM")


def prediction_layer(made: Made) -> None:
    """A layer after the last, for the prediction of several tokens: a router and no experts of its own."""
    made.tensors["model.layers.2.mlp.gate.weight"] = made.tensors["model.layers.1.mlp.gate.weight"]
    made.tensors["model.layers.2.eh_proj.weight"] = ("BF16", (64, 128), b"\x01\x3c" * 8192)
    exclude("*eh_proj")(made)


def listed_by_layer(said: dict[str, Any]) -> None:
    """Experts by their layer and under an outer name; and a module that has another name here."""
    layers = said["quantized_layers"]
    kept = {f"language_model.{name}": one for name, one in layers.items() if "experts" not in name}
    for layer in range(2):
        kept[f"language_model.model.layers.{layer}.mlp.experts"] = {"quant_algo": "nvfp4", "group_size": 16}
    said["quantized_layers"] = {**kept, "mtp.layers.48.mlp.experts": {"quant_algo": "NVFP4"}}


def groups_in_place_of_a_list(made: Made) -> None:
    made.hf_quant = None
    said = made.config["quantization_config"]
    layers = said.pop("quantized_layers")
    for number, (algo, bits) in enumerate((("NVFP4", 4), ("FP8", 8))):
        said.setdefault("config_groups", {})[f"group_{number}"] = {
            "targets": [name for name, one in layers.items() if one["quant_algo"] == algo],
            "weights": {"num_bits": bits, "type": "float"},
        }


def group(said: dict[str, Any], number: int) -> dict[str, Any]:
    found: dict[str, Any] = said["config_groups"][f"group_{number}"]
    return found


CLEAN: list[tuple[str, Callable[[], Made], Change]] = [
    ("mixed", mixed, lambda made: None),
    ("mixed, listed by layer", mixed, both(listed_by_layer)),
    ("mixed, by groups", mixed, groups_in_place_of_a_list),
    ("groups", compressed_groups, lambda made: None),
    (
        "groups, all by patterns",
        compressed_groups,
        in_config(lambda said: group(said, 1).update(targets=["re:.*self_attn.*"])),
    ),
    (
        "a group without weights",
        compressed,
        in_config(lambda said: said["config_groups"].update(a={"targets": ["A"], "weights": None})),
    ),
    (
        "a group of which the pattern is not read",
        compressed_groups,
        in_config(lambda said: group(said, 0).update(targets=["re:(?!x).*"])),
    ),
    ("experts in one tensor", fused, lambda made: None),
    ("experts in one tensor, transposed", lambda: fused(transposed=True), lambda made: None),
    (
        "a dense layer that config.json names",
        modelopt,
        lambda made: (dense(0)(made), made.config.update(first_k_dense_replace=1)),
    ),
    ("a dense layer that it does not name", modelopt, dense(0)),
    (
        "a layer without an MLP that it names",
        modelopt,
        lambda made: (drop("layers.0.mlp.")(made), made.config.update(mlp_only_layers=[0])),
    ),
    (
        "every second layer",
        modelopt,
        lambda made: (drop("layers.0.mlp.")(made), made.config.update(decoder_sparse_step=2)),
    ),
    ("a hybrid", modelopt, hybrid),
    ("a layer of prediction", modelopt, prediction_layer),
    (
        "nothing but a layer of prediction",
        modelopt,
        lambda made: (
            drop("layers.0.")(made),
            rename("layers.1.", "layers.61.")(made),
            made.config.update(num_hidden_layers=61),
        ),
    ),
    (
        "no gates",
        modelopt,
        lambda made: (drop("experts", "gate_proj")(made), made.config.update(mlp_hidden_act="relu2")),
    ),
    (
        "other names",
        modelopt,
        lambda made: [
            rename(*one)(made) for one in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        ],
    ),
    (
        "names that are not known",
        modelopt,
        lambda made: (
            drop("experts", "gate_proj")(made),
            rename("up_proj", "fc1")(made),
            rename("down_proj", "fc2")(made),
        ),
    ),
]


@pytest.mark.parametrize(("base", "change"), [one[1:] for one in CLEAN], ids=[one[0] for one in CLEAN])
def test_a_clean_checkpoint_is_silent(base: Callable[[], Made], change: Change, tmp_path: Path) -> None:
    made = base()
    change(made)
    assert found_in(made, tmp_path) == {}


def relist(**entry: Any) -> Callable[[dict[str, Any]], None]:
    """Another entry for one expert's projection in `quantized_layers`."""
    return lambda said: said["quantized_layers"].update({EXPERT: entry})


DAMAGE: list[tuple[str, Callable[[], Made], Change, dict[str, str]]] = [
    (
        "mixed: NVFP4 without input scales",
        mixed,
        drop("experts", ".input_scale"),
        {"input_scale_missing": "experts"},
    ),
    ("mixed: FP8 without input scales", mixed, drop("attn", ".input_scale"), {"input_scale_missing": "attn"}),
    ("mixed: another scheme", mixed, both(relist(quant_algo="FP8")), {"quant_algo_tensors": EXPERT}),
    (
        "mixed: the files disagree",
        mixed,
        in_config(relist(quant_algo="NVFP4_AWQ", group_size=16)),
        {"config_disagrees": EXPERT},
    ),
    (
        "mixed: listed in one file",
        mixed,
        in_config(lambda said: said["quantized_layers"].update(x={"quant_algo": "FP8"})),
        {"config_disagrees": "x"},
    ),
    ("mixed: unknown", mixed, both(relist(quant_algo="NVFP5")), {"quant_algo_unknown": EXPERT}),
    (
        "mixed: mixed within",
        mixed,
        both(relist(quant_algo="MIXED_PRECISION")),
        {"quant_algo_unknown": EXPERT},
    ),
    ("mixed: no algorithm", mixed, both(relist()), {"quant_algo_missing": EXPERT}),
    (
        "mixed: not listed",
        mixed,
        both(lambda said: said["quantized_layers"].pop(EXPERT)),
        {"quant_algo_tensors": EXPERT},
    ),
    (
        "mixed: an empty list",
        mixed,
        both(lambda said: said.update(quantized_layers={})),
        {"quant_algo_missing": "quantized_layers"},
    ),
    (
        "mixed: no list",
        mixed,
        both(lambda said: said.pop("quantized_layers")),
        {"quant_algo_missing": "quantized_layers"},
    ),
    (
        "mixed: group size",
        mixed,
        both(relist(quant_algo="NVFP4", group_size=32)),
        {"group_size_tensors": "group_size"},
    ),
    (
        "mixed: listed, excluded, not quantised",
        mixed,
        lambda made: (to_bf16(Q)(made), exclude(Q)(made)),
        {"quant_algo_tensors": Q},
    ),
    (
        "groups: input scales",
        compressed_groups,
        drop("attn", ".input_scale"),
        {"input_scale_missing": "self_attn"},
    ),
    (
        "groups: global input scales",
        compressed_groups,
        drop("input_global_scale"),
        {"input_scale_missing": "experts"},
    ),
    (
        "groups: exchanged",
        compressed_groups,
        in_config(lambda said: group(said, 0).update(targets=["re:.*self_attn.*"])),
        {"quant_algo_tensors": Q},
    ),
    (
        "groups: no target",
        compressed_groups,
        in_config(lambda said: group(said, 1).update(targets=["re:.*o_proj"])),
        {"quant_algo_tensors": Q},
    ),
    (
        "groups: a type",
        compressed_groups,
        in_config(lambda said: group(said, 1)["weights"].update(type="x")),
        {"quant_algo_unknown": "config_groups"},
    ),
    (
        "one tensor: input scale",
        fused,
        drop("1.mlp.experts.gate_up_proj_input_scale"),
        {"input_scale_missing": f"{FUSED}_input_scale"},
    ),
    (
        "one tensor: global scale",
        fused,
        drop("1.mlp.experts.gate_up_proj_weight_scale_2"),
        {"scale_missing": f"{FUSED}_weight_scale_2"},
    ),
    (
        "one tensor: experts",
        fused,
        lambda made: made.config.update(num_experts=EXPERTS + 1),
        {"expert_missing": FUSED},
    ),
    (
        "one tensor: more experts",
        fused,
        lambda made: made.config.update(num_experts=EXPERTS - 1),
        {"expert_extra": FUSED},
    ),
    ("one tensor: no experts", fused, drop("1.mlp.experts"), {"expert_missing": "model.layers.1.mlp.gate"}),
    (
        "one tensor: block scales",
        fused,
        lambda made: made.tensors.update({f"{FUSED}_weight_scale": ("F8_E4M3", (4, 256, 2), b"\x48" * 2048)}),
        {"shape_mismatch": f"{FUSED}_weight_scale"},
    ),
    (
        "one tensor: zero",
        fused,
        lambda made: made.tensors.update({f"{FUSED}_weight_scale": ("F8_E4M3", (4, 256, 4), bytes(4096))}),
        {"scale_zero": f"{FUSED}_weight_scale"},
    ),
    (
        "one tensor: NaN",
        fused,
        lambda made: made.tensors.update(
            {f"{FUSED}_weight_scale_2": f32(1e-4, float("nan"), 1.0, 1.0, shape=(4,))}
        ),
        {"scale_nan": f"{FUSED}_weight_scale_2"},
    ),
]


@pytest.mark.parametrize(
    ("base", "change", "expected"), [one[1:] for one in DAMAGE], ids=[one[0] for one in DAMAGE]
)
def test_damage_is_named_and_nothing_else(
    base: Callable[[], Made], change: Change, expected: dict[str, str], tmp_path: Path
) -> None:
    made = base()
    change(made)
    found = found_in(made, tmp_path)
    assert found.keys() == expected.keys(), found
    for check, tensor in expected.items():
        assert tensor in found[check]


@pytest.mark.parametrize(
    "change",
    [
        both(relist(quant_algo="FP8")),
        both(relist(quant_algo="NVFP5")),
        both(lambda said: said["quantized_layers"].pop(EXPERT)),
        both(lambda said: said.update(quantized_layers={})),
        in_config(relist(quant_algo="FP8")),
        both(relist(quant_algo="NVFP4", group_size=32)),
        to_bf16(Q),
    ],
    ids=["another", "unknown", "not listed", "none listed", "in one file", "group size", "not quantised"],
)
def test_a_corrected_list_is_clean(change: Change, tmp_path: Path) -> None:
    made = mixed()
    change(made)
    folder = made.write(tmp_path)
    result = lint(folder)
    assert result.findings
    for name, text in corrected(result).items():
        (folder / name).write_text(text)
    assert lint(folder).findings == ()


def test_a_corrected_group_size_is_clean(tmp_path: Path) -> None:
    made = modelopt()
    both(lambda said: said.update(group_size=32))(made)
    folder = made.write(tmp_path)
    for name, text in corrected(lint(folder)).items():
        (folder / name).write_text(text)
    assert lint(folder).findings == ()


def test_a_pattern_of_a_group_that_is_not_read_is_named(tmp_path: Path) -> None:
    made = compressed_groups()
    group(made.config["quantization_config"], 0)["targets"] = ["re:(?!x).*"]
    assert lint(made.write(tmp_path)).not_read == ("re:(?!x).*",)
