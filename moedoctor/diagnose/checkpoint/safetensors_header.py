"""The header of a safetensors file, read without trust and without the weights.

A file starts with the length of its header (64 bits, little endian) and the header, JSON that maps a tensor's
name to its dtype, shape and place. Everything in it is checked before it is believed, entry by entry: a
header of something else is refused at its first entry, before it has cost memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

MOST_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""
_DIMENSIONS = 8
_LARGEST = 1 << 62
_MOST_VALUE_CHARACTERS = 2000
"""Of an entry as JSON, with white space to spare: 8 dimensions and 2 offsets take about 300."""
_SPACE = re.compile(r"[ \t\n\r]*")
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
            header = _HeaderText(path.name, file.read(length))
    except OSError as error:
        raise CheckpointError(
            f"{path.name}: cannot be read ({error.strerror}), expected a safetensors file"
        ) from error
    return _tensors(path.name, header, 8 + length, total - 8 - length)


def _tensors(shard: str, header: _HeaderText, base: int, room: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name in header.names():
        if name == "__metadata__":
            header.metadata()
        elif name in tensors:
            raise CheckpointError(f"{shard}: its header names {_short(name)} twice, expected unique names")
        else:
            tensors[name] = _tensor(shard, name, header.value(), base, room)
    header.end()
    _check_places(shard, tensors, base, room)
    return tensors


class _HeaderText:
    """The header's text, read from its start to its end by those who know what comes next."""

    def __init__(self, shard: str, raw: bytes) -> None:
        try:
            self._text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{shard}: its header is no JSON ({error.reason}), expected UTF-8"
            ) from error
        self._shard = shard
        self._at = 0
        self._decoder = json.JSONDecoder(object_pairs_hook=self._unique)

    def names(self) -> Iterator[str]:
        """The names of the object that comes next. The caller reads each one's value before the next name."""
        self._mark("{", "an object")
        if self._next() == "}":
            self._mark("}", "its end")
            return
        while True:
            name = self._string()
            self._mark(":", "a colon")
            yield name
            if self._mark(",}", "a comma or the object's end") == "}":
                return

    def value(self) -> Any:
        """The value that comes next, of up to 2000 characters."""
        self._next()
        part = self._text[self._at : self._at + _MOST_VALUE_CHARACTERS]
        try:
            found, size = self._decoder.raw_decode(part)
        except (ValueError, RecursionError) as error:
            raise self._wrong("a short value") from error
        if size == _MOST_VALUE_CHARACTERS:  # a number may go on behind it
            raise self._wrong("a short value")
        self._at += size
        return found

    def metadata(self) -> None:
        """Pass over the metadata that come next: an object of strings, of any length, or null."""
        if self._next() == "n":
            self.value()
            return
        for _ in self.names():
            self._string()

    def end(self) -> None:
        """Raise CheckpointError where something comes behind the header's object."""
        if self._next():
            raise self._wrong("nothing more")

    def _string(self) -> str:
        if self._next() != '"':
            raise self._wrong("a string")
        try:
            found, end = self._decoder.raw_decode(self._text, self._at)
            found.encode()  # half of a surrogate pair is no text
        except ValueError as error:
            raise self._wrong("a string") from error
        self._at = end
        return str(found)

    def _next(self) -> str:
        """The next character that is not white space; empty at the end."""
        space = _SPACE.match(self._text, self._at)
        self._at = self._at if space is None else space.end()
        return self._text[self._at : self._at + 1]

    def _mark(self, expected: str, what: str) -> str:
        found = self._next()
        if not found or found not in expected:
            raise self._wrong(what)
        self._at += 1
        return found

    def _wrong(self, expected: str) -> CheckpointError:
        found = self._text[self._at : self._at + 20]
        shown = "a list" if found[:1] == "[" else _short(found) or "its end"
        return CheckpointError(
            f"{self._shard}: its header is no JSON of safetensors: {shown} at character {self._at}, "
            f"expected {expected}"
        )

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise CheckpointError(
                f"{self._shard}: an entry of its header names {_short(_first_twice(pairs))} twice, expected "
                "unique names"
            )
        return made


def _first_twice(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    return ""


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
    if bits % 8:
        raise wrong(f"{bits} bits for {dtype} {list(shape)}, expected whole bytes")
    if bits // 8 != end - start:
        raise wrong(f"{end - start} bytes for {dtype} {list(shape)}, expected {bits // 8}")
    return TensorInfo(shard, dtype, tuple(shape), base + start, end - start)


def _check_places(shard: str, tensors: Mapping[str, TensorInfo], base: int, room: int) -> None:
    """Raise CheckpointError where two tensors share bytes or a byte has no tensor: no engine loads either."""
    at, last = base, ""
    for start, size, name in sorted((one.start, one.size, name) for name, one in tensors.items()):
        if start < at:
            raise CheckpointError(
                f"{shard}: tensors {_short(last)} and {_short(name)} overlap, expected a place for each"
            )
        if start > at:
            raise CheckpointError(
                f"{shard}: {start - at} bytes before tensor {_short(name)} are no tensor's, expected none: "
                "damaged, or its offsets are wrong"
            )
        at, last = start + size, name
    if at < base + room:
        after = f"after its last tensor {_short(last)}" if tensors else "and no tensor"
        raise CheckpointError(
            f"{shard}: has {base + room - at} bytes {after}, expected none: damaged or written twice"
        )


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < _LARGEST for one in value)


def _short(text: str) -> str:
    shown = "".join(one if one.isprintable() else "?" for one in text[:120])
    return f"{shown}…" if len(text) > 120 else shown
