"""Waits for a process to end and writes the calls that it had saved, if it ended with an error.

`python -m moedoctor.trace.crash_watcher MEMORY NOTES PID MAX_BYTES FOLDER`, with two open files by number, is
started by `moedoctor.trace.crash_ring` and returns at once: what waits is a process of its own, which is no
child of the one that it watches, because vLLM ends all children of an engine that failed. It holds a shared
lock on the folder until it is through.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from moedoctor.kernels.kept_rows import SavedCalls
    from moedoctor.trace.capsule import Capsule

_DIED = "the process died"
_ADDRESSES = ("x", "topk_ids", "topk_weights", "router_logits")
"""The tensors whose addresses a call's header has."""


class _Call(NamedTuple):
    """One saved call; a later one is larger."""

    step: int
    layer: int
    """In the order in which the layers first ran."""
    ring: int
    """Its place in the ring."""


def main(arguments: list[str]) -> None:
    """Start what waits."""
    memory, notes, pid, limit = (int(argument) for argument in arguments[:4])
    folder = Path(arguments[4])
    process = os.pidfd_open(pid)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    if os.fork():
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    select.select([process], [], [])  # readable when the process has ended
    with contextlib.suppress(BrokenPipeError):
        write_calls(memory, notes, limit, folder, pid)


def write_calls(memory: int, notes: int, limit: int, folder: Path, pid: int) -> None:
    """Write a capsule of each saved call, unless the notes say that the process ended well.

    The last call has the weights of its experts, within `limit` bytes; the others have none, and all of them
    together keep to the limit as well, the latest first.
    """
    layers, end = _read(notes)
    if not layers or end == {"end": None}:
        return
    from moedoctor.text import format_size, print_message
    from moedoctor.trace.capsule import CapsuleError, name_file, save

    error = (end or {}).get("end") or _DIED
    capsules, room = [], limit
    for rank, call in enumerate(_list_calls(memory, layers)):
        reason = f"{'the last call' if rank == 0 else 'a call'} before {error}"
        try:
            capsule = _read_capsule(memory, layers[call.layer], call, reason, limit, weights=rank == 0)
        except CapsuleError as problem:
            print_message(f"record: a call is lost: {problem}")
            continue
        room -= 0 if rank == 0 else capsule.size
        if room < 0:
            break
        capsules.append(capsule)
    total = sum(capsule.size for capsule in capsules)
    print_message(f"record: writes {len(capsules)} calls, {format_size(total)}, to {folder}")
    written = 0
    for capsule in capsules:
        try:
            save(capsule, folder / name_file(capsule.record, pid), lambda line: None)
            written += 1
        except OSError as problem:
            print_message(f"record: a call is lost: {problem}")
    print_message(f"record: process {pid} ended ({error}): {written} calls are in {folder}")


def _read(notes: int) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the notes on layers, and the one on the end, whose error is what stopped the recording first."""
    text = os.pread(notes, os.fstat(notes).st_size, 0).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    end = next((line for line in lines if "end" in line), None)
    stopped = next((line["stopped"] for line in lines if "stopped" in line), None)
    if stopped is not None and end != {"end": None}:
        end = {"end": stopped}
    return [line for line in lines if "place" in line], end


def _view(memory: int, layer: dict[str, Any]) -> SavedCalls:
    from moedoctor.trace.crash_ring import Place

    place = Place(**layer["place"])
    return place.view(mmap.mmap(memory, place.count_bytes(), offset=place.offset))


def _list_calls(memory: int, layers: list[dict[str, Any]]) -> list[_Call]:
    """Return the saved calls, the last one first."""
    calls = [
        _Call(int(step), number, ring)
        for number, layer in enumerate(layers)
        for ring, (step, *_) in enumerate(_view(memory, layer).header.tolist())
        if step >= 0
    ]
    return sorted(calls, reverse=True)


def _read_capsule(
    memory: int, layer: dict[str, Any], call: _Call, reason: str, limit: int, *, weights: bool
) -> Capsule:
    """Return the capsule of a call."""
    import torch

    from moedoctor.trace.call_keeper import make_capsule
    from moedoctor.trace.capsule import CapsuleError, Record, add_weights, drop_weights, fit
    from moedoctor.trace.expert_weights import ExpertFiles

    record = Record.model_validate_json(layer["record"])
    saved = _view(memory, layer)
    _, count, *addresses = saved.header[call.ring].tolist()
    rows = min(count, saved.x.shape[1])

    def copy_rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[call.ring, :rows].clone()

    def read_weights(experts: list[int]) -> dict[str, torch.Tensor]:
        if not weights or layer["checkpoint"] is None:
            return {}
        try:
            files = ExpertFiles(Path(layer["checkpoint"]))
            return files.read_tensors(record.layer, experts, record.quantization)
        except CapsuleError as error:
            from moedoctor.text import print_message

            print_message(f"record: the last call has no weights: {error}")
            return {}

    tensors = {
        "x": copy_rows(saved.x)[:, : record.hidden].contiguous(),
        "topk_ids": copy_rows(saved.ids),
        "topk_weights": copy_rows(saved.weights),
    }
    logits = copy_rows(saved.logits)
    if bool(logits.any()):
        tensors["router_logits"] = logits
    highest = int(tensors["topk_ids"].max())
    if highest >= record.experts:
        reason += f"; its topk_ids name expert {highest}, and the layer has {record.experts}"
    found = zip(_ADDRESSES, addresses, layer["row_bytes"], strict=True)
    calls = {name: (address, count * size) for name, address, size in found if address > 0}
    more = {
        "reason": reason[:1000],
        "addresses": {**record.addresses, **calls},
        "call": call.step,
        "tokens": tuple(range(rows)),
        "call_tokens": count,
    }
    capsule = add_weights(make_capsule(record, tensors, more), read_weights)
    try:
        return fit(capsule, limit)
    except CapsuleError:  # one token's experts are too large
        return fit(drop_weights(capsule), limit)


if __name__ == "__main__":
    main(sys.argv[1:])
