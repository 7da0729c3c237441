"""Runs `moedoctor bench --cache --speed` without a GPU; a script for `test_cache_speed`.

The cache's kernels run in Triton's interpreter, which Triton decides on at import. CUDA graphs are stand-ins:
a capture does nothing, and a replay runs the step. Times mean nothing here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch

from moedoctor.bench.cache import groups, replay, speed
from moedoctor.bench.cache.model import Host, Inputs, Model
from moedoctor.bench.cache.speed import Steps
from moedoctor.bench.timing import Comparison, compare_rounds
from moedoctor.cli import main
from moedoctor.commands import bench_cache
from moedoctor.fixes.cache.device import DeviceEngine
from moedoctor.kernels.cache.transfer import Transfer
from moedoctor.reference.moe import MoeWeights
from moedoctor.reference.moe import forward as reference

MODEL = Model(layers=1, experts=128, top_k=8, hidden_size=128, intermediate_size=32, host_layers=1)
"""As many experts as in the recorded trace, of the smallest size that packing can reduce."""
FEW = replace(MODEL, experts=32, top_k=4)
FEWEST = replace(FEW, experts=8)
SUBJECTS = bench_cache.SUBJECTS
OVERLAP, PR = SUBJECTS["overlap"], SUBJECTS["pr37190"]


class OnGpu(torch.Tensor):
    """A host tensor that says otherwise."""

    is_cuda = True


class Graph:
    """Repeats the calls of its capture."""

    now: Graph | None = None
    work: Callable[[], None]

    def replay(self) -> None:
        self.work()


@contextlib.contextmanager
def graph(captured: Graph) -> Iterator[None]:
    Graph.now = captured
    yield
    Graph.now = None


def captured_step(step: Callable[[Steps], None]) -> Callable[[Steps], None]:
    def call(self: Steps) -> None:
        assert Graph.now is not None
        Graph.now.work = lambda: step(self)

    return call


def forward(x: torch.Tensor, weights: Any, ids: torch.Tensor, topk_weights: torch.Tensor, *, out: Any) -> Any:
    return out.add_(reference(x.as_subclass(torch.Tensor), MoeWeights.of(weights), topk_weights, ids))


def compare_times(calls: Any, *, baseline: str, launches: int) -> Comparison:
    return compare_rounds(dict.fromkeys(calls, lambda: 1.0), baseline=baseline, rounds=1)


def grouped_calls(device: str, *, groups: Sequence[int], **options: Any) -> Any:
    """Results for free: `test_expert_cache` computes groups, `tests/kernels` interprets their kernels."""
    names = ["1", *(f"{count}{order}" for count in groups for order in ("", " in turn"))]
    return {name: lambda: torch.ones(1, 1) for name in names}


@contextlib.contextmanager
def small(model: Model) -> Iterator[None]:
    """A fake GPU and the smallest possible sizes."""
    make_inputs, misses, made = Inputs.make.__func__, speed.miss_bandwidth, Host.make
    measure_speed = bench_cache.measure_speed

    def inputs(cls: type[Inputs], *arguments: Any) -> Inputs:
        real = make_inputs(cls, *arguments)
        return replace(real, x=real.x.as_subclass(OnGpu))

    def measure(*arguments: Any) -> Any:
        return measure_speed(*arguments, device="cpu", model=model)

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "set_sync_debug_mode", lambda mode: None),
            (torch.cuda, "CUDAGraph", Graph),
            (torch.cuda, "graph", graph),
            (Transfer.launch, "__defaults__", (2, 2)),  # each program costs the interpreter milliseconds
            (Steps, "_captured_step", captured_step(Steps._captured_step)),
            (Inputs, "make", classmethod(inputs)),
            (Host, "make", staticmethod(lambda *of: replace(made(*of), pinned_gb_s=50.0))),
            (speed, "moe_forward", forward),
            (speed, "PLAIN_BYTES", 1 << 10),
            (speed, "CHECKED_STEPS", 2),
            (speed, "TOKENS_A_ROUND", 1),
            (speed, "decode", functools.partial(speed.decode, rounds=1, skip=120)),
            (
                speed,
                "miss_bandwidth",
                lambda device, **_: misses(device, model=FEWEST, rounds=1),
            ),
            (groups, "compare_times", compare_times),
            (groups, "grouped_calls", grouped_calls),
            (replay, "replay_speed", functools.partial(replay.replay_speed, tokens=50)),
            (bench_cache.environment, "collect", lambda: {"gpu": "none", "torch_cuda": "13.0"}),
            (bench_cache, "measure_speed", measure),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield


def report(*options: str, model: Model = MODEL) -> dict[str, Any]:
    """``bench --cache --speed`` writes the same figures as JSON and as Markdown."""
    trace = ("--trace", "zipf:experts=16,top_k=2,layers=1,rows=16,streams=8")
    with small(model), tempfile.TemporaryDirectory() as folder:
        stored, shown = Path(folder, "a.json"), Path(folder, "a.md")
        arguments = ["bench", "--cache", "--speed", *trace, *options, "--format", "json", "-o", str(stored)]
        assert main(arguments) == 0
        assert main(["show", str(stored), "--format", "markdown", "--full", "-o", str(shown)]) == 0
        assert "## Decode" in shown.read_text(encoding="utf-8")
        cache: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8"))["bench"]["cache"]
    return cache


def rows_of(cache: dict[str, Any], capacity: int) -> dict[str, dict[str, Any]]:
    return {row["subject"]: row for row in cache["speed"] if row["capacity"] == capacity}


def check_batch_1() -> None:
    """Every table and limit has a figure, and the report names what ran as a graph."""
    cache = report("--capacity", "32")
    rows = rows_of(cache, 32)
    assert set(rows) == {PR, *(SUBJECTS[variant.name] for variant in speed.VARIANTS)}
    assert all(row["correct"] for row in rows.values()), rows
    assert rows[OVERLAP]["one_graph"]
    assert not rows[SUBJECTS["host"]]["one_graph"]
    packed, plain = (rows[SUBJECTS[name]]["gigabytes_a_step"] for name in ("packed", "aging"))
    assert packed < plain, "experts of this size are not worth packing, and nothing is unpacked here"
    assert {name: len(rows) for name, rows in cache["measured"].items()} == {
        "recorded": 2,
        "misses": 4,
        "groups": 3,
        "replays": 12,
    }
    assert len(cache["limits"]) == 2 + 1 + 2 + 2 * 3 + 3
    assert all("measured" in limit for limit in cache["limits"])
    assert "if nothing but the bus took time" in cache["limits"][0]["remark"]
    assert "NOT MEASURED" not in cache["speed_note"]


def check_batch_4() -> None:
    """Groups, calls that the PR refuses, missing memory, and every expert resident."""
    with patch.object(speed, "_room", lambda model, capacity, device: capacity < 16):
        cache = report("--batch", "4", "--capacity", "8,16,32,64", model=FEW)
    rows = rows_of(cache, 8)
    assert "the PR raises an error" in rows.pop(PR)["reason"]
    assert len(rows) == len(speed.VARIANTS)
    assert all(row["correct"] for row in rows.values()), rows
    rows = rows_of(cache, 16)
    assert {name for name, row in rows.items() if "no room" in row.get("reason", "")} == {
        SUBJECTS[variant.name] for variant in speed.VARIANTS[1:]
    }
    assert rows[OVERLAP]["correct"]
    assert rows_of(cache, 32)["ours, all resident"]["against"] == "uncached"
    assert not rows_of(cache, 64)
    assert cache["measured"] == {}
    assert [limit["claim"].split(",")[0] for limit in cache["limits"]] == [
        "every expert resident",
        "share of the rows above of engines without a host that ran as replays of one CUDA graph a step",
    ]


def check_wrong() -> None:
    """A variant without its copies is wrong and not timed, and its limit is untested."""
    with (
        patch.object(DeviceEngine, "_copy_beside", lambda self: None),
        patch.object(speed, "VARIANTS", (speed.VARIANTS[0], speed.VARIANTS[-1])),
        patch.object(groups, "group_cost", lambda *_, **__: {"rows": []}),
    ):
        cache = report("--capacity", "32")
    rows = rows_of(cache, 32)
    assert rows[OVERLAP]["correct"] is False
    assert "step_us" not in rows[OVERLAP]
    assert rows[SUBJECTS["packed"]]["correct"]
    assert [limit["verdict"] for limit in cache["limits"][:2]] == ["untested"] * 2
    assert "measured" not in cache["limits"][0]


if __name__ == "__main__":
    check_batch_1()
    check_batch_4()
    check_wrong()
