"""The scales of a checkpoint, read and decoded without torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from moedoctor.diagnose.checkpoint.safetensors_header import CheckpointError, TensorInfo
from moedoctor.text import TextFileError, open_file

FULL_BYTES = 1 << 30
"""Block scales are read whole if all of them together are no larger."""
_SAMPLE = 1 << 14
_SAMPLES = 3
_CHUNK = 1 << 22
"""Bytes of block scales in memory at a time."""
_NAN = bytes((0x7F, 0xFF))
_ZERO = bytes((0x00, 0x80))
_NEGATIVE = bytes(range(0x81, 0xFF))
_SUBNORMAL = bytes(range(0x01, 0x08))
_NORMAL = bytes(range(0x08, 0x7F))
_NOT_ABOVE = tuple(bytes((*range(code + 1), *range(0x7F, 0x100))) for code in range(0x7F))
"""Code of a positive number or 0 -> all codes except those of larger numbers."""
_BLOCK_BYTES = 8
_WINDOW = 1 << 12
"""Block scales that are compared with their weights in one step."""
_WINDOWS = 256
_WINDOWS_OF_ALL = 1 << 13
_ZEROS = 64
_MASK = bytes(0x77 if code in _ZERO else 0 for code in range(256))
"""Code of a block scale -> the bits of two E2M1 codes without their signs if it is 0, else 0."""
SMALLEST_NORMAL = 2.0**-6
"""The smallest normal number of E4M3."""
SMALLEST_NORMAL_F32 = 2.0**-126


@dataclass(frozen=True)
class BlockScaleCounts:
    """Counts over the E4M3 block scales of one tensor."""

    read: int
    nan: int
    zero: int
    negative: int
    subnormal: int
    largest: float


class Reader:
    """Reads values from the shards of `folder`, one open file at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = ""
        self._file: BinaryIO | None = None
        self._windows_left = _WINDOWS_OF_ALL

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, info: TensorInfo) -> bytes:
        """Return the bytes of a tensor of scales."""
        return self._read_part(info, 0, info.size)

    def read_floats(self, info: TensorInfo) -> tuple[float, ...]:
        """Return the values of a small tensor of F32, F64, F16, BF16 or F8_E4M3."""
        return _decode(info.dtype, self._read_part(info, 0, info.size))

    def count_block_scales(self, info: TensorInfo, whole: bool) -> BlockScaleCounts:
        """Count the E4M3 values of `info`, or of three samples of it if not `whole`."""
        places = _list_places(info, whole)
        read = nan = zero = negative = subnormal = largest = 0
        for offset, size in places:
            data = self._read_part(info, offset, size)
            odd = data.translate(None, _NORMAL)  # few, so that counting them costs little
            read += size
            nan += _count(odd, _NAN)
            zero += _count(odd, _ZERO)
            negative += _count(odd, _NEGATIVE)
            subnormal += _count(odd, _SUBNORMAL)
            # Codes of positive numbers are in the order of the numbers. Few parts have one above the others'.
            above = data.translate(None, _NOT_ABOVE[largest]) if largest < _NORMAL[-1] else b""
            largest = max(above, default=largest)
        return BlockScaleCounts(read, nan, zero, negative, subnormal, E4M3[largest])

    def count_zero_blocks(self, scales: TensorInfo, weight: TensorInfo, whole: bool) -> int:
        """Return how many blocks have a scale of 0 and NVFP4 codes that are not 0, up to 64: lost weights.

        At most 8 MB of weights of a tensor and 256 MB of all are read, from windows with such scales all over
        the tensor. Return 0 if the weight does not have a block's codes one after the other.
        """
        if (
            weight.dtype not in ("U8", "F4")
            or weight.size != scales.size * _BLOCK_BYTES
            or weight.shape[:-1] != scales.shape[:-1]
        ):
            return 0
        windows: list[tuple[int, int]] = []
        for offset, size in _list_places(scales, whole):
            data = self._read_part(scales, offset, size)
            for at in range(0, size, _WINDOW):
                window = data[at : at + _WINDOW]
                if len(window.translate(None, _ZERO)) < len(window):
                    windows.append((offset + at, len(window)))
        step = -(-len(windows) // _WINDOWS) or 1
        lost = 0
        for at, size in windows[::step]:
            if lost >= _ZEROS or self._windows_left == 0:
                break
            self._windows_left -= 1
            mask = self._read_part(scales, at, size).translate(_MASK)
            lost += _count_lost(mask, self._read_part(weight, at * _BLOCK_BYTES, size * _BLOCK_BYTES))
        return min(lost, _ZEROS)

    def _read_part(self, info: TensorInfo, offset: int, size: int) -> bytes:
        try:
            if self._file is None or self._name != info.shard:
                if self._file is not None:
                    self._file.close()
                self._file, self._name = open_file(self._folder / info.shard), info.shard
            self._file.seek(info.start + offset)
            data = self._file.read(size)
        except TextFileError as error:
            raise CheckpointError(f"{info.shard}: {error.message}") from error
        except OSError as error:
            raise CheckpointError(f"{info.shard}: cannot be read ({error.strerror})") from error
        if len(data) != size:
            raise CheckpointError(f"{info.shard}: ended while it was read, expected {size} bytes more")
        return data


def _list_places(info: TensorInfo, whole: bool) -> list[tuple[int, int]]:
    """Return offset and size of the parts of a tensor that are read: all of it, or three samples."""
    if whole or info.size <= _SAMPLES * _SAMPLE:
        return [(at, min(_CHUNK, info.size - at)) for at in range(0, info.size, _CHUNK)]
    step = (info.size - _SAMPLE) // (_SAMPLES - 1)
    return [(part * step, _SAMPLE) for part in range(_SAMPLES)]


def _count_lost(mask: bytes, codes: bytes) -> int:
    """Return how many of the blocks in `mask` hold a code that is not 0."""
    wide = bytearray(len(codes))
    for at in range(_BLOCK_BYTES):
        wide[at::_BLOCK_BYTES] = mask
    # One number for all of them: a comparison block by block would take seconds.
    left = int.from_bytes(wide, "little") & int.from_bytes(codes, "little")
    if not left:
        return 0
    data = left.to_bytes(len(codes), "little")
    empty = bytes(_BLOCK_BYTES)
    return sum(data[at : at + _BLOCK_BYTES] != empty for at in range(0, len(data), _BLOCK_BYTES))


def _count(data: bytes, codes: bytes) -> int:
    return len(data) - len(data.translate(None, codes))


def _decode_e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = tuple(_decode_e4m3(code) for code in range(256))
"""Code of float8_e4m3fn -> value."""


def _decode(dtype: str, data: bytes) -> tuple[float, ...]:
    if dtype == "F8_E4M3":
        return tuple(E4M3[code] for code in data)
    if dtype == "BF16":  # the upper half of an F32
        dtype, data = "F32", b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    code, size = {"F32": ("f", 4), "F64": ("d", 8), "F16": ("e", 2)}[dtype]
    return struct.unpack(f"<{len(data) // size}{code}", data)
