"""A routing trace: which experts a model's routers chose, in a safetensors file.

The file holds

- ``topk_ids`` uint8 or uint16 [rows, layers, top_k]: expert ids, one row a token, in the order in which the
  tokens were computed. The greatest value of the type (255, 65535) stands for "no expert", which is -1 in
  memory; so uint8 serves up to 255 experts.
- ``call_rows`` int32 [calls]: how many rows each forward pass had. The sum is the number of rows.
- ``stream_rows`` int32 [streams], optional: the rows of each sequence, if the rows of a sequence follow each
  other and every call had one row. Only such a trace can be replayed at another batch size.

and as metadata, all of them text: ``format`` (``moedoctor-routing-trace``), ``version`` (``1``),
``num_experts``, ``layers`` (a JSON list of the names of the MoE layers, in their order), ``model``, and
``made`` (a JSON object: how the trace was made). Reading needs neither torch nor NumPy.
"""

from __future__ import annotations

import itertools
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moedoctor.processes.files import write
from moedoctor.text import TextFileError, read_bytes

FORMAT = "moedoctor-routing-trace"
VERSION = "1"
NO_EXPERT = -1
MAX_BYTES = 512 * 2**20
_MAX_EXPERTS = 65_535
_CODES = {"U8": "B", "U16": "H", "I32": "i"}
"""safetensors' names of types -> those of `array`."""

Call = tuple[int, ...]
"""The expert ids that one forward pass of one layer needs, each once, in ascending order."""


class TraceError(Exception):
    """A trace that cannot be used; one line says what is wrong and what was expected."""


