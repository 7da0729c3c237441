"""A checkpoint folder: its JSON files and the headers of its shards. No weights are loaded."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moedoctor.diagnose.checkpoint.safetensors_header import (
    CheckpointError,
    TensorInfo,
    TruncatedError,
    read_header,
)
from moedoctor.text import TextFileError, list_names, read_text, shorten

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_INDEX_BYTES = 100_000_000
_MOST_JSON_BYTES = 16_000_000
_MOST_NESTED = 1_000_000
"""Lists and objects of a JSON file: they take more memory than their text."""
_MOST_SHARDS = 10_000
_SHARD = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)


@dataclass(frozen=True)
class JsonFile:
    name: str
    text: str
    value: dict[str, Any]
    repeated: tuple[str, ...] = ()
    """Keys that an object has twice; the last one counts."""

    def find_line(self, key: str) -> int | None:
        """Return the first line, from 1, with `key` as a key, or None."""
        match = re.search(rf'"{re.escape(key)}"\s*:', self.text)
        return None if match is None else self.text.count("\n", 0, match.start()) + 1


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    config: JsonFile
    hf_quant: JsonFile | None
    """``hf_quant_config.json``, which ModelOpt writes."""
    index: JsonFile | None
    weight_map: Mapping[str, str]
    """Tensor -> shard by the index; empty without an index."""
    tensors: Mapping[str, TensorInfo]
    """Tensors by the headers of the shards; the first one of a name that two shards have."""
    duplicates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensor -> all its shards, for tensors in more than one."""
    unlisted_shards: tuple[str, ...] = ()
    """Files named like shards of the model that the index does not name."""
    missing_shards: tuple[str, ...] = ()
    """Files that the index names and that do not exist."""
    truncated: Mapping[str, str] = field(default_factory=dict)
    """Files that end too early -> what is known of them. Their tensors are not among `tensors`."""


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder`. Raises CheckpointError if it cannot be read safely."""
    if not os.path.isdir(folder):  # Path.is_dir raises for impossible names
        raise CheckpointError(
            f"{shorten(str(folder), 200)}: is not a folder with config.json and safetensors files"
        )
    truncated: dict[str, str] = {}

    def read_whole(name: str) -> JsonFile | None:
        try:
            return read_json(folder, name)
        except TruncatedError as error:
            truncated[name] = _cut_name(error)
            return JsonFile(name, "", {}) if name == "config.json" else None

    config = read_whole("config.json")
    if config is None:
        raise CheckpointError(f"{folder}: has no config.json, expected a checkpoint folder")
    index = read_whole(INDEX)
    hf_quant = read_whole("hf_quant_config.json")
    weight_map = {} if index is None else _read_weight_map(index)
    if INDEX in truncated:
        shards = _list_names(folder, "model-*.safetensors")
    else:
        shards = sorted(set(weight_map.values())) if weight_map else _find_shards(folder)
    missing = {shard for shard in shards if _is_absent(folder / shard)}
    tensors: dict[str, TensorInfo] = {}
    duplicates: dict[str, tuple[str, ...]] = {}
    for shard in shards:
        if shard in missing:
            continue
        try:
            header = read_header(folder / shard)
        except TruncatedError as error:
            truncated[shard] = _cut_name(error)
            continue
        for name, info in header.items():
            if name in tensors:
                duplicates[name] = (*duplicates.get(name, (tensors[name].shard,)), shard)
            else:
                tensors[name] = info
    unlisted = set(_list_names(folder, "model-*.safetensors")) - set(shards)
    others = (tuple(sorted(unlisted)), tuple(sorted(missing)), truncated)
    return Checkpoint(folder, config, hf_quant, index, weight_map, tensors, duplicates, *others)


def _cut_name(error: TruncatedError) -> str:
    return str(error).partition(": ")[2]


def _find_shards(folder: Path) -> list[str]:
    if not _is_absent(folder / SINGLE):
        return [SINGLE]
    shards = _list_names(folder, "*.safetensors")
    if not shards:
        raise CheckpointError(f"{folder}: has no safetensors file, expected {SINGLE} or shards with {INDEX}")
    if len(shards) > 1:
        raise CheckpointError(f"{folder}: has {len(shards)} shards and no {INDEX}, expected one with them")
    return shards


def _is_absent(path: Path) -> bool:
    """Return True if there is no such file. A loop of links is there: reading it says what is wrong."""
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _list_names(folder: Path, pattern: str) -> list[str]:
    try:
        return list_names(folder, pattern)
    except TextFileError as error:
        raise CheckpointError(f"{folder}: {error.message}") from error


def _read_weight_map(index: JsonFile) -> dict[str, str]:
    shards = index.value.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{index.name}: has no weight_map, expected an object of tensors and files")
    for name, shard in shards.items():
        # A name only: a path could lead out of the folder.
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise CheckpointError(
                f"{index.name}: {name[:120]!r} is in {str(shard)[:120]!r}, expected the plain name of a "
                ".safetensors file in the same folder"
            )
    if len(set(shards.values())) > _MOST_SHARDS:
        raise CheckpointError(f"{index.name}: names more than {_MOST_SHARDS} shards, expected fewer")
    return shards


def read_json(folder: Path, name: str) -> JsonFile | None:
    """Return the object in a JSON file of `folder`, or None without the file. Raises CheckpointError."""
    path, most = folder / name, _MOST_INDEX_BYTES if name == INDEX else _MOST_JSON_BYTES
    repeated: list[str] = []

    def note_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            repeated.extend(name for name, count in counts.items() if count > 1)
        return value

    try:
        text = read_text(path, most, "JSON")
        if text.count("[") + text.count("{") > _MOST_NESTED:
            raise CheckpointError(f"{name}: holds more than {_MOST_NESTED} lists and objects, expected fewer")
        value = json.loads(text, object_pairs_hook=note_repeated)
    except TextFileError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise CheckpointError(f"{name}:{error.line}: {error.message}") from error
    except json.JSONDecodeError as error:
        # An unfinished text is found at its end, and an unfinished string at the quote that opens it.
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            raise TruncatedError(f"{name}: ends in line {error.lineno}, in the middle of JSON") from error
        raise CheckpointError(f"{name}:{error.lineno}: {error.msg}, expected JSON") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: cannot be read as JSON ({str(error)[:80]})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}:1: is a {type(value).__name__}, expected an object")
    return JsonFile(name, text, value, tuple(repeated))
