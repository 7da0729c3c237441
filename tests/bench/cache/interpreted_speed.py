"""Runs `moedoctor bench --cache --speed` without a GPU; a script for `test_cache_speed`.

The cache's kernels run in Triton's interpreter, which Triton decides on at import. CUDA graphs are stand-ins:
a capture does nothing, and a replay runs the step. Times mean nothing here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch

from moedoctor.bench.cache import decode as expert_cache_decode
from moedoctor.bench.cache import groups as expert_cache_groups
from moedoctor.bench.cache import misses as expert_cache_misses
from moedoctor.bench.cache import replay_speed
from moedoctor.bench.cache import speed as expert_cache
from moedoctor.bench.cache.decode import Inputs, Model, Steps
from moedoctor.bench.cache.run import Host
from moedoctor.bench.timing import Comparison, compare_rounds
from moedoctor.cli import main
from moedoctor.commands import bench_cache, bench_cache_speed
from moedoctor.fixes.cache.device import DeviceEngine
from moedoctor.reference.moe import MoeWeights
from moedoctor.reference.moe import forward as reference

MODEL = Model(layers=1, experts=128, top_k=8, hidden=128, inner=32, host_layers=1)
GROUPED = Model(layers=1, experts=8, top_k=2, hidden=32, inner=16, host_layers=1)


OURS = bench_cache_speed.SUBJECTS
OVERLAP = OURS["overlap"]


class OnGpu(torch.Tensor):
    """A host tensor that says otherwise."""

    is_cuda = True


class Graph:
    """Runs again what was called during its capture."""

    now: Graph | None = None
    work: Callable[[], None]

    def replay(self) -> None:
        self.work()


@contextlib.contextmanager
def graph(one: Graph) -> Iterator[None]:
    Graph.now = one
    yield
    Graph.now = None


def captured_step(step: Callable[[Steps], None]) -> Callable[[Steps], None]:
    def call(self: Steps) -> None:
        assert Graph.now is not None
        Graph.now.work = lambda: step(self)

    return call


def forward(x: torch.Tensor, weights: Any, ids: torch.Tensor, shares: torch.Tensor, *, out: Any) -> Any:
    return out.add_(reference(x.as_subclass(torch.Tensor), MoeWeights.of(weights), shares, ids))


def compare_times(calls: Any, *, baseline: str, launches: int) -> Comparison:
    def measured(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: float(bool(call() is not None))

    return compare_rounds({name: measured(one) for name, one in calls.items()}, baseline=baseline, rounds=1)


@contextlib.contextmanager
def small() -> Iterator[None]:
    """A GPU made up, and everything as small as it can be."""
    of_decode, of_groups = Inputs._with.__func__, expert_cache_groups.grouped_calls
    made = Host.make

    def inputs(cls: type[Inputs], *arguments: Any) -> Inputs:
        found = of_decode(cls, *arguments)
        return Inputs(found.ids, found.shares, found.x.as_subclass(OnGpu))

    def measure(*arguments: Any) -> Any:
        return bench_cache_speed.measure_speed(*arguments, device="cpu", model=MODEL)

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "set_sync_debug_mode", lambda mode: None),
            (torch.cuda, "CUDAGraph", Graph),
            (torch.cuda, "graph", graph),
            (Steps, "_captured_step", captured_step(Steps._captured_step)),
            (Inputs, "_with", classmethod(inputs)),
            (expert_cache_decode, "moe_forward", forward),
            (expert_cache_misses, "_PLAIN_BYTES", 1 << 10),
            (expert_cache_groups, "compare_times", compare_times),
            (
                expert_cache_groups,
                "grouped_calls",
                lambda device, **options: of_groups(device, **options | {"tokens": 160, "model": GROUPED}),
            ),
            (expert_cache, "decode", functools.partial(expert_cache.decode, rounds=2, seen=120)),
            (
                expert_cache_misses,
                "miss_bandwidth",
                functools.partial(expert_cache_misses.miss_bandwidth, rounds=1),
            ),
            (replay_speed, "replay_speed", functools.partial(replay_speed.replay_speed, tokens=50)),
            (Host, "make", staticmethod(lambda *of: replace(made(*of), pinned_gb_s=50.0))),
            (bench_cache.environment, "collect", lambda: {"gpu": "none", "torch_cuda": "13.0"}),
            (bench_cache, "measure_speed", measure),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield


def report(*options: str) -> dict[str, Any]:
    """What ``bench --cache --speed`` writes, once as JSON and once as Markdown, which shows the same."""
    trace = ("--trace", "zipf:experts=16,top_k=2,layers=1,rows=16,streams=8")
    with small(), tempfile.TemporaryDirectory() as folder:
        stored, shown = Path(folder, "a.json"), Path(folder, "a.md")
        assert (
            main(["bench", "--cache", "--speed", *trace, *options, "--format", "json", "-o", str(stored)])
            == 0
        )
        assert main(["show", str(stored), "--format", "markdown", "-o", str(shown)]) == 0
        assert "## Decode" in shown.read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8"))["bench"]["cache"]
    return found


def rows_of(found: dict[str, Any], capacity: int) -> dict[str, dict[str, Any]]:
    return {row["subject"]: row for row in found["speed"] if row["capacity"] == capacity}


def one() -> None:
    """Batch 1: every table, every limit has a figure, and what ran as a graph is said."""
    found = report("--capacity", "32")
    rows = rows_of(found, 32)
    assert set(rows) == {"PR 37190, restated", *(OURS[each.name] for each in expert_cache.VARIANTS)}
    assert all(row["correct"] for row in rows.values())
    assert rows[OVERLAP]["one_graph"]
    assert not rows[OURS["host"]]["one_graph"]
    packed, plain = (rows[OURS[name]]["gigabytes_a_step"] for name in ("packed", "aging"))
    assert packed < plain, "experts of this size are not worth packing, and nothing is unpacked here"
    assert {name: len(some) for name, some in found["measured"].items()} == {
        "recorded": 2,
        "misses": 4,
        "groups": 3,
        "replays": 12,
    }
    assert len(found["limits"]) == 2 + 1 + 2 + 2 * 3 + 3
    assert all("measured" in limit for limit in found["limits"])
    assert "if nothing but the bus took time" in found["limits"][0]["remark"]
    assert "NOT MEASURED" not in found["speed_note"]


def eight() -> None:
    """Batch 8: groups, what the PR refuses, what has no room, and every expert resident."""
    with patch.object(expert_cache, "_room", lambda model, capacity, device: capacity < 64):
        found = report("--batch", "8", "--capacity", "32,64,128,256")
    rows = rows_of(found, 32)
    assert "the PR raises an error" in rows["PR 37190, restated"]["reason"]
    assert all(row["correct"] for name, row in rows.items() if name != "PR 37190, restated")
    rows = rows_of(found, 64)
    assert {name for name, row in rows.items() if "no room" in row.get("reason", "")} == {
        OURS[each.name] for each in expert_cache.VARIANTS[1:]
    }
    assert rows[OVERLAP]["correct"]
    rows = rows_of(found, 128)
    assert rows["ours, all resident"]["against"] == "uncached"
    assert not rows_of(found, 256)
    assert found["measured"] == {}
    assert [limit["claim"].split(",")[0] for limit in found["limits"]] == [
        "every expert resident",
        "share of the rows above of engines without a host that ran as replays of one CUDA graph a step",
    ]


def wrong() -> None:
    """Whose copies do not come is wrong, not timed, and its limit is untested."""
    with (
        patch.object(DeviceEngine, "_copy_beside", lambda self: None),
        patch.object(expert_cache_misses, "miss_bandwidth", lambda *_, **__: []),
        patch.object(expert_cache_groups, "group_cost", lambda *_, **__: {"rows": []}),
    ):
        found = report("--capacity", "32")
    row = rows_of(found, 32)[OVERLAP]
    assert row["correct"] is False
    assert "step_us" not in row
    assert rows_of(found, 32)[OURS["packed"]]["correct"]
    assert [limit["verdict"] for limit in found["limits"][:2]] == ["untested"] * 2
    assert "measured" not in found["limits"][0]


if __name__ == "__main__":
    {each.__name__: each for each in (one, eight, wrong)}[sys.argv[1]]()
