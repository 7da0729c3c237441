"""Values of small tensors, decoded without torch: the scales of a checkpoint."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from moedoctor.diagnose.safetensors_header import CheckpointError, TensorInfo

FULL_BYTES = 1 << 30
"""Block scales are read whole where all of them together are no larger."""
_SAMPLE = 1 << 14
_SAMPLES = 3
_CHUNK = 1 << 22
"""Bytes of block scales that are held at a time."""
_NAN = bytes((0x7F, 0xFF))
_ZERO = bytes((0x00, 0x80))
_NEGATIVE = bytes(range(0x81, 0xFF))
_SUBNORMAL = bytes(range(0x01, 0x08))
_NORMAL = bytes(range(0x08, 0x7F))
_NOT_ABOVE = tuple(bytes((*range(code + 1), *range(0x7F, 0x100))) for code in range(0x7F))
"""Code of a positive number or 0 -> all codes but those of larger numbers."""
_BLOCK_BYTES = 8
_LOOKED_AT = 1 << 20
_ZEROS = 64
_ZERO_PAIRS = bytes((0x00, 0x08, 0x80, 0x88))
SMALLEST_NORMAL = 2.0**-6
"""Of E4M3."""
SMALLEST_NORMAL_F32 = 2.0**-126


@dataclass(frozen=True)
class BlockScaleCounts:
    """What the E4M3 block scales of one tensor hold."""

    seen: int
    nan: int
    zero: int
    negative: int
    subnormal: int
    largest: float


class Reader:
    """Reads values out of the shards of `folder`, one open file at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = ""
        self._file: BinaryIO | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def floats(self, info: TensorInfo) -> tuple[float, ...]:
        """The values of a tensor of a few numbers, of F32, F64, F16, BF16 or an 8-bit float type."""
        return _decode(info.dtype, self._bytes(info, 0, info.size))

    def block_scales(self, info: TensorInfo, whole: bool) -> BlockScaleCounts:
        """Counts over the E4M3 values of `info`; over three samples of it where not `whole`."""
        if whole or info.size <= _SAMPLES * _SAMPLE:
            places = [(at, min(_CHUNK, info.size - at)) for at in range(0, info.size, _CHUNK)]
        else:
            step = (info.size - _SAMPLE) // (_SAMPLES - 1)
            places = [(part * step, _SAMPLE) for part in range(_SAMPLES)]
        seen = nan = zero = negative = subnormal = largest = 0
        for offset, size in places:
            data = self._bytes(info, offset, size)
            odd = data.translate(None, _NORMAL)  # few, so that counting them costs little
            seen += size
            nan += _count(odd, _NAN)
            zero += _count(odd, _ZERO)
            negative += _count(odd, _NEGATIVE)
            subnormal += _count(odd, _SUBNORMAL)
            # Codes of positive numbers are in the order of the numbers. Few parts have one above the others'.
            above = data.translate(None, _NOT_ABOVE[largest]) if largest < _NORMAL[-1] else b""
            largest = max(above, default=largest)
        return BlockScaleCounts(seen, nan, zero, negative, subnormal, E4M3[largest])

    def zero_blocks(self, scales: TensorInfo, weight: TensorInfo) -> int:
        """Of the first blocks with a scale of 0, how many hold NVFP4 codes that are not: weights lost."""
        if weight.dtype not in ("U8", "F4") or weight.size != scales.size * _BLOCK_BYTES:
            return 0
        data, lost, at = self._bytes(scales, 0, min(scales.size, _LOOKED_AT)), 0, -1
        for _ in range(_ZEROS):
            at = min(
                (one for one in (data.find(code, at + 1) for code in (b"\x00", b"\x80")) if one >= 0),
                default=-1,
            )
            if at < 0:
                break
            codes = self._bytes(weight, at * _BLOCK_BYTES, _BLOCK_BYTES)
            lost += bool(codes.translate(None, _ZERO_PAIRS))
        return lost

    def _bytes(self, info: TensorInfo, offset: int, size: int) -> bytes:
        try:
            if self._file is None or self._name != info.shard:
                if self._file is not None:
                    self._file.close()
                self._file, self._name = open(self._folder / info.shard, "rb"), info.shard  # noqa: SIM115
            self._file.seek(info.start + offset)
            data = self._file.read(size)
        except OSError as error:
            raise CheckpointError(f"{info.shard}: cannot be read ({error.strerror})") from error
        if len(data) != size:
            raise CheckpointError(f"{info.shard}: ended while it was read, expected {size} bytes more")
        return data


def _count(data: bytes, codes: bytes) -> int:
    return len(data) - len(data.translate(None, codes))


def _e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = tuple(_e4m3(code) for code in range(256))
"""Code -> value, of float8_e4m3fn."""


def _decode(dtype: str, data: bytes) -> tuple[float, ...]:
    if dtype == "F8_E4M3":
        return tuple(E4M3[code] for code in data)
    if dtype == "BF16":
        halves: Iterable[int] = struct.unpack(f"<{len(data) // 2}H", data)
        return struct.unpack(f"<{len(data) // 2}f", b"".join(struct.pack("<I", one << 16) for one in halves))
    code, size = {"F32": ("f", 4), "F64": ("d", 8), "F16": ("e", 2)}[dtype]
    return struct.unpack(f"<{len(data) // size}{code}", data)
