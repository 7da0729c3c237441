"""Recordings in CUDA graphs, on a GPU that is always a few steps behind."""

import time

import pytest
import torch

from moedoctor.trace.capsule import Capsule
from tests.trace.test_call_keeper import NAN, Watched, is_of_one_call, value_of

pytestmark = pytest.mark.gpu
ROWS, SLEEP = 3, 2_000_000
"""`SLEEP` is in clocks of the GPU, about a millisecond."""


class Graph:
    """Layers of different sizes in a CUDA graph; `fill` [] is added to the output of the last one."""

    def __init__(self, when: str) -> None:
        self.value, self.fill = torch.zeros(2, device="cuda")
        torch.set_default_device("cuda")
        try:
            self.watched = Watched(when, (64, 8, 2), (192, 12, 3))  # with the profile run
            self.calls = [self.watched.call(layer) for layer in range(2)]
        finally:
            torch.set_default_device(None)
        self.ends: list[torch.cuda.Event] = []
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            torch.cuda._sleep(SLEEP)
            for layer, call in enumerate(self.calls):
                call.input.x.fill_(0).add_(self.value + layer)
                call.input.weights.copy_(self.value + layer)
                call.output.copy_(call.input.x).add_(self.fill if layer else 0)
                self.watched.keeper.watch(layer, call)

    def run_step(self, fill: float = 0.0) -> None:
        """Run a step; the host is two steps ahead, as with asynchronous scheduling."""
        self.watched.step += 1
        self.value.fill_(value_of(self.watched.step, 0))
        self.fill.fill_(fill)
        self.watched.keeper.begin(ROWS)
        self.graph.replay()
        self.watched.keeper.end()
        self.ends.append(torch.cuda.Event())
        self.ends[-1].record()
        self.ends[-3:][0].synchronize()


def test_nan_is_saved_while_steps_go_on() -> None:
    graph = Graph("nan")
    for number in range(1, 400):
        graph.run_step(NAN if number == 20 else 0.0)
        is_busy = not graph.ends[-1].query()
        graph.watched.keeper.collect(wait=False)
        if graph.watched.made:
            break
    assert is_busy, "the last step had ended, so this shows nothing"
    assert number < 30
    (capsule,) = graph.watched.made
    assert (capsule.record.layer, capsule.record.call) == ("layers.1.experts", 20)
    assert capsule.tensors["x"].shape == (ROWS, 192)
    assert graph.watched.warned == []


def test_capsules_that_are_compared_hold_one_call_each() -> None:
    graph, mixed = Graph("mismatch=1"), []

    def judge(capsule: Capsule) -> bool:
        mixed.append(not is_of_one_call(capsule))
        time.sleep(0.002)
        return True

    graph.watched.keeper.judge = judge
    for _ in range(500):
        graph.run_step()
        graph.watched.keeper.collect(wait=False)
    torch.cuda.synchronize()
    assert len(mixed) > 20
    assert not any(mixed), f"{sum(mixed)} of {len(mixed)}"
