"""`moedoctor lint --fix`: a repaired copy of a checkpoint in a new folder, checked before it is there.

JSON files are corrected by what the tensors show (`json_fix`). Scales are repaired with
`moedoctor.fixes.moe.checkpoint_scales`: different global scales of gate and up (w1 and w3), and input scales
without a finite reciprocal. Each repaired tensor keeps its dtype, shape and place, and all other bytes stay
as they are. Nothing is invented: a scale that is missing stays missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moedoctor.diagnose.checkpoint.findings import Lint
from moedoctor.diagnose.checkpoint.json_fix import CHECKS_OF_FILES, correct
from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.diagnose.checkpoint.modules import GLOBAL_SCALES, INPUT_SCALES, PAIRS, Module
from moedoctor.diagnose.checkpoint.safetensors_header import CheckpointError, TensorInfo
from moedoctor.diagnose.checkpoint.values import Reader
from moedoctor.models.config_fields import find_text_config
from moedoctor.processes import files, interrupts
from moedoctor.text import shorten

if TYPE_CHECKING:
    from moedoctor.reference.nvfp4 import Nvfp4

SCALE_CHECKS = frozenset({"global_scale_mismatch", "fused_scale_mismatch", "input_scale_zero"})
_LINEAR = frozenset({"silu", "gelu", "gelu_pytorch_tanh", "gelu_tanh", "relu2", "swish"})
"""Activations that do not clamp the up half."""
_MOST_RATIO = 16.0
"""Between two global scales. Beyond it the input scales of the experts of a layer would differ too much."""
_MOST_FILES = 20_000
_CHUNK = 1 << 24
_DOWN = {"gate_proj": "down_proj", "w1": "w2"}


class RepairError(CheckpointError):
    """A checkpoint that was not repaired; one line says why."""


@dataclass
class Repairs:
    json_files: Mapping[str, str] = field(default_factory=dict)
    """Name -> corrected text."""
    tensors: dict[str, bytes] = field(default_factory=dict)
    """Tensor -> its new bytes, as many as before."""
    checks: frozenset[str] = frozenset()
    """The checks whose findings this repairs, if the repaired checkpoint passes them."""

    def __bool__(self) -> bool:
        return bool(self.json_files or self.tensors)


@dataclass(frozen=True)
class Repaired:
    result: Lint
    """The lint of the new folder."""
    changed: tuple[str, ...]
    """Names of the files that differ from the old ones."""
    linked: int
    """The number of files that share their bytes with the old ones."""
    left_out: int
    """Folders and special files, which were not copied."""


def list_repairable_checks(result: Lint) -> frozenset[str]:
    """Return the checks among the findings that `--fix` has a repair for, without reading tensors."""
    if result.checkpoint.truncated or result.checkpoint.missing_shards:
        return frozenset()
    checks = {finding.check for finding in result.findings}
    by_files = {check for check in checks & CHECKS_OF_FILES if correct(result, {check})}
    experts = {gate.expert is not None for gate, _ in _list_pairs(result)}
    possible = {
        "input_scale_zero": any(len(modules) > 1 for modules in _group_input_scales(result).values()),
        "global_scale_mismatch": True in experts,
        "fused_scale_mismatch": False in experts,
    }
    return frozenset(by_files | {check for check in checks & SCALE_CHECKS if possible[check]})


def repair(result: Lint, folder: Path) -> Repaired:
    """Write a repaired copy of the checkpoint to the new `folder` and return what was done.

    The copy is made beside `folder`, linted, and renamed only if every repaired finding is gone and no new
    kind of damage came. Raises RepairError if there is nothing to repair or the copy is not clean, OSError
    if it cannot be written.
    """
    repairs = find_repairs(result)
    if not repairs:
        raise RepairError("nothing here can be repaired from the files alone")
    if os.path.lexists(folder):
        raise RepairError(f"{shorten(str(folder), 200)}: exists already; expected the name of a new folder")
    source = Path(os.path.realpath(result.checkpoint.folder))
    shards = {result.checkpoint.tensors[name].shard for name in repairs.tensors}
    room = sum((source / shard).stat().st_size for shard in shards)
    if (free := shutil.disk_usage(folder.parent).free) < room + _CHUNK:
        raise RepairError(f"needs {room} bytes in {folder.parent}, and {free} bytes are free")
    with interrupts.raise_signals():
        beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name[:60]}.moedoctor-"))
        try:
            linked, left_out = _copy(source, beside, repairs, shards)
            _patch(result, beside, repairs)
            checked = _check(result, beside, repairs)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(beside, 0o777 & ~mask)
            os.rename(beside, folder)  # raises if a folder with files came meanwhile
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return Repaired(checked, (*sorted(repairs.json_files), *sorted(shards)), linked, left_out)


def find_repairs(result: Lint) -> Repairs:
    """Return the new bytes of tensors and files. Reads the scales that are wrong, and no weights."""
    checks = list_repairable_checks(result)
    json_files = correct(result, checks & CHECKS_OF_FILES)
    tensors: dict[str, bytes] = {}
    if checks & SCALE_CHECKS:
        with Reader(result.checkpoint.folder) as reader:
            if "input_scale_zero" in checks:
                tensors.update(_repair_input_scales(result, reader))
            for gate, up in _list_pairs(result):
                tensors.update(_repair_halves(result, reader, gate, up, tensors))
    return Repairs(json_files, tensors, checks)


def _list_pairs(result: Lint) -> Iterator[tuple[Module, Module]]:
    """Give gate and up of each expert, or of a layer, that both have one global scale of their own."""
    for name, gate in result.modules.items():
        head, _, projection = name.rpartition(".")
        up = result.modules.get(f"{head}.{PAIRS.get(projection, '')}")
        if up is not None and gate.kind == up.kind == "nvfp4" and _find_single(gate) and _find_single(up):
            yield gate, up


def _find_single(module: Module, parts: Sequence[str] = GLOBAL_SCALES) -> str | None:
    """Return the part of a module that is its one scale as F32, or None."""
    named = (part for part in parts if part in module.parts)
    part = next(named, None)
    return part if part and module.parts[part].elements == 1 and module.parts[part].dtype == "F32" else None


def _repair_halves(
    result: Lint, reader: Reader, gate: Module, up: Module, changed: Mapping[str, bytes]
) -> Iterator[tuple[str, bytes]]:
    """Give new bytes that make the global scales of gate and up the same, if they differ."""
    factors = [_read_factor(reader, half) for half in (gate, up)]
    if factors[0] == factors[1] or not all(0 < factor < float("inf") for factor in factors):
        return
    head, _, projection = gate.name.rpartition(".")
    down = result.modules.get(f"{head}.{_DOWN[projection]}")
    ratio = factors[1] / factors[0]
    if (
        down is not None
        and _find_single(down)
        and _is_linear(result)
        and 1 / _MOST_RATIO <= ratio <= _MOST_RATIO
    ):
        yield from _fold_scales(reader, gate, up, down, changed)
    else:
        yield from _rescale_halves(reader, gate, up)


def _is_linear(result: Lint) -> bool:
    """Return True if the layers are linear in their up half: then a factor can move into the down half."""
    config = find_text_config(result.checkpoint.config.value)
    activation = next((config[key] for key in ("hidden_act", "hidden_activation") if key in config), None)
    return activation in _LINEAR and not any("limit" in key or "clamp" in key for key in config)


def _fold_scales(
    reader: Reader, gate: Module, up: Module, down: Module, changed: Mapping[str, bytes]
) -> Iterator[tuple[str, bytes]]:
    """Move the ratio of the scales into the down projection: exact, and only single scales change."""
    from moedoctor.fixes.moe.checkpoint_scales import fold

    halves = [_read_nvfp4(reader, module, blocks=False) for module in (gate, up, down)]
    w13, w2 = fold(*halves)
    ratio = float(w2.global_scale[0]) / float(halves[2].global_scale[0])
    yield _encode_global(up, float(w13.global_scale[0]))
    yield _encode_global(down, float(w2.global_scale[0]))
    if part := _find_single(down, INPUT_SCALES):
        name = down.name_tensor(part)
        (value,) = struct.unpack("<f", changed.get(name) or reader.read(down.parts[part]))
        yield name, struct.pack("<f", value * ratio if part == "input_global_scale" else value / ratio)


def _rescale_halves(reader: Reader, gate: Module, up: Module) -> Iterator[tuple[str, bytes]]:
    """Give both halves the larger global scale; the block scales of the other one are rounded again."""
    import torch

    from moedoctor.fixes.moe.checkpoint_scales import rescale

    halves = [_read_nvfp4(reader, module, blocks=True) for module in (gate, up)]
    w13 = rescale(*halves)
    common = float(w13.global_scale[0])
    rows = halves[0].block_scales.shape[1]
    blocks = w13.block_scales.view(torch.uint8)[0]  # [2I, H/16]
    for module, half, part in zip((gate, up), halves, (blocks[:rows], blocks[rows:]), strict=True):
        if float(half.global_scale[0]) != common:
            yield _encode_global(module, common)
            yield module.name_tensor("weight_scale"), part.contiguous().numpy().tobytes()


def _repair_input_scales(result: Lint, reader: Reader) -> Iterator[tuple[str, bytes]]:
    """Give a good input scale to experts without one: the largest of their layer and projection."""
    import torch

    from moedoctor.fixes.moe.checkpoint_scales import repair_input_scales

    for modules in _group_input_scales(result).values():
        parts = [(module, str(_find_single(module, INPUT_SCALES))) for module in modules]
        stored = torch.tensor(
            [struct.unpack("<f", reader.read(module.parts[part]))[0] for module, part in parts]
        )
        inverse = parts[0][1] == "input_global_scale"
        scales = stored.reciprocal() if inverse else stored  # [E]
        usable = repair_input_scales(scales, torch.zeros(1, 1))
        if not bool((usable == scales).any()):
            continue  # no expert of the layer has a scale to take
        for (module, part), old, new in zip(parts, scales.tolist(), usable.tolist(), strict=True):
            if old != new:
                yield module.name_tensor(part), struct.pack("<f", 1 / new if inverse else new)


def _group_input_scales(result: Lint) -> Mapping[tuple[str, str, str], Sequence[Module]]:
    """Return the experts of each layer with one input scale each, by layer, projection and part."""
    groups: dict[tuple[str, str, str], list[Module]] = {}
    for module in result.modules.values():
        part = _find_single(module, INPUT_SCALES)
        if module.expert is not None and part is not None:
            groups.setdefault((module.expert.layer, module.expert.projection, part), []).append(module)
    return groups


def _read_factor(reader: Reader, module: Module) -> float:
    """Return the factor of a module's weights; compressed-tensors stores its reciprocal."""
    part = str(_find_single(module))
    (value,) = struct.unpack("<f", reader.read(module.parts[part]))
    if part == "weight_global_scale":
        return 1 / value if value else float("inf")
    return float(value)


