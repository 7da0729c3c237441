"""The child process of `moedoctor bench --backend`: tasks in, one line of JSON for each row out.

Rows are written as they come, and each point is named before it is measured, so that a backend that dies
takes only its own point with it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TextIO

from moedoctor.results import plain

if TYPE_CHECKING:
    from moedoctor.bench.moe.bench import Task
    from moedoctor.bench.roofline import Roofline


def main(request: Mapping[str, Any], out: TextIO) -> None:
    """Measure every task of `request`. What raises gives ``failed``; the numbers of tokens after it go on."""
    import torch

    from moedoctor.bench.moe.bench import Routing, Task
    from moedoctor.bench.roofline import Roofline, measure_roofline
    from moedoctor.models.layer_shape import LayerShape
    from moedoctor.reference.moe_backend import Variant

    device = str(request["device"])
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if "roofline" not in request:
        _say(out, "roofline", asdict(measure_roofline(device)))
        if device.startswith("cuda"):
            _say(out, "harness", _harness(device))
        return
    roofline = Roofline(**request["roofline"])
    for index, one in enumerate(request["tasks"]):
        task = Task(
            Variant(**one["variant"]),
            one["model"],
            LayerShape(**one["shape"]),
            tuple(one["tokens"]),
            Routing(**one["routing"]),
            device,
        )
        _say(out, "task", {"index": index})
        rest = task.tokens
        while rest:
            rest = _measure(replace(task, tokens=rest), roofline, index, out)
    _say(out, "end", {})


def _measure(task: Task, roofline: Roofline, index: int, out: TextIO) -> tuple[int, ...]:
    """Write the rows of `task`; the numbers of tokens that come after one that raised."""
    from moedoctor.bench.moe.bench import measure

    begun: list[int] = []

    def at(tokens: int) -> None:
        begun.append(tokens)
        _say(out, "point", {"tokens": tokens})

    try:
        for row in measure(task, roofline, at):
            _say(out, "row", row)
    except Exception as error:
        traceback.print_exc()
        said = " ".join(str(error).split()) or "no message"
        point = {"tokens": begun[-1]} if begun else {}
        reason = f"{type(error).__name__}: {said[:300]}"
        _say(out, "failed", {"index": index, **point, "reason": reason})
        if "CUDA" in said:
            raise SystemExit(1) from None  # the context is lost; the parent goes on in another child
        return task.tokens[len(begun) :] if begun else ()  # without its layer no point can be measured
    return ()


def _harness(device: str) -> Mapping[str, Any]:
    from moedoctor.bench.harness_cost import measure_harness_cost

    try:
        return measure_harness_cost(device)
    except ImportError as error:
        return {"not_measured": str(error)}


def _say(out: TextIO, event: str, data: Mapping[str, Any]) -> None:
    out.write(json.dumps({"event": event, **plain(data)}) + "\n")
    out.flush()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever anything prints goes to stderr
    with open(sys.argv[1], encoding="utf-8") as file:
        wanted = json.load(file)
    main(wanted, channel)
