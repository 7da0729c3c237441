"""Each kind of damage gives one finding with its tensor and file; a clean checkpoint gives none."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints_of_tests import (
    Made,
    block_fp8,
    compressed,
    compressed_groups,
    f32,
    fused,
    mixed,
    modelopt,
    write_safetensors,
)

from moedoctor.diagnose.checkpoint import values as checkpoint_values
from moedoctor.diagnose.checkpoint.checkpoint import read_checkpoint
from moedoctor.diagnose.checkpoint.checks import scales as scale_checks
from moedoctor.diagnose.checkpoint.findings import CHECKS, Lint
from moedoctor.diagnose.checkpoint.json_fix import correct
from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.reporters.pages.lint import LintDocument
from tests.cases import load_cases

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
    made.tensors = {
        name: tensor for name, tensor in made.tensors.items() if not all(part in name for part in parts)
    }


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


def unlist(settings: Settings) -> None:
    del settings["quantized_layers"][UP]


def undeclare(made: Made) -> None:
    del made.config["quantization_config"]


def add_group_without_weights(settings: Settings) -> None:
    settings["config_groups"]["a"] = {"targets": ["A"], "weights": None}


# Changes to the index and to files.


def name_ghost(weight_map: dict[str, str]) -> None:
    weight_map["ghost"] = "model-00001-of-00003.safetensors"


def unname(weight_map: dict[str, str]) -> None:
    del weight_map[f"{UP}.weight"]


def remove_second_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def cut_second_shard(folder: Path) -> None:
    os.truncate(folder / "model-00002-of-00003.safetensors", 9_000)


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
    write_safetensors(path, {name: tensors[name] for name in (*last, other)})


def downs(part: str, *values: float, shape: tuple[int, ...] = ()) -> list[Change]:
    return [set_(f"{E[:-1]}{expert}.down_proj.{part}", *values, shape=shape) for expert in range(4)]


def bf16() -> Made:
    """Give a checkpoint that is not quantized."""
    made = block_fp8()
    without("weight_scale_inv")(made)
    for name, (dtype, shape, data) in list(made.tensors.items()):
        if dtype == "F8_E4M3":
            made.tensors[name] = ("BF16", shape, data * 2)
    del made.config["quantization_config"]
    return made


BASES: dict[str, Callable[[], Made]] = {
    **{
        make.__name__: make
        for make in (modelopt, compressed, block_fp8, mixed, compressed_groups, fused, bf16)
    },
    "modelopt in 2 shards": lambda: modelopt(2),
    "modelopt in 3 shards": lambda: modelopt(3),
    "compressed in 2 shards": lambda: compressed(2),
    "fused, transposed": lambda: fused(transposed=True),
}
MODULES = {"E": E, "UP": UP, "GATE": GATE, "DOWN": DOWN, "FUSED": FUSED, "ATTENTION": ATTENTION}
MODULES |= {"Q": Q, "K": K, "V": V}
CASES = load_cases(__file__)


def read_value(value: Any) -> Any:
    """Return a value of a case with the names of modules in the place of ``{UP}`` and others."""
    if isinstance(value, dict):
        return {key: read_value(each) for key, each in value.items()}
    if isinstance(value, list):
        return [read_value(each) for each in value]
    return value.format_map(MODULES) if isinstance(value, str) else value


def read_change(row: Any) -> Any:
    """Return a function above by its name, or what it returns: ``{drop: ['{UP}.weight']}``."""
    if isinstance(row, str):
        return globals()[row]
    ((name, given),) = row.items()
    if name in ("in_both", "in_config", "files", "index"):
        return globals()[name](read_change(given))
    given = [given] if isinstance(given, dict) else given
    named = given[-1] if given and isinstance(given[-1], dict) else {}
    return globals()[name](*read_value(given[: len(given) - bool(named)]), **read_value(named))


def make_checkpoint(base: str, changes: list[Any]) -> Made:
    made = BASES[base]()
    for row in changes:
        change = read_change(row)
        for each in change if isinstance(change, list) else [change]:
            each(made)
    return made


def checked(made: Made, folder: Path) -> tuple[Lint, dict[str, str]]:
    result = lint(made.write(folder))
    return result, {
        finding.check: " ".join(place.tensor for place in finding.places) for finding in result.findings
    }


@pytest.mark.parametrize(("base", "name", "changes"), CASES["a_clean_checkpoint_has_no_findings"])
def test_a_clean_checkpoint_has_no_findings(base: str, name: str, changes: list[Any], tmp_path: Path) -> None:
    made = make_checkpoint(base, changes)
    result, found = checked(made, tmp_path)
    assert found == {}, name
    assert result.tensors == len(made.tensors)
    assert result.block_scales_seen == 1


@pytest.mark.parametrize(
    ("base", "name", "changes", "expected"), CASES["each_damage_gives_its_finding_and_no_other"]
)
def test_each_damage_gives_its_finding_and_no_other(
    base: str, name: str, changes: list[Any], expected: dict[str, str], tmp_path: Path
) -> None:
    result, found = checked(make_checkpoint(base, changes), tmp_path)
    assert found.keys() == expected.keys(), (name, found)
    for check, tensor in read_value(expected).items():
        assert tensor in found[check]
    for finding in result.findings:
        assert finding.count >= 1
        assert all(place.shard and place.value for place in finding.places)


def test_every_check_has_a_case() -> None:
    cases = CASES["each_damage_gives_its_finding_and_no_other"]
    named = {check for *_, expected in cases for check in expected}
    # test_names.py has a case for releases before the newest one.
    assert named == {name for name, row in CHECKS.items() if not row.asked} - {"name_skipped_before"}


@pytest.mark.parametrize(("base", "changes"), CASES["corrected_files_are_clean"])
def test_corrected_files_are_clean(base: str, changes: list[Any], tmp_path: Path) -> None:
    folder = make_checkpoint(base, changes).write(tmp_path)
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
    assert [row.evidence.remark for row in LintDocument.from_result(result, "m", ()).findings] == [
        False,
        True,
    ]
    assert result.findings[1].places[0].value == "112 columns in units of 16: not for TP 2, 4, 8 (fits: 1)"


def test_a_dense_quantised_layer_is_cut_too(tmp_path: Path) -> None:
    made, module = modelopt(), "model.layers.0.mlp.shared_expert.down_proj"
    add_nvfp4(module, 64, 96)(made)
    result, found = checked(made, tmp_path)
    assert found == {"does_not_tile": module}
    assert result.findings[0].places[0].value.endswith("not for TP 4, 8 (fits: 1, 2)")


@pytest.mark.parametrize("chunk", [1, 7, 512, 4096])
def test_block_scales_are_counted_in_parts_as_at_once(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_large_block_scales_are_sampled_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_checks, "FULL_BYTES", 1000)
    monkeypatch.setattr(checkpoint_values, "_SAMPLE", 64)
    made = modelopt()
    dtype, shape, data = made.tensors[f"{UP}.weight_scale"]
    made.tensors[f"{UP}.weight_scale"] = (dtype, shape, data[:-1] + struct.pack("B", 0x7F))
    result, found = checked(made, tmp_path)
    assert found.keys() == {"scale_nan"}, "the last sample ends with the last scale"
    assert result.block_scales_seen == pytest.approx(192 / 512)