def _encode_global(module: Module, factor: float) -> tuple[str, bytes]:
    part = str(_find_single(module))
    return module.name_tensor(part), struct.pack(
        "<f", 1 / factor if part == "weight_global_scale" else factor
    )


def _read_nvfp4(reader: Reader, module: Module, *, blocks: bool) -> Nvfp4:
    """Return the scales of a module as one expert, without its packed weights, which no repair reads."""
    import torch

    from moedoctor.reference.nvfp4 import Nvfp4

    info = module.parts["weight_scale"]
    shape = (1, *info.shape) if blocks else (1, info.shape[0], 0)
    data = bytearray(reader.read(info)) if blocks else bytearray()
    scales = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    block_scales = scales.view(torch.float8_e4m3fn).reshape(shape)  # [1, N, K/16]
    packed = torch.empty((1, info.shape[0], 0), dtype=torch.uint8)  # [1, N, 0]
    return Nvfp4(packed, block_scales, torch.tensor([_read_factor(reader, module)], dtype=torch.float32))


def _copy(source: Path, folder: Path, repairs: Repairs, shards: set[str]) -> tuple[int, int]:
    """Link or copy the files of a checkpoint; return how many are linked and how many are left out."""
    linked = left_out = 0
    with os.scandir(source) as found:
        entries = [entry for _, entry in zip(range(_MOST_FILES + 1), found, strict=False)]
    if len(entries) > _MOST_FILES:
        raise RepairError(f"{source}: holds more than {_MOST_FILES} files, expected a checkpoint alone")
    for entry in entries:
        target = folder / entry.name
        if entry.name in repairs.json_files:
            files.write(target, repairs.json_files[entry.name])
        elif not entry.is_file():
            left_out += 1
        elif entry.name in shards:
            shutil.copyfile(entry.path, target)
        else:
            linked += _link(os.path.realpath(entry.path), target)
    for name in repairs.json_files.keys() - {entry.name for entry in entries}:
        files.write(folder / name, repairs.json_files[name])
    return linked, left_out


