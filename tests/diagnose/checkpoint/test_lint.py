"""Each kind of damage is named, with its tensor and file, and nothing else; a clean checkpoint is silent."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints_of_tests import Made, block_fp8, compressed, f32, modelopt

from moedoctor.diagnose.checkpoint.findings import CHECKS
from moedoctor.diagnose.checkpoint.lint import Lint, lint

E = "model.layers.1.mlp.experts.2"
UP, GATE, DOWN = f"{E}.up_proj", f"{E}.gate_proj", f"{E}.down_proj"
ATTENTION = "model.layers.0.self_attn"
Change = Callable[[Made], None]


def set_(name: str, *values: float, shape: tuple[int, ...] = ()) -> Change:
    def change(made: Made) -> None:
        made.tensors[name] = f32(*values, shape=shape)

    return change


def drop(*names: str) -> Change:
    def change(made: Made) -> None:
        for name in names:
            del made.tensors[name]

    return change


def drop_parts(end: str) -> Change:
    def change(made: Made) -> None:
        for name in [one for one in made.tensors if one.endswith(end)]:
            del made.tensors[name]

    return change


def without(*parts: str) -> Change:
    """Drop all tensors whose name holds each of `parts`."""

    def change(made: Made) -> None:
        for name in [one for one in made.tensors if all(part in one for part in parts)]:
            del made.tensors[name]

    return change


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


def codes(name: str, *changed: int, every: bool = False) -> Change:
    """Overwrite the first block scales of a tensor, or all with the first code."""

    def change(made: Made) -> None:
        dtype, shape, data = made.tensors[name]
        new = bytes([changed[0]]) * len(data) if every else bytes(changed) + data[len(changed) :]
        made.tensors[name] = (dtype, shape, new)

    return change


def resize(name: str, dtype: str, shape: tuple[int, ...], size: int) -> Change:
    def change(made: Made) -> None:
        data = made.tensors[name][2] if name in made.tensors else b""
        made.tensors[name] = (dtype, shape, (data or b"\x38").ljust(size, b"\x38")[:size])

    return change


def quant(**values: Any) -> Change:
    return lambda made: made.config["quantization_config"].update(values)


def hf_quant(**values: Any) -> Change:
    def change(made: Made) -> None:
        assert made.hf_quant is not None
        made.hf_quant["quantization"].update(values)

    return change


def config(**values: Any) -> Change:
    return lambda made: made.config.update(values)


def all_of(*changes: Change) -> Change:
    def change(made: Made) -> None:
        for one in changes:
            one(made)

    return change


def no_hf_quant(made: Made) -> None:
    made.hf_quant = None


def index(change_it: Callable[[dict[str, str]], object]) -> Change:
    def change(made: Made) -> None:
        made.change_index = lambda value: change_it(value["weight_map"]) and None

    return change


def files(change_it: Callable[[Path], object]) -> Change:
    def change(made: Made) -> None:
        made.change_files = lambda folder: change_it(folder) and None

    return change


def to_bf16(module: str, *shape: int) -> Change:
    def change(made: Made) -> None:
        for part in ("weight_scale", "weight_scale_2", "input_scale"):
            made.tensors.pop(f"{module}.{part}", None)
        made.tensors[f"{module}.weight"] = ("BF16", shape, b"\x01\x3c" * (shape[0] * shape[1]))

    return change


def fp8_weight(module: str, *shape: int) -> Change:
    def change(made: Made) -> None:
        del made.tensors[f"{module}.weight_scale_2"]
        made.tensors[f"{module}.weight"] = ("F8_E4M3", shape, b"\x38" * (shape[0] * shape[1]))
        made.tensors[f"{module}.weight_scale"] = f32(0.01)

    return change


def quantise_attention(made: Made) -> None:
    module = f"{ATTENTION}.q_proj"
    made.tensors[f"{module}.weight"] = ("U8", (64, 32), b"\x12" * 2048)
    made.tensors[f"{module}.weight_scale"] = ("F8_E4M3", (64, 4), b"\x48" * 256)
    made.tensors[f"{module}.weight_scale_2"] = f32(1e-4)
    made.tensors[f"{module}.input_scale"] = f32(1e-2)


def narrow(made: Made) -> None:
    """Experts of 72 rows: 72 columns of the down projection do not hold whole blocks of 16."""
    _resize_experts(made, 72, 4)


def narrow_for_many(made: Made) -> None:
    """112 columns: 7 blocks, which 2, 4 and 8 GPUs cannot share."""
    _resize_experts(made, 112, 7)


def _resize_experts(made: Made, rows: int, blocks: int) -> None:
    for name, (_, shape, data) in list(made.tensors.items()):
        if ".experts." not in name or len(shape) != 2:
            continue
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            made.tensors[name] = ("U8", (rows, 32), data[: rows * 32])
        elif name.endswith(("gate_proj.weight_scale", "up_proj.weight_scale")):
            made.tensors[name] = ("F8_E4M3", (rows, 4), data[: rows * 4])
        elif name.endswith("down_proj.weight"):
            made.tensors[name] = ("U8", (64, rows // 2), data[: 64 * rows // 2])
        else:
            made.tensors[name] = ("F8_E4M3", (64, blocks), data[: 64 * blocks])


def repeated_key(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    text = path.read_text()
    line = next(one for one in text.splitlines() if f"{UP}.weight_scale_2" in one)
    path.write_text(text.replace(line, f"{line.rstrip(',')},\n{line}"))


def twice(made: Made) -> None:
    """The same tensor in two shards, as after a copy of a part of another export."""

    def add(folder: Path) -> None:
        from checkpoints_of_tests import write_safetensors

        own = {
            name: tensor
            for number, (name, tensor) in enumerate(made.tensors.items())
            if number % made.shards == made.shards - 1
        }
        names = list(made.tensors)
        other = next(one for one in names if one not in own and one.endswith("weight_scale_2"))
        last = f"model-{made.shards:05d}-of-{made.shards:05d}.safetensors"
        write_safetensors(folder / last, {**own, other: made.tensors[other]})

    made.change_files = add


def another_shard(weight_map: dict[str, str]) -> None:
    name = f"{UP}.weight"
    weight_map[name] = next(one for one in weight_map.values() if one != weight_map[name])


def one_shard_more(folder: Path) -> None:
    data = (folder / "model-00001-of-00002.safetensors").read_bytes()
    (folder / "model-00003-of-00002.safetensors").write_bytes(data)


def parts_of(module: str) -> list[str]:
    return [f"{module}.{part}" for part in ("weight", "weight_scale", "weight_scale_2", "input_scale")]


DAMAGE: list[tuple[str, Callable[[], Made], Change, dict[str, str]]] = [
    # what, base, change, {check: a part of the tensor named}
    (
        "kv scales absent",
        modelopt,
        all_of(drop_parts("k_scale"), drop_parts("v_scale")),
        {"kv_scales_missing": ATTENTION},
    ),
    ("one k scale absent", modelopt, drop(f"{ATTENTION}.k_proj.k_scale"), {"kv_scales_missing": ATTENTION}),
    (
        "a k scale of zero",
        modelopt,
        set_(f"{ATTENTION}.k_proj.k_scale", 0.0),
        {"kv_scales_missing": "k_scale"},
    ),
    (
        "a v scale of NaN",
        modelopt,
        set_(f"{ATTENTION}.v_proj.v_scale", float("nan")),
        {"scale_nan": "v_scale"},
    ),
    ("up scale doubled", modelopt, set_(f"{UP}.weight_scale_2", 3e-4), {"global_scale_mismatch": GATE}),
    (
        "gate scale a little off",
        modelopt,
        set_(f"{GATE}.weight_scale_2", 1.57e-4),
        {"global_scale_mismatch": GATE},
    ),
    (
        "packed: up scale",
        compressed,
        set_(f"{UP}.weight_global_scale", 999.0, shape=(1,)),
        {"global_scale_mismatch": GATE},
    ),
    ("input scale absent", modelopt, drop(f"{UP}.input_scale"), {"input_scale_missing": UP}),
    ("all input scales absent", modelopt, drop_parts(".input_scale"), {"input_scale_missing": "experts"}),
    ("packed: input scale absent", compressed, drop(f"{UP}.input_global_scale"), {"input_scale_missing": UP}),
    ("input scale zero", modelopt, set_(f"{UP}.input_scale", 0.0), {"input_scale_zero": UP}),
    ("input scale denormal", modelopt, set_(f"{UP}.input_scale", 1e-40), {"input_scale_zero": UP}),
    (
        "packed: input scale zero",
        compressed,
        set_(f"{UP}.input_global_scale", 0.0, shape=(1,)),
        {"input_scale_zero": UP},
    ),
    ("input scale negative", modelopt, set_(f"{UP}.input_scale", -0.1), {"scale_negative": UP}),
    ("input scale infinite", modelopt, set_(f"{UP}.input_scale", float("inf")), {"scale_nan": UP}),
    ("global scale NaN", modelopt, set_(f"{DOWN}.weight_scale_2", float("nan")), {"scale_nan": DOWN}),
    ("global scale zero", modelopt, set_(f"{DOWN}.weight_scale_2", 0.0), {"scale_zero": DOWN}),
    ("global scale negative", modelopt, set_(f"{DOWN}.weight_scale_2", -1e-4), {"scale_negative": DOWN}),
    ("global scale denormal", modelopt, set_(f"{DOWN}.weight_scale_2", 1e-39), {"scale_subnormal": DOWN}),
    ("global scale far off", modelopt, set_(f"{DOWN}.weight_scale_2", 0.9), {"scale_spread": "down_proj"}),
    ("input scale far off", modelopt, set_(f"{DOWN}.input_scale", 1e-8), {"scale_spread": DOWN}),
    (
        "packed: far off",
        compressed,
        set_(f"{DOWN}.weight_global_scale", 9e7, shape=(1,)),
        {"scale_spread": "down_proj"},
    ),
    (
        "global scale inverted",
        modelopt,
        set_(f"{DOWN}.weight_scale_2", 8000.0),
        {"scale_inverted": DOWN, "scale_spread": "down_proj"},
    ),
    (
        "packed: inverted",
        compressed,
        set_(f"{DOWN}.weight_global_scale", 1e-4, shape=(1,)),
        {"scale_inverted": DOWN, "scale_spread": DOWN},
    ),
    ("block scale NaN", modelopt, codes(f"{UP}.weight_scale", 0x7F), {"scale_nan": UP}),
    ("block scale negative", modelopt, codes(f"{UP}.weight_scale", 0x30, 0xB8), {"scale_negative": UP}),
    ("block scale zero", modelopt, codes(f"{UP}.weight_scale", 0x00), {"scale_zero": UP}),
    ("block scales subnormal", modelopt, codes(f"{UP}.weight_scale", 3, every=True), {"scale_subnormal": UP}),
    ("a few subnormal", modelopt, codes(f"{UP}.weight_scale", 1, 2, 7), {"scale_subnormal": UP}),
    ("packed: block scale NaN", compressed, codes(f"{UP}.weight_scale", 0xFF), {"scale_nan": UP}),
    (
        "block scales of one expert as small as they go",
        modelopt,
        all_of(*(codes(f"{one}.weight_scale", 0x08, every=True) for one in (UP, GATE, DOWN))),
        {"scale_spread": E},
    ),
    (
        "packed: block scales of one projection",
        compressed,
        codes(f"{UP}.weight_scale", 0x08, every=True),
        {"scale_spread": UP},
    ),
    (
        "down far from gate in a whole layer",
        modelopt,
        all_of(*(set_(f"{E[:-1]}{one}.down_proj.weight_scale_2", 1.25e-9) for one in range(4))),
        {"scale_spread": "layers.1.mlp.experts.0.down_proj"},
    ),
    (
        "block fp8: down far from gate",
        block_fp8,
        all_of(
            *(
                set_(f"{E[:-1]}{one}.down_proj.weight_scale_inv", *[1e-7] * 8, shape=(2, 4))
                for one in range(4)
            )
        ),
        {"scale_spread": "down_proj.weight_scale_inv"},
    ),
    (
        "block fp8: scale NaN",
        block_fp8,
        set_(f"{UP}.weight_scale_inv", *[float("nan")] * 8, shape=(4, 2)),
        {"scale_nan": UP},
    ),
    (
        "block fp8: scale zero",
        block_fp8,
        set_(f"{UP}.weight_scale_inv", *[0.0] * 8, shape=(4, 2)),
        {"scale_zero": UP},
    ),
    (
        "block fp8: shape",
        block_fp8,
        set_(f"{UP}.weight_scale_inv", *[0.1] * 4, shape=(2, 2)),
        {"shape_mismatch": UP},
    ),
    ("block fp8: TP", block_fp8, config(num_attention_heads=8), {"does_not_tile": "proj"}),
    (
        "algo unknown",
        modelopt,
        all_of(quant(quant_algo="NVFP5"), hf_quant(quant_algo="NVFP5")),
        {"quant_algo_unknown": "quant_algo"},
    ),
    (
        "method unknown",
        modelopt,
        all_of(quant(quant_method="nvidia"), no_hf_quant),
        {"quant_algo_unknown": "quant_method"},
    ),
    (
        "method of no ModelOpt",
        modelopt,
        all_of(quant(quant_method="modelopt_nonsense"), no_hf_quant),
        {"quant_algo_unknown": "quant_method"},
    ),
    (
        "algo absent",
        modelopt,
        all_of(quant(quant_algo=None), no_hf_quant),
        {"quant_algo_missing": "quant_algo"},
    ),
    (
        "quantisation not declared",
        compressed,
        lambda made: made.config.pop("quantization_config"),
        {"quant_algo_missing": "nvfp4"},
    ),
    (
        "declared FP8, is NVFP4",
        modelopt,
        all_of(quant(quant_algo="FP8"), hf_quant(quant_algo="FP8")),
        {"quant_algo_tensors": "fp8"},
    ),
    (
        "packed: groups without a type",
        compressed,
        quant(config_groups={"g": {"weights": {"num_bits": 3}}}),
        {"quant_algo_unknown": "config_groups"},
    ),
    ("files disagree: algo", modelopt, hf_quant(quant_algo="NVFP4_AWQ"), {"config_disagrees": "quant_algo"}),
    (
        "files disagree: KV",
        modelopt,
        hf_quant(kv_cache_quant_algo=None),
        {"config_disagrees": "kv_cache_quant_algo"},
    ),
    ("files disagree: group", modelopt, hf_quant(group_size=32), {"config_disagrees": "group_size"}),
    (
        "files disagree: excluded",
        modelopt,
        hf_quant(exclude_modules=["lm_head", "model.layers.*.self_attn*"]),
        {"config_disagrees": "mlp.gate"},
    ),
    ("excluded and quantised", modelopt, quantise_attention, {"excluded_quantised": f"{ATTENTION}.q_proj"}),
    (
        "not excluded, not quantised",
        modelopt,
        all_of(quant(ignore=["lm_head"]), no_hf_quant),
        {"unquantised_not_excluded": "self_attn"},
    ),
    (
        "packed: not excluded",
        compressed,
        quant(ignore=["lm_head", "re:.*layers.0.self_attn.*"]),
        {"unquantised_not_excluded": "layers.1.self_attn"},
    ),
    ("expert in BF16", modelopt, to_bf16(UP, 128, 64), {"experts_mixed": UP, "unquantised_not_excluded": UP}),
    (
        "expert in FP8",
        modelopt,
        fp8_weight(DOWN, 64, 128),
        {"experts_mixed": DOWN, "quant_algo_tensors": DOWN},
    ),
    ("scale without weight", modelopt, drop(f"{UP}.weight"), {"weight_missing": UP, "expert_missing": UP}),
    ("block scales absent", modelopt, drop(f"{UP}.weight_scale"), {"scale_missing": f"{UP}.weight_scale"}),
    (
        "global scale absent",
        modelopt,
        drop(f"{UP}.weight_scale_2"),
        {"scale_missing": f"{UP}.weight_scale_2"},
    ),
    ("packed: global scale absent", compressed, drop(f"{UP}.weight_global_scale"), {"scale_missing": UP}),
    (
        "block scales of another shape",
        modelopt,
        resize(f"{UP}.weight_scale", "F8_E4M3", (128, 2), 256),
        {"shape_mismatch": UP},
    ),
    (
        "F4 weight: block scales for twice the columns",
        modelopt,
        all_of(
            resize(f"{UP}.weight", "F4", (128, 64), 4096),
            resize(f"{UP}.weight_scale", "F8_E4M3", (128, 8), 1024),
        ),
        {"shape_mismatch": f"{UP}.weight_scale"},
    ),
    (
        "block scales as F32",
        modelopt,
        resize(f"{UP}.weight_scale", "F32", (128, 4), 2048),
        {"dtype_mismatch": UP},
    ),
    (
        "two global scales",
        modelopt,
        set_(f"{UP}.weight_scale_2", 1e-4, 1e-4, shape=(2,)),
        {"shape_mismatch": UP},
    ),
    ("expert absent", modelopt, drop(*parts_of(UP), *parts_of(GATE), *parts_of(DOWN)), {"expert_missing": E}),
    ("projection absent", modelopt, drop(*parts_of(UP)), {"expert_missing": UP}),
    (
        "no experts beside a router",
        modelopt,
        without("layers.1.mlp.experts"),
        {"expert_missing": "layers.1.mlp"},
    ),
    ("neither experts nor a router", modelopt, without("layers.1.mlp"), {"expert_missing": "model.layers.1"}),
    ("a layer absent", modelopt, without("layers.1."), {"expert_missing": "model.layers.1"}),
    (
        "a layer absent in the middle",
        modelopt,
        all_of(without("layers.0."), config(num_hidden_layers=None)),
        {"expert_missing": "model.layers.0"},
    ),
    (
        "fewer layers than declared",
        modelopt,
        config(num_hidden_layers=5),
        {"expert_missing": "model.layers.4"},
    ),
    (
        "a projection absent in a layer",
        modelopt,
        without("layers.1.mlp.experts", "up_proj"),
        {"expert_missing": "layers.1.mlp.experts.0.up_proj"},
    ),
    ("up absent in all layers", modelopt, without("experts", "up_proj"), {"expert_missing": "0.up_proj"}),
    ("gate absent in all layers", modelopt, without("experts", "gate_proj"), {"expert_missing": "gate_proj"}),
    ("down absent in all layers", modelopt, without("experts", "down_proj"), {"expert_missing": "down_proj"}),
    (
        "up absent where experts have no gate",
        modelopt,
        all_of(without("experts", "gate_proj"), without("layers.1", "up_proj"), config(hidden_act="relu2")),
        {"expert_missing": "layers.1.mlp.experts.0.up_proj"},
    ),
    (
        "group size of no NVFP4",
        modelopt,
        all_of(quant(group_size=32), hf_quant(group_size=32)),
        {"group_size_tensors": "group_size"},
    ),
    (
        "packed: group size",
        compressed,
        lambda made: made.config["quantization_config"]["config_groups"]["group_0"]["weights"].update(
            group_size=32
        ),
        {"group_size_tensors": "group_size"},
    ),
    ("zero scales far behind zero weights", modelopt, zeros_behind_zeros, {"scale_zero": UP}),
    ("more experts than declared", modelopt, config(num_experts=3), {"expert_extra": "experts.3"}),
    ("fewer experts than declared", modelopt, config(num_experts=5), {"expert_missing": "experts.4"}),
    ("shapes: no whole blocks", modelopt, narrow, {"block_incomplete": "down_proj"}),
    ("shapes: TP", modelopt, narrow_for_many, {"does_not_tile": "down_proj"}),
    (
        "index: tensor in no shard",
        lambda: modelopt(3),
        index(lambda found: found.update(ghost="model-00001-of-00003.safetensors")),
        {"index_disagrees": "ghost"},
    ),
    ("index: another shard", lambda: modelopt(3), index(another_shard), {"index_disagrees": UP}),
    (
        "index: tensor not named",
        lambda: modelopt(3),
        index(lambda found: found.pop(f"{UP}.weight")),
        {"index_disagrees": UP},
    ),
    ("index: tensor named twice", lambda: modelopt(3), files(repeated_key), {"tensor_duplicated": UP}),
    ("tensor in two shards", lambda: modelopt(3), twice, {"tensor_duplicated": "weight_scale_2"}),
    ("shard not named", lambda: modelopt(2), files(one_shard_more), {"index_disagrees": "all"}),
]


def checked(made: Made, folder: Path) -> tuple[Lint, dict[str, str]]:
    result = lint(made.write(folder))
    return result, {one.check: " ".join(place.tensor for place in one.places) for one in result.findings}


@pytest.mark.parametrize(
    "made",
    [modelopt(), modelopt(3), compressed(), compressed(2), block_fp8()],
    ids=["modelopt", "modelopt sharded", "packed", "packed sharded", "block fp8"],
)
def test_a_clean_checkpoint_is_silent(made: Made, tmp_path: Path) -> None:
    result, found = checked(made, tmp_path)
    assert found == {}
    assert result.tensors == len(made.tensors)
    assert result.block_scales_seen == 1


@pytest.mark.parametrize(
    ("base", "change", "expected"), [one[1:] for one in DAMAGE], ids=[one[0] for one in DAMAGE]
)
def test_damage_is_named_and_nothing_else(
    base: Callable[[], Made], change: Change, expected: dict[str, str], tmp_path: Path
) -> None:
    made = base()
    change(made)
    result, found = checked(made, tmp_path)
    assert found.keys() == expected.keys(), found
    for check, tensor in expected.items():
        assert tensor in found[check]
    for one in result.findings:
        assert one.count >= 1
        assert all(place.shard and place.value for place in one.places)


def test_the_number_of_kinds_of_damage() -> None:
    assert len({one[0] for one in DAMAGE}) >= 60
    # A shard that is not there has its own test.
    assert {check for one in DAMAGE for check in one[3]} >= CHECKS.keys() - {
        "shard_missing",
        "fused_scale_mismatch",
    }


def test_a_weight_of_f4_with_its_right_scales_is_clean(tmp_path: Path) -> None:
    made = modelopt()
    resize(f"{UP}.weight", "F4", (128, 64), 4096)(made)
    assert checked(made, tmp_path)[1] == {}


def test_sizes_for_some_tp_only_are_a_remark_and_come_last(tmp_path: Path) -> None:
    made = modelopt()
    narrow_for_many(made)
    drop(f"{ATTENTION}.k_proj.k_scale")(made)
    result, _ = checked(made, tmp_path)
    assert [one.check for one in result.findings] == ["kv_scales_missing", "does_not_tile"]
    assert [one.check for one in result.damage] == ["kv_scales_missing"]
    assert [one.record()["evidence"]["remark"] for one in result.findings] == [False, True]
    assert result.findings[1].places[0].value == "112 columns in units of 16: not for TP 2, 4, 8 (fits: 1)"


def test_a_dense_quantised_layer_is_cut_too(tmp_path: Path) -> None:
    made = modelopt()
    module = "model.layers.0.mlp.shared_expert.down_proj"
    made.tensors[f"{module}.weight"] = ("U8", (64, 48), b"\x12" * 64 * 48)
    made.tensors[f"{module}.weight_scale"] = ("F8_E4M3", (64, 6), b"\x48" * 64 * 6)
    made.tensors[f"{module}.weight_scale_2"] = f32(1e-4)
    made.tensors[f"{module}.input_scale"] = f32(1e-2)
    result, found = checked(made, tmp_path)
    assert found == {"does_not_tile": module}
    assert result.findings[0].places[0].value.endswith("not for TP 4, 8 (fits: 1, 2)")


def test_block_scales_ten_times_apart_are_no_damage(tmp_path: Path) -> None:
    """Every layer of a healthy checkpoint is within the factor that is reported, by a wide margin."""
    made = modelopt()
    codes(f"{UP}.weight_scale", 0x38, every=True)(made)  # 1 beside 448
    assert checked(made, tmp_path)[1] == {}


@pytest.mark.parametrize("chunk", [1, 7, 512, 4096])
def test_block_scales_are_counted_in_parts_as_at_once(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moedoctor.diagnose.checkpoint import values as checkpoint_values
    from moedoctor.diagnose.checkpoint.checkpoint import read_checkpoint

    monkeypatch.setattr(checkpoint_values, "_CHUNK", chunk)
    data = bytes(range(0x7C)) * 4 + bytes(
        (0x7F, 0xFF, 0x80, 0x81, 0x90, 0, 3, 3, 0xFE, 0x7D, 8, 9, 10, 11, 1, 2)
    )
    made = modelopt()
    made.tensors[f"{UP}.weight_scale"] = ("F8_E4M3", (128, 4), data)
    folder = made.write(tmp_path)
    info = read_checkpoint(folder).tensors[f"{UP}.weight_scale"]
    with checkpoint_values.Reader(folder) as reader:
        counts = reader.block_scales(info, whole=True)
    values = [checkpoint_values.E4M3[one] for one in data]
    assert counts.seen == 512
    assert counts.nan == 2
    assert counts.zero == sum(one == 0 for one in values)
    assert counts.negative == sum(one < 0 for one in values)
    assert counts.subnormal == sum(0 < one < 2.0**-6 for one in values)
    assert counts.largest == max(one for one in values if one == one) == 416


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    folder = modelopt(3).write(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    found = {one.check: one for one in lint(folder).findings}
    assert found["shard_missing"].places[0].shard == "model-00002-of-00003.safetensors"
    assert "index_disagrees" not in found, "its tensors are missing for that reason alone"


def test_fused_projections_with_scales_of_their_own(tmp_path: Path) -> None:
    made = modelopt()
    quantise_attention(made)
    for name in ("k_proj", "v_proj"):
        for part in ("weight", "weight_scale", "input_scale"):
            made.tensors[f"{ATTENTION}.{name}.{part}"] = made.tensors[f"{ATTENTION}.q_proj.{part}"]
        made.tensors[f"{ATTENTION}.{name}.weight_scale_2"] = f32(2e-4)
    _, found = checked(made, tmp_path)
    assert f"{ATTENTION}.q_proj" in found["fused_scale_mismatch"]


def test_a_scale_of_zero_over_weights_of_zero_is_right(tmp_path: Path) -> None:
    made = modelopt()
    codes(f"{UP}.weight_scale", 0x00)(made)
    codes(f"{UP}.weight", *[0x80] * 8)(made)
    assert checked(made, tmp_path)[1] == {}


def test_awq_needs_input_scales_and_weight_only_does_not(tmp_path: Path) -> None:
    made = modelopt()
    drop_parts(".input_scale")(made)
    all_of(quant(quant_algo="W4A16_NVFP4"), hf_quant(quant_algo="W4A16_NVFP4"))(made)
    assert checked(made, tmp_path / "a")[1] == {}
    all_of(quant(quant_algo="NVFP4_AWQ"), hf_quant(quant_algo="NVFP4_AWQ"))(made)
    assert "input_scale_missing" in checked(made, tmp_path / "b")[1]


def test_the_value_and_the_line(tmp_path: Path) -> None:
    made = modelopt()
    set_(f"{UP}.weight_scale_2", 6.25e-4)(made)
    all_of(quant(quant_algo="NVFP5"), no_hf_quant)(made)
    found = {one.check: one for one in checked(made, tmp_path)[0].findings}
    mismatch = found["global_scale_mismatch"]
    assert (mismatch.id, mismatch.line) == ("MD014", None)
    assert mismatch.places[0].value == "gate 0.00015625, up 0.000625"
    assert mismatch.places[0].shard == "model.safetensors"
    line = found["quant_algo_unknown"].line
    assert line is not None
    assert '"quant_algo": "NVFP5"' in (tmp_path / "config.json").read_text().splitlines()[line - 1]


def test_catalogue_ids() -> None:
    ids = {name: one.id for name, one in CHECKS.items() if one.id}
    assert ids == {
        "kv_scales_missing": "MD012",
        "global_scale_mismatch": "MD014",
        "input_scale_missing": "MD015",
        "input_scale_zero": "MD015",
    }


def test_every_value_of_a_scale_is_decoded_as_it_is(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from moedoctor.diagnose.checkpoint.values import E4M3, _decode

    every = torch.arange(256, dtype=torch.uint8)
    ours = torch.tensor(E4M3)
    assert torch.equal(ours.nan_to_num(-1e9), every.view(torch.float8_e4m3fn).float().nan_to_num(-1e9))
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float64, "F64")):
        values = torch.tensor([1.5, -0.0078125, 3e4], dtype=dtype)
        raw = values.view(torch.uint8).numpy().tobytes()
        assert _decode(name, raw) == tuple(values.tolist())


def test_large_block_scales_are_sampled_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moedoctor.diagnose.checkpoint import values as checkpoint_values
    from moedoctor.diagnose.checkpoint.checks import scales as lint_scales

    monkeypatch.setattr(lint_scales, "FULL_BYTES", 1000)
    monkeypatch.setattr(checkpoint_values, "_SAMPLE", 64)
    made = modelopt()
    dtype, shape, data = made.tensors[f"{UP}.weight_scale"]
    made.tensors[f"{UP}.weight_scale"] = (dtype, shape, data[:-1] + struct.pack("B", 0x7F))
    result, found = checked(made, tmp_path)
    assert found.keys() == {"scale_nan"}, "the last sample ends with the last scale"
    assert result.block_scales_seen == pytest.approx(192 / 512)
