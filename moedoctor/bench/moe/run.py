"""Sends benchmark tasks to child processes and collects their rows. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moedoctor.models.layer_shape import LayerShape
from moedoctor.processes.deaths import first_line
from moedoctor.reference.moe_backend import Variant

_CHILD = "moedoctor.bench.moe.child"


@dataclass(frozen=True)
class LayerTask:
    """One backend on one layer, at several numbers of tokens."""

    variant: Variant
    model: str
    shape: LayerShape
    tokens: tuple[int, ...]
    routing: Mapping[str, Any] = field(default_factory=lambda: {"kind": "balanced"})
    """Fields of `moedoctor.bench.moe.bench.Routing`."""


@dataclass(frozen=True)
class Measured:
    """What a benchmark found."""

    rows: tuple[Mapping[str, Any], ...]
    """A row has ``time_us`` where it was timed, else ``wrong``, ``failed`` or ``unavailable``."""
    roofline: Mapping[str, Any]
    harness: Mapping[str, Any]
    """What the harness adds to a kernel; empty on a CPU."""


class MachineError(Exception):
    """The machine's own limits could not be measured; one line says why."""


def measure_machine(device: str, *, seconds: float = 180.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(roofline, harness cost) of `device`. Raises MachineError."""
    events, died = _child({"device": device}, seconds)
    found = {one.pop("event"): one for one in events}
    if "roofline" not in found:
        raise MachineError(f"{device}: its bandwidth could not be measured: {died}")
    return found["roofline"], found.get("harness", {})


def measure_tasks(
    tasks: Sequence[LayerTask],
    device: str,
    roofline: Mapping[str, Any],
    *,
    seconds: float,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Rows in the order of the tasks. A child that dies costs the number of tokens that it was at.

    One that dies before the first, as it prepares the layer, costs the task. Backends of one package share a
    child, so that it is loaded once; together they have `seconds`, and what is left then is not measured.
    """
    rows: list[dict[str, Any]] = []
    for group in _groups(tasks):
        rest, until = list(group), time.monotonic() + seconds
        while rest:
            left = until - time.monotonic()
            if left <= 0:
                rows += [_failed(one, f"not measured within {seconds:g} s") for one in rest]
                break
            progress(", ".join(dict.fromkeys(one.variant.label for one in rest)))
            events, died = _child(_request(rest, device, roofline), left)
            at = _At()
            for one in events:
                row = at.follow(one, rest)
                if row is not None:
                    rows.append(row)
            if died is None:
                break
            if at.index < 0:
                rows += [_failed(one, died) for one in rest]
                break
            if not at.failed:
                rows.append(_failed(rest[at.index], died, None if at.answered else at.tokens))
            rest = at.left(rest)
    return rows


def _groups(tasks: Sequence[LayerTask]) -> list[list[LayerTask]]:
    found: dict[bool, list[LayerTask]] = {}
    for one in tasks:
        found.setdefault(one.variant.name in ("OURS", "REFERENCE"), []).append(one)
    return list(found.values())


@dataclass
class _At:
    """Where a child is, by its events."""

    index: int = -1
    """The task, -1 before the first."""
    tokens: int | None = None
    """The number of tokens that it began last, None before the task's first."""
    answered: bool = False
    """Whether that was measured."""
    failed: bool = False
    """Whether the child itself said last that something failed."""

    def follow(self, event: dict[str, Any], tasks: Sequence[LayerTask]) -> dict[str, Any] | None:
        """Go on to `event`; the row that it holds, if any."""
        kind = event.pop("event")
        if kind == "task":
            self.index, self.tokens, self.answered, self.failed = event["index"], None, False, False
        elif kind == "point":
            self.tokens, self.answered, self.failed = event["tokens"], False, False
        elif kind == "row":
            self.answered = True
            return event
        elif kind == "failed":
            self.failed = True
            return _failed(tasks[self.index], event["reason"], event.get("tokens"))
        return None

    def left(self, tasks: Sequence[LayerTask]) -> list[LayerTask]:
        """What another child has to do after one that ended here."""
        task, after = tasks[self.index], list(tasks[self.index + 1 :])
        if self.tokens is None:
            return after
        tokens = task.tokens[task.tokens.index(self.tokens) + 1 :]
        return [replace(task, tokens=tokens), *after] if tokens else after


def _failed(task: LayerTask, reason: str, tokens: int | None = None) -> dict[str, Any]:
    variant = task.variant
    return {
        "backend": variant.name,
        "quantization": variant.quantization,
        "model": task.model,
        **({} if tokens is None else {"tokens": tokens}),
        "failed": reason,
    }


def _request(tasks: Sequence[LayerTask], device: str, roofline: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "device": device,
        "roofline": dict(roofline),
        "tasks": [
            {
                "variant": asdict(one.variant),
                "model": one.model,
                "shape": asdict(one.shape),
                "tokens": list(one.tokens),
                "routing": dict(one.routing),
            }
            for one in tasks
        ],
    }


def _child(request: Mapping[str, Any], seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """(events, why it ended early or None)."""
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        question, answer, errors = (Path(folder) / name for name in ("request", "answer", "stderr"))
        question.write_text(json.dumps(request), encoding="utf-8")
        started = time.monotonic()
        with answer.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(question)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                process.kill()
                process.wait()
        events = _events(answer.read_text(encoding="utf-8", errors="replace"))
        if code is None:
            return events, f"no answer within {time.monotonic() - started:.0f} s"
        if code == 0:
            return events, None
        lines = [line for line in errors.read_text(encoding="utf-8", errors="replace").splitlines() if line]
        said = first_line(lines[-1]) if lines else "it said nothing"
        return events, f"the process ended with {code}: {said}"


def _events(text: str) -> list[dict[str, Any]]:
    events = []
    for line in text.splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            break  # the child died while it wrote
    return [one for one in events if isinstance(one, dict) and "event" in one]
