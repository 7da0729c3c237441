"""The tensors whose addresses a recording noted, and where an address of a dump is beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moedoctor.text import escape, open_file, shorten

_MOST_HEADER = 4 * 2**20


class KnownTensor(NamedTuple):
    """A tensor on the GPU."""

    address: int
    size: int
    """Bytes."""
    name: str
    """``w13_weight of model.layers.1.mlp.experts``"""


@dataclass(frozen=True)
class TensorPlace:
    """A recorded tensor that the kernel was given, or that holds the address of a fault."""

    name: str
    size: int
    """Bytes."""
    offset: int | None
    """The address of the fault, in bytes from the tensor's first one; None if the address is not known."""


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
    """Return the tensors that records of capsules name."""
    found: dict[KnownTensor, None] = {}
    for record in records:
        named = record.get("addresses")
        for name, place in named.items() if isinstance(named, dict) else ():
            if isinstance(place, list) and len(place) == 2 and all(type(part) is int for part in place):
                shown = escape(shorten(f"{name} of {record.get('layer')}", 300))
                found[KnownTensor(place[0], place[1], shown)] = None
    return tuple(found)


def find_places(
    address: int | None, parameters: Sequence[int], tensors: Iterable[KnownTensor]
) -> tuple[TensorPlace, ...]:
    """Return the tensors that parameters point into or that hold the address, the nearest first."""
    known = [*parameters, *([] if address is None else [address])]
    found = [
        TensorPlace(tensor.name, tensor.size, None if address is None else address - tensor.address)
        for tensor in tensors
        if any(0 <= place - tensor.address < tensor.size for place in known)
    ]
    return tuple(sorted(found, key=lambda place: max(-(place.offset or 0), (place.offset or 0) - place.size)))
