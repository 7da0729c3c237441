"""The tensors whose addresses a recording noted, and the one that an address of a dump is in or behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moedoctor.text import escape, open_file, shorten

_MOST_HEADER = 4 * 2**20


@dataclass(frozen=True)
class KnownTensor:
    """A tensor on the GPU."""

    name: str
    """``w13_weight of model.layers.1.mlp.experts``"""
    address: int
    size: int
    """Bytes."""

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.size


def read_record(file: Path) -> dict[str, Any]:
    """Return the record in the header of a capsule, without its tensors; empty if it has none."""
    with open_file(file, expected="a capsule") as stream:
        data = stream.read(min(int.from_bytes(stream.read(8), "little"), _MOST_HEADER))
    try:
        record = json.loads(json.loads(data)["__metadata__"]["record"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def list_tensors(records: Iterable[dict[str, Any]]) -> tuple[KnownTensor, ...]:
    """Return the tensors that records of capsules name, each address once, in the order of addresses."""
    found: dict[int, KnownTensor] = {}
    for record in records:
        named = record.get("addresses")
        for name, place in named.items() if isinstance(named, dict) else ():
            if isinstance(place, list) and len(place) == 2 and all(type(part) is int for part in place):
                shown = escape(shorten(f"{name} of {record.get('layer')}", 300))
                found.setdefault(place[0], KnownTensor(shown, place[0], place[1]))
    return tuple(sorted(found.values(), key=lambda tensor: tensor.address))


def find_given(parameters: Iterable[int], tensors: Sequence[KnownTensor]) -> tuple[KnownTensor, ...]:
    """Return the tensors that a kernel's parameters point into."""
    found = (
        tensor for place in parameters for tensor in tensors if tensor.address <= place < max(tensor.end, 1)
    )
    return tuple(dict.fromkeys(found))


def find_nearest(
    address: int | None, given: Sequence[KnownTensor], tensors: Sequence[KnownTensor]
) -> KnownTensor | None:
    """Return the tensor that holds an address, or else the last one before it that the kernel was given."""
    if address is None:
        return None
    inside = [tensor for tensor in tensors if tensor.address <= address < tensor.end]
    before = [tensor for tensor in given if tensor.end <= address]
    return inside[-1] if inside else max(before, key=lambda tensor: tensor.end, default=None)
