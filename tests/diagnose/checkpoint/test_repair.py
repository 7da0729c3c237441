"""`lint --fix`: the copy is clean, and only the bytes of the repaired tensors differ."""

import math
import os
import struct
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoints_of_tests import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, Made, compressed, f32, modelopt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.checkpoint import repair as repair_module
from moedoctor.diagnose.checkpoint.checkpoint import read_checkpoint
from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.diagnose.checkpoint.repair import RepairError, repair
from moedoctor.diagnose.checkpoint.values import E4M3

EXPERT = "model.layers.1.mlp.experts.2"
PARTS = {"weight_scale_2", "weight_global_scale"}


def tensors_of(folder: Path) -> dict[str, bytes]:
    found = {}
    for name, info in read_checkpoint(folder).tensors.items():
        with open(folder / info.shard, "rb") as file:
            file.seek(info.start)
            found[name] = file.read(info.size)
    return found


def weights(tensors: dict[str, bytes], module: str, rows: int) -> torch.Tensor:
    """Return the scale of each weight of a module, [rows, K]: its block scale times its global scale."""
    blocks = torch.tensor([E4M3[code] for code in tensors[f"{module}.weight_scale"]], dtype=torch.float64)
    if f"{module}.weight_scale_2" in tensors:
        (factor,) = struct.unpack("<f", tensors[f"{module}.weight_scale_2"])
    else:
        factor = 1 / struct.unpack("<f", tensors[f"{module}.weight_global_scale"])[0]
    return blocks.reshape(rows, -1) * factor  # [rows, K/16]


def input_factor(tensors: dict[str, bytes], module: str) -> float:
    if f"{module}.input_scale" in tensors:
        return struct.unpack("<f", tensors[f"{module}.input_scale"])[0]
    return 1 / struct.unpack("<f", tensors[f"{module}.input_global_scale"])[0]


def disagreeing(made: Made, experts: dict[tuple[int, int], float]) -> Made:
    """Multiply the global scale of the up half of these experts, by (layer, expert)."""
    for (layer, expert), ratio in experts.items():
        for part in PARTS:
            name = f"model.layers.{layer}.mlp.experts.{expert}.up_proj.{part}"
            if name in made.tensors:
                dtype, shape, data = made.tensors[name]
                made.tensors[name] = (dtype, shape, struct.pack("<f", struct.unpack("<f", data)[0] * ratio))
    return made


RATIOS = st.dictionaries(
    st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)),
    st.floats(0.1, 10).filter(lambda ratio: abs(ratio - 1) > 0.01),
    min_size=1,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    RATIOS,
    st.sampled_from([modelopt, compressed]),
    st.integers(1, 3),
    st.sampled_from(["silu", "swiglu_oai"]),
)
def test_the_repaired_checkpoint_is_clean_and_the_rest_keeps_its_bits(
    tmp_path_factory, ratios, base, shards, activation
):
    place = tmp_path_factory.mktemp("c")
    made = disagreeing(base(shards), ratios)
    made.config["hidden_act"] = activation
    folder = made.write(place / "c")
    (folder / "tokenizer.json").write_text("{}")
    before, originals = tensors_of(folder), {file.name: file.read_bytes() for file in folder.iterdir()}
    result = lint(folder)
    assert [finding.check for finding in result.findings] == ["global_scale_mismatch"]
    repaired = repair(result, place / "fix")
    assert lint(place / "fix").findings == repaired.result.findings == ()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == originals
    assert [file.name for file in place.iterdir() if file.name.startswith(".")] == []
    after = tensors_of(place / "fix")
    assert after.keys() == before.keys()
    changed = {name for name in before if before[name] != after[name]}
    allowed = {f"model.layers.{layer}.mlp.experts.{expert}." for layer, expert in ratios}
    assert all(name.startswith(tuple(allowed)) for name in changed)
    assert not any(name.endswith((".weight", ".weight_packed")) for name in changed)
    for layer, expert in ratios:
        head = f"model.layers.{layer}.mlp.experts.{expert}"
        gate, up, down = (
            [weights(each, f"{head}.{name}_proj", rows) for each in (before, after)]
            for name, rows in (("gate", INTERMEDIATE), ("up", INTERMEDIATE), ("down", HIDDEN))
        )
        if activation == "silu":
            # What the up half loses, the down projection gives back.
            assert not any(name.endswith("weight_scale") for name in changed)
            assert torch.allclose(up[0][0, 0] * down[0], up[1][0, 0] * down[1], rtol=1e-6)
            assert torch.equal(gate[0], gate[1])
            # The activations that reach the down projection are smaller by what its weights grow.
            inputs = [input_factor(each, f"{head}.down_proj") for each in (before, after)]
            assert math.isclose(inputs[0] * down[0][0, 0], inputs[1] * down[1][0, 0], rel_tol=1e-6)
        else:
            # E4M3 has three bits behind the point: rounding moves a scale by at most 1/16.
            assert torch.allclose(gate[0], gate[1], rtol=1 / 16)
            assert torch.allclose(up[0], up[1], rtol=1 / 16)
            assert torch.equal(down[0], down[1])


