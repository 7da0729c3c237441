"""Prefetch on a device that runs work as late as allowed, or at random: no kernel reads a stale buffer."""

from collections.abc import Callable, Sequence
from functools import partialmethod
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.faults.offload.late_device import LateDevice
from moedoctor.fixes.offload.prefetch import Pipeline, Region, Unit

BYTES = 64


def pipeline(
    device: LateDevice, units: int, *, pinned: Sequence[bool] | None = None, slots: int = 2
) -> Pipeline:
    """Return a pipeline of units; every byte of a unit is its number."""
    region = Region(0, BYTES, torch.uint8, (BYTES,), (1,))
    pins, made = pinned or [True] * units, list[Unit]()
    for index in range(units):
        host = torch.full((BYTES,), index + 1, dtype=torch.uint8)
        made.append(Unit(f"layer {index}", host, pins[index], index % slots, (region,)))
    return Pipeline(made, [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(slots)], device)


def run(device: LateDevice, line: Pipeline, order: Sequence[int]) -> list[bool]:
    """Run units in `order` with kernels that read late; for each, whether it read its own weights."""
    right: list[bool] = []
    for index in order:
        buffer = line.buffers[line.units[index].slot]
        line.wait(index, [buffer])
        device.run(reader(buffer, index, right))
        line.release(index)
    device.synchronize()
    return right


def reader(buffer: torch.Tensor, index: int, right: list[bool]) -> Callable[[], None]:
    return lambda: right.append(bool((buffer == index + 1).all()))


@given(seed=st.integers(0, 10_000), data=st.data(), units=st.integers(2, 5))
@settings(deadline=None)
def test_in_any_order_of_layers_kernels_read_their_own_weights(seed, data, units):
    device = LateDevice(seed)
    flags = data.draw(st.lists(st.booleans(), min_size=units, max_size=units))
    line = pipeline(device, units, pinned=flags)
    order = data.draw(st.lists(st.integers(0, units - 1), min_size=1, max_size=12))
    assert run(device, line, order) == [True] * len(order)


def test_a_copy_of_the_parameter_ends_prefetching_and_buffers_are_filled_for_each_layer() -> None:
    device = LateDevice(7)
    line = pipeline(device, 3)
    with pytest.warns(RuntimeWarning, match="no longer prefetched: the compiler hands over copies"):
        line.wait(1, [torch.zeros(BYTES, dtype=torch.uint8)])
    device.synchronize()
    line.release(1)
    for _ in range(2):
        # Compiled code ends by writing the copies that it received back into the buffers.
        device.run(lambda: line.buffers[0].fill_(77))
        assert run(device, line, [0, 1, 2]) == [True] * 3


class GraphDevice(LateDevice):
    """Events recorded inside a graph cannot be waited for outside of it, or the reverse, as in CUDA."""

    recording = 0
    """The number of the graph, or 0."""

    def mark(self) -> Event:
        mark = super().mark()
        mark.recorded = self.recording  # type: ignore[attr-defined]
        return mark

    def join(self, mark: Event) -> None:
        assert mark.recorded == self.recording  # type: ignore[attr-defined]
        super().join(mark)

    def is_capturing(self) -> bool:
        return bool(self.recording)


def whole_pass(device: GraphDevice, line: Pipeline, units: int) -> list[bool]:
    line.begin()
    right = run(device, line, range(units))
    line.finish()
    return right


def test_a_graph_of_a_part_ends_prefetching_and_one_over_unpinned_memory_is_refused() -> None:
    device = GraphDevice(0)
    line = pipeline(device, 4, pinned=[True, True, True, False])
    assert run(device, line, range(4)) == [True] * 4
    device.recording = 1
    with pytest.warns(RuntimeWarning, match="a part of the module alone"):
        assert run(device, line, [1]) == [True]
    with pytest.raises(RuntimeError, match=r"copies from memory that is not pinned \(layer 3\)"):
        line.wait(3, [line.buffers[1]])
    device.recording = 0
    line.begin()
    for buffer in line.buffers:
        buffer.fill_(77)
    assert run(device, line, range(4)) == [True] * 4


class Interrupt(BaseException):
    """As Ctrl-C."""


class Breaking(GraphDevice):
    """Raises before or after its operation number `at`."""

    at = -1
    after = False

    def _operate(self, operation: Callable[..., Any], *given: Any) -> Any:
        self.at -= 1
        if self.at == 0 and not self.after:
            raise Interrupt
        result = operation(self, *given)
        if self.at == 0:
            raise Interrupt
        return result


for name in ("fork", "copy", "mark", "join", "copy_in_order"):
    setattr(Breaking, name, partialmethod(Breaking._operate, getattr(GraphDevice, name)))


def broken_pass(device: Breaking, line: Pipeline, *, breaks_in: int, module: bool, compiled: bool) -> bool:
    """Run layers until the device breaks, or layer `breaks_in` does; return whether one did.

    `module`: the layers are those of a module, else somebody calls them. Compiled code reports no failure.
    """
    try:
        if module:
            line.begin()
        for index in range(len(line.units)):
            try:
                buffer = line.buffers[line.units[index].slot]
                line.wait(index, [buffer])
                device.run(lambda buffer=buffer: buffer.clone())  # type: ignore[misc]
                if index == breaks_in:
                    raise Interrupt
                line.release(index)
            except Interrupt:
                device.at = -1
                if not compiled:
                    line.abandon(index)
                raise
        if module:
            line.finish()
    except Interrupt:
        device.at = -1
        if module and not compiled:
            line.abandon(None)
        return True
    return False


def end_capture(device: GraphDevice, line: Pipeline) -> int:
    """End a capture, whose work never runs. Return how many of its copies nobody waits for."""
    while device._compute:
        assert device._step(device._compute) or device._step(device._copies)
    unjoined = len(device._copies)
    device._copies.clear()
    device.recording = 0
    for buffer in line.buffers:
        buffer.fill_(77)
    return unjoined


@given(
    seed=st.none() | st.integers(0, 1000),
    units=st.integers(2, 6),
    slots=st.integers(1, 2),
    pinned=st.booleans(),
    breaks=st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 8)),
    how=st.sampled_from(["eager", "graph", "compiled", "compiled graph", "list"]),
    then=st.sampled_from(["eager", "graph", "settle", "join"]),
)
@settings(deadline=None, max_examples=300)
def test_nothing_of_a_failed_pass_is_left(seed, units, slots, pinned, breaks, how, then):
    """And before it, and after it, every kernel reads its own weights, under any schedule."""
    device = Breaking(None if "graph" in how else seed)
    line = pipeline(device, units, pinned=[pinned or index % 2 > 0 for index in range(units)], slots=slots)
    module, compiled, graph = how != "list", "compiled" in how, "graph" in how and pinned
    order = dict(line._after)
    assert whole_pass(device, line, units) == [True] * units
    if graph:
        device.synchronize()
        device.recording = 1
    device.at, device.after, breaks_in = breaks
    failed = broken_pass(device, line, breaks_in=breaks_in, module=module, compiled=compiled)
    device.at = -1
    if graph:
        assert end_capture(device, line) == 0 or compiled
    if then == "settle":
        line.settle()
    elif then == "join":
        line.join()
    elif then == "graph" and pinned and module:
        device.recording = 2
        line.begin()
        run(device, line, range(units))
        line.finish()
        assert end_capture(device, line) == 0
    for _ in range(2):
        right = whole_pass(device, line, units) if module else run(device, line, range(units))
        assert right == [True] * units
    assert line._after == order or not failed or (compiled and how == "list")
    assert line.plain is None
    line.settle()
