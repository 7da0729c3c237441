"""The header of a safetensors file, read without trust and without the weights.

A file starts with the length of its header (64 bits, little endian) and the header: JSON that maps a tensor's
name to its dtype, shape and place. The safetensors library does not give the places of tensors, so the header
is parsed here; the tests compare the result with the library.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from moedoctor.text import TextFileError, open_file

MOST_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""
_MOST_VALUES = 10_000_000
"""Lists, objects and commas of a header; they take more memory than their text. A tensor has about ten."""
_DIMENSIONS = 8
_POINTER = b"version https://git-lfs."
_LARGEST = 1 << 62
BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}
"""Dtype -> bits of one element."""


class CheckpointError(Exception):
    """A checkpoint that cannot be read; one line says which file, what is wrong and what was expected."""


class TruncatedError(CheckpointError):
    """A file that ends too early, or that was never downloaded."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file, without its values."""

    shard: str
    """The file's name."""
    dtype: str
    shape: tuple[int, ...]
    start: int
    """The offset of its bytes in the file."""
    size: int
    """Bytes."""

    @property
    def elements(self) -> int:
        """The number of its values."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of the file `path` by name. Raises CheckpointError for anything unexpected."""
    shard = path.name
    try:
        with open_file(path, expected="a safetensors file") as file:
            total = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise TruncatedError(f"{shard}: is {total} bytes long, expected a safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if prefix + file.read(len(_POINTER) - 8) == _POINTER:
                raise TruncatedError(
                    f"{shard}: is a pointer of Git LFS, expected the file itself: `git lfs pull` downloads it"
                )
            file.seek(8)
            if total - 8 < length <= MOST_HEADER_BYTES:
                raise TruncatedError(
                    f"{shard}: ends after {total} bytes, and its header alone claims {length} bytes"
                )
            if length > min(MOST_HEADER_BYTES, total - 8):
                raise CheckpointError(
                    f"{shard}: its header claims {length} bytes, expected at most "
                    f"{min(MOST_HEADER_BYTES, total - 8)}: damaged, truncated or no safetensors file"
                )
            raw = file.read(length)
    except TextFileError as error:
        raise CheckpointError(f"{shard}: {error.message}") from error
    except OSError as error:
        raise CheckpointError(
            f"{shard}: cannot be read ({error.strerror}), expected a safetensors file"
        ) from error
    base, room = 8 + length, total - 8 - length
    entries = {name: entry for name, entry in _read_entries(shard, raw).items() if name != "__metadata__"}
    # The tensors of a whole file end with it, so a file that ends earlier was cut.
    end = max((_end(entry) for entry in entries.values()), default=0)
    tensors = {key: _read_tensor(shard, key, entry, base, max(room, end)) for key, entry in entries.items()}
    if end > room:
        _check_places(shard, tensors, base, end)
        raise TruncatedError(f"{shard}: has {total} bytes, expected {base + end}")
    _check_places(shard, tensors, base, room)
    return tensors


def _end(entry: Any) -> int:
    """Return where the data of an entry ends, or 0 for an entry without places."""
    place = entry.get("data_offsets") if isinstance(entry, dict) else None
    return place[-1] if _are_naturals(place) and len(place) == 2 else 0


def _read_entries(shard: str, raw: bytes) -> dict[str, Any]:
    """Return the header as an object with unique names that are text."""

    def check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise CheckpointError(f"{shard}: its header names {_shorten(name)} twice, expected unique names")
        return made

    if sum(map(raw.count, (b"[", b"{", b","))) > _MOST_VALUES:
        raise CheckpointError(f"{shard}: its header holds more than {_MOST_VALUES} values, expected fewer")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=check_unique)
    except (ValueError, RecursionError) as error:
        raise _make_error(shard, str(error)) from error
    if not isinstance(header, dict):
        raise CheckpointError(
            f"{shard}: its header is a {type(header).__name__}, expected an object of tensors"
        )
    metadata = {} if header.get("__metadata__") is None else header["__metadata__"]
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{shard}: its header's __metadata__ has no text, expected a string for a name")
    try:
        "".join((*header, *metadata, *metadata.values())).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair is not text
        raise _make_error(shard, str(error)) from error
    return header


def _make_error(shard: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{shard}: its header is not JSON of safetensors ({_shorten(reason)})")


def _read_tensor(shard: str, name: str, entry: Any, base: int, room: int) -> TensorInfo:
    def make_error(what: str) -> CheckpointError:
        return CheckpointError(f"{shard}: tensor {_shorten(name)}: {what}")

    if not isinstance(entry, dict):
        raise make_error("is not an object, expected dtype, shape and data_offsets")
    dtype, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise make_error(f"unknown dtype {_shorten(str(dtype))}, expected one of safetensors' own")
    if not _are_naturals(shape) or len(shape) > _DIMENSIONS:
        raise make_error(f"shape {_shorten(str(shape))}, expected up to {_DIMENSIONS} whole numbers from 0")
    if not _are_naturals(place) or len(place) != 2:
        raise make_error(f"data_offsets {_shorten(str(place))}, expected two whole numbers from 0")
    start, end = place
    if start > end or end > room:
        raise make_error(f"data_offsets {start} to {end}, expected a range within the {room} bytes of data")
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8:
        raise make_error(f"{bits} bits for {dtype} {list(shape)}, expected whole bytes")
    if bits // 8 != end - start:
        raise make_error(f"{end - start} bytes for {dtype} {list(shape)}, expected {bits // 8}")
    return TensorInfo(shard, dtype, tuple(shape), base + start, end - start)


def _check_places(shard: str, tensors: Mapping[str, TensorInfo], base: int, room: int) -> None:
    """Raise CheckpointError if tensors share bytes or a byte has no tensor: engines load neither."""
    at, last = base, ""
    for start, size, name in sorted((info.start, info.size, name) for name, info in tensors.items()):
        if start < at:
            raise CheckpointError(
                f"{shard}: tensors {_shorten(last)} and {_shorten(name)} overlap, expected a place for each"
            )
        if start > at:
            raise CheckpointError(
                f"{shard}: {start - at} bytes before tensor {_shorten(name)} belong to no tensor: "
                "damaged, or its offsets are wrong"
            )
        at, last = start + size, name
    if at < base + room:
        after = f"after its last tensor {_shorten(last)}" if tensors else "and no tensor"
        raise CheckpointError(
            f"{shard}: has {base + room - at} bytes {after}, expected none: damaged or written twice"
        )


def _are_naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _LARGEST for item in value)


def _shorten(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:120])
    return f"{shown}…" if len(text) > 120 else shown