@pytest.mark.parametrize("bad", [0.0, 1e-45])
def test_an_input_scale_without_a_reciprocal_takes_the_largest_of_its_layer(bad, tmp_path):
    made = modelopt()
    made.tensors[f"{EXPERT}.down_proj.input_scale"] = f32(bad)
    folder = made.write(tmp_path / "c")
    repair(lint(folder), tmp_path / "fix")
    before, after = tensors_of(folder), tensors_of(tmp_path / "fix")
    assert {name for name in before if before[name] != after[name]} == {f"{EXPERT}.down_proj.input_scale"}
    (value,) = struct.unpack("<f", after[f"{EXPERT}.down_proj.input_scale"])
    assert math.isclose(value, 3e-3 * EXPERTS, rel_tol=1e-6)
    assert lint(tmp_path / "fix").findings == ()


def test_untouched_files_are_linked_and_an_existing_folder_is_refused(tmp_path: Path) -> None:
    folder = disagreeing(modelopt(3), {(1, 2): 2.0}).write(tmp_path / "c")
    (folder / "runs").mkdir()
    result = lint(folder)
    (tmp_path / "there").mkdir()
    with pytest.raises(RepairError, match="exists already"):
        repair(result, tmp_path / "there")
    repaired = repair(result, tmp_path / "fix")
    assert repaired.left_out == 1
    same = {file.name for file in (tmp_path / "fix").iterdir() if file.samefile(folder / file.name)}
    assert len(same) == repaired.linked
    assert same.isdisjoint(repaired.changed)
    assert same | set(repaired.changed) == {file.name for file in folder.iterdir() if file.is_file()}


def test_shards_behind_symlinks_keep_their_targets(tmp_path: Path) -> None:
    folder = disagreeing(modelopt(), {(0, 0): 2.0}).write(tmp_path / "c")
    os.rename(folder / "model.safetensors", tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    before = (tmp_path / "blob").read_bytes()
    repair(lint(folder), tmp_path / "fix")
    assert (tmp_path / "blob").read_bytes() == before
    assert not (tmp_path / "fix" / "model.safetensors").is_symlink()
    assert lint(tmp_path / "fix").findings == ()


@pytest.mark.parametrize("problem", [RepairError("no"), OSError("no"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_repair_that_failed(problem, tmp_path, monkeypatch):
    result = lint(disagreeing(modelopt(), {(0, 0): 2.0}).write(tmp_path / "c"))
    monkeypatch.setattr(repair_module, "_patch", Mock(side_effect=problem))
    with pytest.raises(type(problem)):
        repair(result, tmp_path / "fix")
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_a_repair_that_changes_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = lint(disagreeing(modelopt(), {(0, 0): 2.0}).write(tmp_path / "c"))
    monkeypatch.setattr(repair_module, "_patch", lambda *_: None)
    with pytest.raises(RepairError, match="still have all of global_scale_mismatch"):
        repair(result, tmp_path / "fix")
    assert not (tmp_path / "fix").exists()
