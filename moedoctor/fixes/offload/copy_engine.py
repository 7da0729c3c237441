"""Copies to a device beside its computation, and the order between the two."""

from __future__ import annotations

from typing import Any, Protocol

import torch

Mark = Any
"""A point in the queue of copies."""


class CopyEngine(Protocol):
    """A queue of copies beside the queue of computation, the *current* one."""

    def fork(self) -> None:
        """Copies queued from now on start after everything that the current queue holds by now."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy. `source` must stay as it is until a mark after it has passed."""

    def mark(self) -> Mark:
        """The point after all copies queued so far."""

    def join(self, mark: Mark) -> None:
        """What the current queue is given from now on starts after `mark`. The host does not wait."""

    def wait(self, mark: Mark) -> None:
        """The host waits for `mark`: only then may a source be overwritten."""

    def copy_in_order(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        """Copy in the current queue, so that no order has to be asked for.

        Gives the point after it, for who overwrites `source`; None where that has been read, or a graph reads
        it.
        """

    def capturing(self) -> bool:
        """Whether the current queue is being recorded into a graph."""


class BlockingEngine:
    """Copies that are done when the call returns: for devices without a queue, such as the CPU."""

    def fork(self) -> None:
        return

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return True

    def join(self, mark: Mark) -> None:
        return

    def wait(self, mark: Mark) -> None:
        return

    def copy_in_order(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        target.copy_(source)
        return None

    def capturing(self) -> bool:
        return False


class CudaEngine:
    """A CUDA stream of its own; the current queue is torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def fork(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        target.record_stream(self._stream)  # a dropped buffer is not given out again under its copy

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def copy_in_order(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        # From pinned memory the copy is queued; from any other the host must wait, and says so by blocking.
        queued = source.is_pinned()
        target.copy_(source, non_blocking=queued)
        if not queued or self.capturing():
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()
