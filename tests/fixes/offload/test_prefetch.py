"""Prefetch on a device that runs work as late as allowed, or at random: no kernel reads a stale buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event

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
    return Pipeline(
        [
            Unit(
                f"layer {index}",
                torch.full((BYTES,), index + 1, dtype=torch.uint8),
                True if pinned is None else pinned[index],
                index % slots,
                (region,),
            )
            for index in range(units)
        ],
        [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(slots)],
        device,
    )


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


@given(
    seed=st.none() | st.integers(0, 10_000),
    units=st.integers(2, 6),
    passes=st.integers(1, 3),
    slots=st.integers(1, 2),
)
@settings(deadline=None)
def test_under_any_schedule_kernels_read_their_own_weights(
    seed: int | None, units: int, passes: int, slots: int
) -> None:
    device = LateDevice(seed)
    line = pipeline(device, units, slots=slots)
    right = []
    for _ in range(passes):
        line.begin()
        right += run(device, line, range(units))
        line.finish()
    assert right == [True] * units * passes


@given(seed=st.integers(0, 10_000), data=st.data(), units=st.integers(2, 5))
@settings(deadline=None)
def test_in_any_order_of_layers_kernels_read_their_own_weights(
    seed: int, data: st.DataObject, units: int
) -> None:
    device = LateDevice(seed)
    flags = data.draw(st.lists(st.booleans(), min_size=units, max_size=units))
    line = pipeline(device, units, pinned=flags)
    order = data.draw(st.lists(st.integers(0, units - 1), min_size=1, max_size=12))
    assert run(device, line, order) == [True] * len(order)


class NeverJoins(LateDevice):
    """Its computation does not wait for copies."""

    def join(self, mark: object) -> None:
        return


class NeverForks(LateDevice):
    """Its copies do not wait for computation."""

    def fork(self) -> None:
        return


@pytest.mark.parametrize("broken", [NeverJoins, NeverForks])
def test_without_either_wait_some_kernel_reads_a_stale_buffer(broken: type[LateDevice]) -> None:
    stale = 0
    for seed in range(40):
        device = broken(seed)
        line = pipeline(device, 5)
        stale += not all(run(device, line, [0, 1, 2, 3, 4] * 2))
    assert stale > 0


def test_the_next_two_layers_are_copied_while_a_layer_computes() -> None:
    device = LateDevice()
    line = pipeline(device, 4)
    line.wait(0, [line.buffers[0]])
    assert [slot.holds for slot in line._slots] == [0, 1]
    line.release(0)
    assert [slot.holds for slot in line._slots] == [2, 1]
    line.wait(1, [line.buffers[1]])
    line.release(1)
    assert [slot.holds for slot in line._slots] == [2, 3]


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

    recording = False

    def mark(self) -> Event:
        mark = super().mark()
        mark.recorded = self.recording  # type: ignore[attr-defined]
        return mark

    def join(self, mark: Event) -> None:
        assert mark.recorded is self.recording  # type: ignore[attr-defined]
        super().join(mark)

    def capturing(self) -> bool:
        return self.recording


def whole_pass(device: GraphDevice, line: Pipeline, units: int) -> list[bool]:
    line.begin()
    right = run(device, line, range(units))
    line.finish()
    return right


@given(seed=st.integers(0, 1000), units=st.integers(2, 5))
@settings(deadline=None, max_examples=30)
def test_passes_around_a_graph_of_the_whole_module_are_right(seed: int, units: int) -> None:
    device = GraphDevice(seed)
    line = pipeline(device, units)
    right = whole_pass(device, line, units)
    device.synchronize()
    device.recording = True
    right += whole_pass(device, line, units)
    assert not device._copies, "a capture must not end with copies that nobody waits for"
    device.recording = False
    for _ in range(2):
        for buffer in line.buffers:  # a replay
            buffer.fill_(77)
        right += whole_pass(device, line, units)
        device.synchronize()
        assert not device._copies
    assert (right, line.plain) == ([True] * units * 4, None)


def test_a_graph_of_a_part_ends_prefetching_and_one_over_unpinned_memory_is_refused() -> None:
    device = GraphDevice(0)
    line = pipeline(device, 4, pinned=[True, True, True, False])
    assert run(device, line, range(4)) == [True] * 4
    device.recording = True
    with pytest.warns(RuntimeWarning, match="a part of the module alone"):
        assert run(device, line, [1]) == [True]
    with pytest.raises(
        RuntimeError, match=r"cannot record copies from memory that is not pinned \(layer 3\)"
    ):
        line.wait(3, [line.buffers[1]])
    device.recording = False
    line.begin()
    for buffer in line.buffers:
        buffer.fill_(77)
    assert run(device, line, range(4)) == [True] * 4


@given(
    seed=st.none() | st.integers(0, 10_000), units=st.integers(2, 4), plain=st.sampled_from([None, "a test"])
)
@settings(deadline=None)
def test_host_memory_may_be_overwritten_after_settle(seed: int | None, units: int, plain: str | None) -> None:
    device = LateDevice(seed)
    line = pipeline(device, units)
    line.plain = plain
    right: list[bool] = []
    line.begin()
    for index in range(units):
        buffer = line.buffers[line.units[index].slot]
        line.wait(index, [buffer])
        device.run(reader(buffer, index, right))
        line.release(index)
    line.finish()
    line.settle()
    for unit in line.units:
        unit.host.zero_()
    device.synchronize()
    assert right == [True] * units
