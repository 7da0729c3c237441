"""Measures backends in child processes and collects their rows. Imports torch only in the child.

The child writes rows as they come, and names each point before it measures it, so that a backend that dies
costs only its own point.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from moedoctor.bench.moe.task import LayerTask
from moedoctor.processes import interrupts
from moedoctor.processes.ask import Ended, answer, run_module
from moedoctor.results import from_json

if TYPE_CHECKING:
    from moedoctor.bench.roofline import Roofline

_CHILD = "moedoctor.bench.moe.run"


class MachineError(Exception):
    """The machine's own limits could not be measured; one line says why."""


def measure_machine(device: str, *, seconds: float = 180.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (roofline, harness cost) of `device`. Raises MachineError."""
    child = run_module(_CHILD, {"device": device}, seconds=seconds)
    data = {event.pop("event"): event for event in child.answers}
    if "roofline" not in data:
        raise MachineError(f"{device}: its bandwidth could not be measured: {child.problem}")
    return data["roofline"], data.get("harness", {})


def measure_tasks(
    tasks: Sequence[LayerTask],
    device: str,
    roofline: Mapping[str, Any],
    *,
    seconds: float,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[dict[str, Any]]:
    """Return rows in the order of the tasks. A child that dies costs the number of tokens that it was at.

    A row has ``time_us`` if it was timed, else ``wrong``, ``failed`` or ``unavailable``.

    A child that dies before the first number of tokens, as it prepares the layer, costs the task. Backends of
    one package share a child, so that the package is loaded once. Together they have `seconds`; the rest is
    not measured. `progress` gets how many points are done, how many there are, and the one that is measured.
    """
    rows: list[dict[str, Any]] = []
    packages: dict[bool, list[LayerTask]] = {}
    for task in tasks:
        packages.setdefault(task.variant.name in ("OURS", "REFERENCE"), []).append(task)
    later = total = sum(len(task.tokens) for task in tasks)
    for rest in packages.values():
        left = seconds
        later -= sum(len(task.tokens) for task in rest)
        while rest:
            if left <= 0:
                rows += [_make_failed_row(task, f"not measured within {seconds:g} s") for task in rest]
                break
            watch = _make_watch(rest, later, total, progress)
            request = {"device": device, "roofline": roofline, "tasks": [asdict(task) for task in rest]}
            with interrupts.hold_signals():
                try:
                    child = run_module(_CHILD, request, seconds=left, watch=watch)
                except interrupts.Interrupted as stop:
                    rest = _collect(stop.ended, rest, rows)
                    return rows + [
                        _make_failed_row(task, "interrupted before it was measured") for task in rest
                    ]
            left -= child.seconds
            rest = _collect(child, rest, rows)
    return rows


def _make_watch(
    rest: Sequence[LayerTask], later: int, total: int, progress: Callable[[int, int, str], None]
) -> Callable[[Any], None]:
    """Return what takes the events of a child that measures `rest`, and shows how far all packages are.

    `later` is the number of points of the packages that come after it.
    """
    sizes = [len(task.tokens) for task in rest]
    before, at = total - later - sum(sizes), 0

    def watch(event: Any) -> None:
        nonlocal at
        kind = event.get("event")
        if kind == "task":
            at = event["index"]
        if kind not in ("task", "point"):
            return
        task, done = rest[at], before + sum(sizes[:at])
        tokens = event.get("tokens")
        if tokens in task.tokens:
            done += task.tokens.index(tokens)
        point = "preparing" if tokens is None else f"{tokens} tokens"
        progress(done, total, f"{task.variant.label}, {task.model}, {point}")

    progress(before, total, f"loading what {rest[0].variant.label} needs")
    return watch


def _collect(child: Ended, tasks: list[LayerTask], rows: list[dict[str, Any]]) -> list[LayerTask]:
    """Add the child's rows to `rows`, and one for its death; return what another child has to do."""
    task = -1  # before the first
    tokens: int | None = None  # the number that it began last; None before the task's first
    last = ""
    for event in child.answers:
        last = event.pop("event")
        if last == "task":
            task, tokens = event["index"], None
        elif last == "point":
            tokens = event["tokens"]
        elif last == "row":
            rows.append(event)
        elif last == "failed":
            rows.append(_make_failed_row(tasks[task], event["reason"], event.get("tokens")))
    if child.problem is None:
        return []
    if task < 0:
        rows += [_make_failed_row(each, child.problem) for each in tasks]
        return []
    after = tasks[task + 1 :]
    if last != "failed":
        rows.append(_make_failed_row(tasks[task], child.problem, None if last == "row" else tokens))
    if tokens is None:
        return after
    numbers = tasks[task].tokens
    numbers = numbers[numbers.index(tokens) + 1 :]
    return [replace(tasks[task], tokens=numbers), *after] if numbers else after


def _make_failed_row(task: LayerTask, reason: str, tokens: int | None = None) -> dict[str, Any]:
    return {
        "backend": task.variant.name,
        "quantization": task.variant.quantization,
        "model": task.model,
        **({} if tokens is None else {"tokens": tokens}),
        "failed": reason,
    }


def measure_requested(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """In the child: yield an event for each step. After an error the numbers of tokens after it go on."""
    import torch

    from moedoctor.bench.harness_cost import measure_harness_cost
    from moedoctor.bench.roofline import Roofline, measure_roofline

    device = str(request["device"])
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if "roofline" not in request:
        yield {"event": "roofline", **asdict(measure_roofline(device))}
        if device.startswith("cuda"):
            try:
                yield {"event": "harness", **measure_harness_cost(device)}
            except ImportError as error:
                yield {"event": "harness", "not_measured": str(error)}
        return
    roofline = Roofline(**request["roofline"])
    for index, data in enumerate(request["tasks"]):
        task = from_json(LayerTask, data, "task")
        yield {"event": "task", "index": index}
        rest = task.tokens
        while rest:
            rest = yield from _measure(replace(task, tokens=rest), device, roofline, index)
    yield {"event": "end"}


def _measure(
    task: LayerTask, device: str, roofline: Roofline, index: int
) -> Generator[dict[str, Any], None, tuple[int, ...]]:
    """Yield the events of `task`; return the numbers of tokens that come after one that raised."""
    from moedoctor.bench.moe.bench import measure

    begun = 0
    tokens: dict[str, int] = {}
    try:
        for event in measure(task, device, roofline):
            if event["event"] == "point":
                begun, tokens = begun + 1, {"tokens": event["tokens"]}
            yield event
    except Exception as error:
        traceback.print_exc()
        message = " ".join(str(error).split()) or "no message"
        reason = f"{type(error).__name__}: {message[:300]}"
        yield {"event": "failed", "index": index, **tokens, "reason": reason}
        if "CUDA" in message:
            raise SystemExit(1) from None  # the context is lost; the parent goes on in another child
        return task.tokens[begun:] if begun else ()  # without its layer no point can be measured
    return ()


if __name__ == "__main__":
    answer(measure_requested)
