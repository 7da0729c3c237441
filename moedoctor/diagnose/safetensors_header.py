"""The header of a safetensors file, read without trust and without the weights.

A file starts with the length of its header (64 bits, little endian) and the header, JSON that maps a tensor's
name to its dtype, shape and place. Everything in it is checked before it is believed.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

MOST_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""
_DIMENSIONS = 8
_LARGEST = 1 << 62
BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Dtype -> bits of one element."""


class CheckpointError(Exception):
    """A checkpoint that cannot be read; one line says which file, what is wrong and what was expected."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file, without its values."""

    shard: str
    """The file's name."""
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Where its bytes start in the file."""
    size: int
    """Bytes."""

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensor name -> tensor, for the file `path`. Raises CheckpointError where it is not as it must be."""
    try:
        with open(path, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path.name}: is {total} bytes long, expected a safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(MOST_HEADER_BYTES, total - 8):
                raise CheckpointError(
                    f"{path.name}: its header claims {length} bytes, expected at most "
                    f"{min(MOST_HEADER_BYTES, total - 8)}: damaged, truncated or no safetensors file"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path.name}: cannot be read ({error.strerror}), expected a safetensors file"
        ) from error
    entries = _entries(path.name, raw)
    tensors = {
        name: _tensor(path.name, name, entry, 8 + length, total - 8 - length)
        for name, entry in entries.items()
    }
    _check_places(path.name, tensors)
    return tensors


def _entries(shard: str, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in made if names.count(name) > 1)
            raise CheckpointError(f"{shard}: its header names {_short(twice)} twice, expected unique names")
        return made

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        said = str(error).split("\n")[0][:80]
        raise CheckpointError(f"{shard}: its header is no JSON ({said}), expected a JSON object") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{shard}: its header is a {type(entries).__name__}, expected a JSON object")
    entries.pop("__metadata__", None)
    return entries


def _tensor(shard: str, name: str, entry: Any, base: int, room: int) -> TensorInfo:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{shard}: tensor {_short(name)}: {what}")

    if not isinstance(entry, dict):
        raise wrong("is no object, expected dtype, shape and data_offsets")
    dtype, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise wrong(f"unknown dtype {_short(str(dtype))}, expected one of safetensors' own")
    if not _naturals(shape) or len(shape) > _DIMENSIONS:
        raise wrong(f"shape {_short(str(shape))}, expected up to {_DIMENSIONS} whole numbers from 0")
    if not _naturals(place) or len(place) != 2:
        raise wrong(f"data_offsets {_short(str(place))}, expected two whole numbers from 0")
    start, end = place
    if start > end or end > room:
        raise wrong(f"data_offsets {start} to {end}, expected a range within the {room} bytes of data")
    bits = math.prod(shape) * BITS[dtype]
    if (bits + 7) // 8 != end - start:
        raise wrong(f"{end - start} bytes for {dtype} {list(shape)}, expected {(bits + 7) // 8}")
    return TensorInfo(shard, dtype, tuple(shape), base + start, end - start)


def _check_places(shard: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError where two tensors share bytes."""
    ordered = sorted((one.start, one.size, name) for name, one in tensors.items() if one.size)
    for (start, size, name), (next_start, _, next_name) in pairwise(ordered):
        if next_start < start + size:
            raise CheckpointError(
                f"{shard}: tensors {_short(name)} and {_short(next_name)} overlap, expected a place for each"
            )


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < _LARGEST for one in value)


def _short(text: str) -> str:
    shown = "".join(one if one.isprintable() else "?" for one in text[:120])
    return f"{shown}…" if len(text) > 120 else shown
