"""The device buffers: whose weights are in which, and when the next ones may be copied there.

Each layer has one buffer for good; layers take turns in running order. A copy into a buffer starts when the
layer that used it has been released, behind everything that was queued until then; a layer starts behind its
copy. So a buffer is neither read before its copy is done nor overwritten while it is read.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.utils.dlpack import from_dlpack

from moedoctor.kernels.device_guard import make_current

Mark = Any
"""A point in the queue of copies."""


class CopyEngine:
    """A queue of copies beside the queue of computation, which is called the *current* one.

    This class copies at once, for devices without a queue, such as the CPU.
    """

    def fork(self) -> None:
        """Copies queued from now on start after everything that the current queue holds by now."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy. `source` must stay as it is until a mark after it has passed."""
        target.copy_(source)

    def mark(self) -> Mark:
        """Return the point after all copies queued so far."""
        return True

    def join(self, mark: Mark) -> None:
        """Make what is added to the current queue from now on start after `mark`. The host does not wait."""

    def synchronize(self) -> None:
        """Let the host wait for everything that is queued: only then may it overwrite a source."""

    def copy_in_order(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in the current queue, which is in order by itself."""
        target.copy_(source)

    def is_capturing(self) -> bool:
        """Return True if the current queue is being recorded into a graph."""
        return False


class CudaEngine(CopyEngine):
    """A CUDA stream of its own; the current queue is torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def fork(self) -> None:
        self._stream.wait_event(self._record_event(torch.cuda.current_stream(self._device)))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        target.record_stream(self._stream)  # a dropped buffer is not given out again under its copy

    def mark(self) -> Mark:
        return self._record_event(self._stream)

    def join(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def synchronize(self) -> None:
        # No event shows that the replay of a graph has read a source.
        torch.cuda.synchronize(self._device)

    def copy_in_order(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # From pinned memory the copy is queued; from any other the host must wait, so torch blocks.
        target.copy_(source, non_blocking=source.is_pinned())

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def _record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event


@dataclass(frozen=True)
class Region:
    """One parameter's bytes in its layer's block and buffer."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the parameter as it lies in `memory`, a uint8 tensor [n]; it has a storage of its own.

        If two layers' parameters were in one storage, a compiler would take writing one for writing the other
        and copy both.
        """
        with make_current(memory):  # torch exports memory of the current GPU only
            own = from_dlpack(self.view_bytes(memory))  # [n]
        return view_at(own, 0, self.dtype, self.size, self.stride)

    def view_bytes(self, memory: torch.Tensor) -> torch.Tensor:
        """Return uint8 [nbytes] of `memory`."""
        return memory[self.offset : self.offset + self.nbytes]


def view_at(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor over the storage of uint8 `memory` [n], from byte `offset` of the storage on."""
    typed = torch.empty(0, dtype=dtype, device=memory.device)
    return typed.set_(memory.untyped_storage(), offset // dtype.itemsize, size, stride)  # size


@dataclass(frozen=True, eq=False)
class Unit:
    """The offloaded weights of one layer."""

    name: str
    host: torch.Tensor
    """uint8 [n]."""
    pinned: bool
    slot: int
    """The number of its buffer."""
    regions: tuple[Region, ...]


@dataclass(eq=False)
class _Slot:
    buffer: torch.Tensor
    """uint8 [n]: as large as its largest unit."""
    holds: int | None = None
    """The unit whose weights are there, or on their way behind `mark`."""
    mark: Mark = None
    user: int | None = None
    """The unit that computes with it."""


@dataclass(eq=False)
class Pipeline:
    """Units, their buffers and the engine that fills them."""

    units: Sequence[Unit]
    buffers: Sequence[torch.Tensor]
    engine: CopyEngine
    plain: str | None = None
    """The reason that nothing is prefetched but copied when its layer starts; else None."""
    compiled: set[int] = field(default_factory=set)
    """Units that compiled code has started: it counts writes to their parameters that it does not do."""
    watched: bool = False
    """True if a pass was watched for reads of weights outside of their layers."""
    unwatched: str | None = None
    """The warning for a user whose first pass could not be watched."""
    _slots: list[_Slot] = field(init=False)
    _after: dict[int, int] = field(init=False)
    """Unit -> the unit that ran after it the last time."""
    _last: int | None = None
    _captured: bool = False
    """Part of some graph, whose replays change buffers unnoticed here."""
    _in_whole_capture: bool = False
    _started: set[int] = field(default_factory=set)
    """Units of this pass."""
    _thread: threading.Thread | None = None
    """The thread whose pass, or layer, is open."""
    _in_pass: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._slots = [_Slot(buffer) for buffer in self.buffers]
        self._after = {index: (index + 1) % len(self.units) for index in range(len(self.units))}

    def begin(self) -> None:
        """A pass over the whole module starts."""
        self._acquire()
        if self._in_pass:  # the pass before failed in compiled code, which does not call `abandon`
            self._drop()
        self._in_pass = True
        for slot in self._slots:
            slot.user = None
        self._started.clear()
        capturing = self.engine.is_capturing()
        self._in_whole_capture = capturing
        self._captured |= capturing
        if self._captured:
            if not capturing:
                self.join()
            self._forget()

    def finish(self) -> None:
        """The pass is over. If there are graphs, nothing stays in flight: a replay would not wait for it."""
        if self._captured:
            self.join()
        if self._in_whole_capture:
            self._forget()  # events that a graph recorded mean nothing outside of it
        self._in_whole_capture = False
        self._yield()

    def abandon(self, index: int | None) -> None:
        """Leave nothing behind of unit `index`, or of the pass, which this thread had open and which failed.

        In a pass, a failed unit ends nothing else: the module may catch its error and go on.
        """
        if self._thread is not threading.current_thread():
            return
        if index is not None:
            self._slots[self.units[index].slot].user = None
        if index is None or not self._in_pass:
            self._drop()
            self._yield()

    def go_unwatched(self, how: str) -> None:
        """Warn, once, that the first pass ran `how` and so was not watched."""
        if self.watched or self.unwatched is not None:
            return
        self.unwatched = (
            f"the first pass ran {how}, so it was not watched: where something reads an offloaded weight"
            " outside of its layer, such as a tied head, results are wrong; run one eager pass first"
        )
        warnings.warn(self.unwatched, RuntimeWarning, stacklevel=2)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise RuntimeError: a copy would compute with the weights of the original."""
        raise RuntimeError("an offloaded module cannot be copied or pickled: call restore() first")

    def join(self) -> None:
        """Make what is queued from now on start behind every copy that is in flight."""
        self._forget_dead_capture()
        for slot in self._slots:
            if slot.mark is not None:
                self.engine.join(slot.mark)

    def settle(self) -> None:
        """Let the host wait for the device, and rely no longer on what the buffers hold.

        Called before weights on the host are overwritten: a queued copy, or a queued replay of a graph that
        holds copies, has not read them yet.
        """
        self._forget_dead_capture()
        self.engine.synchronize()
        self._forget()

    def wait(self, index: int, arguments: Sequence[torch.Tensor]) -> None:
        """Unit `index` starts: `arguments`, its parameters, hold its weights for whatever is queued next."""
        self._acquire()
        self._forget_dead_capture()
        unit = self.units[index]
        slot = self._slots[unit.slot]
        if slot.user not in (None, index):
            other = self.units[slot.user or 0].name
            slot.user = None
            raise RuntimeError(
                f"{unit.name} runs inside {other}, which uses the same buffer: offloaded layers must not run"
                " inside each other (or the call before this one failed; then call again)"
            )
        base = slot.buffer.data_ptr()
        copies = [  # a compiler may hand over copies of the parameters, to be written instead
            (argument, region)
            for argument, region in zip(arguments, unit.regions, strict=True)
            if argument.data_ptr() != base + region.offset
        ]
        capturing = self.engine.is_capturing()
        if copies:
            self._go_plain("the compiler hands over copies of the weights", capturing)
        elif capturing and not self._in_whole_capture:
            self._go_plain("a graph records a part of the module alone", capturing)
        if capturing and not unit.pinned:
            raise RuntimeError(f"a graph cannot record copies from memory that is not pinned ({unit.name})")
        self._fetch(index, unit, slot)
        slot.user = index
        for argument, region in copies:
            argument.copy_(region.view(slot.buffer))
        if self._last is not None:
            self._after[self._last] = index
        self._last = index
        self._started.add(index)
        self._prefetch()

    def release(self, index: int) -> None:
        """Everything that reads the weights of unit `index` is queued."""
        self._slots[self.units[index].slot].user = None
        self._prefetch()
        if not self._in_pass:
            self._yield()

    def _acquire(self) -> None:
        """Raise RuntimeError while another thread has a pass open: the two would share the buffers."""
        own = threading.current_thread()
        with self._lock:
            other = self._thread
            if other is not None and other is not own and other.is_alive():
                raise RuntimeError(
                    f"an offloaded module runs one pass at a time, and thread {other.name} has one open (if a"
                    " compiled pass failed there, run one there again)"
                )
            self._thread = own

    def _yield(self) -> None:
        self._in_pass = False
        self._thread = None

    def _fetch(self, index: int, unit: Unit, slot: _Slot) -> None:
        if self.plain is None and unit.pinned:
            if slot.holds != index:
                self._start(index)
            self.engine.join(slot.mark)
            return
        if slot.mark is not None:
            self.engine.join(slot.mark)
        if self.plain is not None or slot.holds != index:
            slot.holds = None  # until the copy is queued
            self.engine.copy_in_order(slot.buffer[: unit.host.numel()], unit.host)
        slot.mark, slot.holds = None, index

    def _prefetch(self) -> None:
        """Start the copies of the next units whose buffers are free, in running order."""
        if self.plain is not None or self._last is None:
            return
        index, claimed = self._last, set[int]()
        for _ in self._slots:
            index = self._after[index]
            unit = self.units[index]
            slot = self._slots[unit.slot]
            if not unit.pinned or unit.slot in claimed or (self._captured and index in self._started):
                return
            claimed.add(unit.slot)
            if slot.holds == index:
                continue
            if slot.user is not None:
                return
            self._start(index)

    def _start(self, index: int) -> None:
        unit = self.units[index]
        slot = self._slots[unit.slot]
        slot.holds = None  # until the copy is queued
        self.engine.fork()
        self.engine.copy(slot.buffer[: unit.host.numel()], unit.host)
        slot.mark, slot.holds = self.engine.mark(), index

    def _go_plain(self, why: str, capturing: bool) -> None:
        """Copy each unit when it starts, from now on: others write the buffers too, unnoticed here."""
        if self.plain is not None:
            return
        if not capturing:
            self.join()
        self._forget()
        self.plain = why
        warnings.warn(f"weights are no longer prefetched: {why}", RuntimeWarning, stacklevel=2)

    def _drop(self) -> None:
        """After a failure, rely on nothing that was begun: no buffer, no order of layers, no capture."""
        self._last = None
        if self.plain is not None:
            self._forget()
        elif not self._in_whole_capture:
            for slot in self._slots:
                slot.holds = None
            with suppress(RuntimeError):  # the caller needs the first error
                mark = self.engine.mark()  # behind a copy whose own mark is missing
                for slot in self._slots:
                    slot.mark = mark
        else:
            if self.engine.is_capturing():
                # A capture must end with every stream joined. `fork` makes the stream of copies a part of it.
                with suppress(RuntimeError):  # a void capture records nothing more
                    self.engine.fork()
                    self.engine.join(self.engine.mark())
            self._forget()
        self._in_whole_capture = False

    def _forget_dead_capture(self) -> None:
        """Forget a capture that ended in the middle of a pass: its events cannot be waited for."""
        if self._in_whole_capture and not self.engine.is_capturing():
            self._in_whole_capture = False
            self._forget()

    def _forget(self) -> None:
        for slot in self._slots:
            slot.holds = slot.mark = None