def _link(path: str, target: Path) -> bool:
    """Link the file, or copy it to another file system. Return whether it is linked."""
    with contextlib.suppress(OSError):
        os.link(path, target)
        return True
    shutil.copyfile(path, target)
    return False


def _patch(result: Lint, folder: Path, repairs: Repairs) -> None:
    """Write the new bytes of tensors over the old ones."""
    for name, data in repairs.tensors.items():
        info: TensorInfo = result.checkpoint.tensors[name]
        if len(data) != info.size:
            raise RepairError(f"{name[:120]!r}: {len(data)} bytes, expected {info.size}")
        with open(folder / info.shard, "r+b") as file:
            file.seek(info.start)
            file.write(data)


def _check(result: Lint, folder: Path, repairs: Repairs) -> Lint:
    """Return the lint of the repaired folder. Raises RepairError if anything is worse or nothing better."""
    checked = lint(folder)
    before, after = ({each.check: each.count for each in state.findings} for state in (result, checked))
    for check, count in after.items():
        if count > before.get(check, 0):
            raise RepairError(f"the copy would have {check} in {count} places, not {before.get(check, 0)}")
    if all(after.get(check) == before[check] for check in repairs.checks):
        raise RepairError(f"the copy would still have all of {', '.join(sorted(repairs.checks))}")
    return checked