@dataclass(frozen=True)
class RoutingTrace:
    """The experts that a model's routers chose. Raises TraceError for parts that do not fit together."""

    topk_ids: Sequence[int]
    """[rows * layers * top_k], row by row; -1 for no expert."""
    num_experts: int
    top_k: int
    layers: tuple[str, ...]
    """Names of the MoE layers."""
    call_rows: tuple[int, ...]
    """Rows of each forward pass."""
    stream_rows: tuple[int, ...] = ()
    """Rows of each sequence; empty if the trace does not tell the sequences apart."""
    model: str = "unknown"
    made: Mapping[str, Any] = field(default_factory=dict)
    """The way the trace was made, as plain JSON values."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= _MAX_EXPERTS:
            raise TraceError(f"num_experts is {self.num_experts}, expected 1 to {_MAX_EXPERTS}")
        if not 1 <= self.top_k <= self.num_experts:
            raise TraceError(f"top_k is {self.top_k}, expected 1 to the {self.num_experts} experts")
        if not self.layers:
            raise TraceError("layers is empty, expected the name of at least one MoE layer")
        if not self.call_rows or min(self.call_rows) < 1:
            raise TraceError("call_rows must hold at least one call, and each call at least one row")
        if len(self.topk_ids) != self.rows * len(self.layers) * self.top_k:
            raise TraceError(
                f"topk_ids holds {len(self.topk_ids)} ids, expected {self.rows} rows x "
                f"{len(self.layers)} layers x top-{self.top_k}"
            )
        if min(self.topk_ids) < NO_EXPERT or max(self.topk_ids) >= self.num_experts:
            raise TraceError(f"topk_ids holds an id that is not below num_experts {self.num_experts}")
        if self.stream_rows and (sum(self.stream_rows) != self.rows or set(self.call_rows) != {1}):
            raise TraceError("stream_rows must sum up to the rows, and then every call has one row")

    @property
    def rows(self) -> int:
        """Tokens."""
        return sum(self.call_rows)

    def list_calls(self, layer: int, batch: int | None = None) -> list[Call]:
        """Return the calls of one layer; with `batch`, of that many sequences computed side by side.

        Sequences are taken `batch` at a time, in their order; a group lasts as long as its longest.
        Raises TraceError for a `batch` that the trace cannot be replayed at.
        """
        ids, stride, width = self.topk_ids, len(self.layers) * self.top_k, self.top_k
        start = layer * width
        calls = []
        for rows in self.split_batches(batch):
            experts = {
                expert for row in rows for expert in ids[row * stride + start : row * stride + start + width]
            }
            calls.append(tuple(sorted(experts - {NO_EXPERT})))
        return calls

    def list_steps(self, batch: int | None = None) -> list[Call]:
        """Return the calls of all layers in the order in which a model makes them, with distinct expert ids.

        The id of expert e in layer l is ``l * num_experts + e``: what one cache for all layers sees.
        """
        by_layer = [self.list_calls(layer, batch) for layer in range(len(self.layers))]
        return [
            tuple(layer * self.num_experts + expert for expert in call)
            for step in zip(*by_layer, strict=True)
            for layer, call in enumerate(step)
        ]

    def split_batches(self, batch: int | None = None) -> list[Sequence[int]]:
        """Return the rows of each call, as `list_calls` takes them."""
        if batch is None:
            ends = list(itertools.accumulate(self.call_rows))
            return [range(end - count, end) for end, count in zip(ends, self.call_rows, strict=True)]
        if batch < 1:
            raise TraceError(f"batch is {batch}, expected at least 1")
        if not self.stream_rows:
            raise TraceError(
                "the trace does not tell its sequences apart (stream_rows), so its batch is fixed"
            )
        ends = list(itertools.accumulate(self.stream_rows))
        spans = [(end - count, count) for end, count in zip(ends, self.stream_rows, strict=True)]
        groups = [spans[first : first + batch] for first in range(0, len(spans), batch)]
        return [
            [start + step for start, count in group if step < count]
            for group in groups
            for step in range(max(count for _, count in group))
        ]


def save(trace: RoutingTrace, path: Path) -> None:
    """Write `trace` to `path`, whole or not at all, for this user only. Needs torch; raises OSError."""
    import torch
    from safetensors.torch import save as to_bytes

    dtype, none = (torch.uint8, 255) if trace.num_experts <= 255 else (torch.uint16, 65_535)
    ids = torch.tensor(
        [none if expert == NO_EXPERT else expert for expert in trace.topk_ids], dtype=torch.int32
    )  # [rows * layers * top_k]
    tensors = {
        "topk_ids": ids.to(dtype).view(trace.rows, len(trace.layers), trace.top_k),
        "call_rows": torch.tensor(trace.call_rows, dtype=torch.int32),
    }
    if trace.stream_rows:
        tensors["stream_rows"] = torch.tensor(trace.stream_rows, dtype=torch.int32)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "num_experts": str(trace.num_experts),
        "layers": json.dumps(list(trace.layers)),
        "model": trace.model,
        "made": json.dumps(dict(trace.made), sort_keys=True),
    }
    write(path, to_bytes(tensors, metadata), private=True)


def load(path: Path) -> RoutingTrace:
    """Load the trace in a file. Raises TraceError, and nothing else, for whatever is wrong with it."""
    try:
        metadata, tensors = _parse(read_bytes(path, MAX_BYTES, "a routing trace (.safetensors)"))
        ids, shape = _read_integers(tensors, "topk_ids", ("U8", "U16"), 3)
        none = 255 if tensors["topk_ids"]["dtype"] == "U8" else 65_535
        layers = _read_json(metadata, "layers", list)
        if shape[1] != len(layers) or not all(isinstance(name, str) for name in layers):
            raise TraceError(f"layers must name the {shape[1]} layers of topk_ids")
        return RoutingTrace(
            topk_ids=array("i", [NO_EXPERT if expert == none else expert for expert in ids]),
            num_experts=_read_number(metadata, "num_experts"),
            top_k=shape[2],
            layers=tuple(layers),
            call_rows=tuple(_read_integers(tensors, "call_rows", ("I32",), 1)[0]),
            stream_rows=tuple(_read_integers(tensors, "stream_rows", ("I32",), 1)[0])
            if "stream_rows" in tensors
            else (),
            model=metadata.get("model", "unknown"),
            made=_read_json(metadata, "made", dict),
        )
    except TextFileError as error:
        raise TraceError(f"{path}: {error.message}") from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _parse(data: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (metadata, tensors by name) of a safetensors file."""
    import safetensors

    try:
        tensors = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise TraceError(f"is not a safetensors file ({error}), expected a routing trace") from None
    # The library hands out the metadata only together with a tensor framework.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__", {})
    if metadata.get("format") != FORMAT:
        raise TraceError(f"is a safetensors file without the format {FORMAT}, expected a routing trace")
    if metadata.get("version") != VERSION:
        raise TraceError(f"has format version {metadata.get('version')}, expected {VERSION}")
    return metadata, tensors


def _read_integers(
    tensors: Mapping[str, Any], name: str, dtypes: Sequence[str], dimensions: int
) -> tuple[array[int], list[int]]:
    """Return (values, shape) of one tensor."""
    tensor = tensors.get(name)
    if tensor is None or tensor["dtype"] not in dtypes or len(tensor["shape"]) != dimensions:
        raise TraceError(f"{name} must be there, of type {' or '.join(dtypes)} and {dimensions} dimensions")
    values: array[int] = array(_CODES[tensor["dtype"]])
    values.frombytes(tensor["data"])
    if sys.byteorder == "big":
        values.byteswap()
    return values, list(tensor["shape"])


def _read_number(metadata: Mapping[str, str], name: str) -> int:
    text = metadata.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise TraceError(f"{name} is '{text[:40]}', expected a number")
    return int(text)


def _read_json(metadata: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        value = json.loads(metadata.get(name, ""))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise TraceError(f"{name} is not a JSON {'list' if kind is list else 'object'}")
    return value
