"""A simulated device on the CPU whose work happens late, so that hazards of asynchronous copies show.

It has two queues, computation and copies, each in order; only events order one after the other. Queued work
happens when somebody must wait for it, or at random moments in between. The rules are those of CUDA as
measured: a copy from or to pinned memory is queued and reads or writes the host late; a copy from or to
pageable memory is staged and has read or written the host when the call returns.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from threading import Event

import torch

from moedoctor.fixes.offload.prefetch import CopyEngine

Work = Callable[[], object]


class LateDevice(CopyEngine):
    """Copies late, and also runs kernels late.

    `seed`: work happens at random moments drawn from it; None: as late as the rules allow.
    `pinned`: whether all host memory is pinned; otherwise it is pageable.
    """

    def __init__(self, seed: int | None = None, *, pinned: bool = True) -> None:
        self._pinned = pinned
        self._random = random.Random(seed) if seed is not None else None
        # What waits in a queue: work, or an event that must have passed before the queue goes on.
        self._compute: deque[Work | Event] = deque()
        self._copies: deque[Work | Event] = deque()

    def run(self, kernel: Work) -> None:
        """Queue a computation."""
        self._compute.append(kernel)
        self._let_work_happen()

    def fork(self) -> None:
        event = Event()
        self._compute.append(event.set)
        self._copies.append(event)
        self._let_work_happen()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """To the device: pinned memory is read when the copy happens, pageable memory is staged now."""
        source = self._read_source(source)
        self._copies.append(lambda: target.copy_(source))
        self._let_work_happen()

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """To the host; with pageable memory the host waits until the bytes have arrived."""
        self._copies.append(lambda: target.copy_(source))
        if self._pinned:
            self._let_work_happen()
        else:
            self.synchronize()

    def mark(self) -> Event:
        event = Event()
        self._copies.append(event.set)
        self._let_work_happen()
        return event

    def join(self, mark: Event) -> None:
        self._compute.append(mark)
        self._let_work_happen()

    def wait(self, mark: Event) -> None:
        """Let what is queued happen until `mark` has passed."""
        while not mark.is_set():
            if not (self._step(self._copies) or self._step(self._compute)):
                raise RuntimeError("the event was never queued")

    def copy_in_order(self, target: torch.Tensor, source: torch.Tensor) -> None:
        source = self._read_source(source)
        self._compute.append(lambda: target.copy_(source))
        self._let_work_happen()

    def synchronize(self) -> None:
        while self._step(self._copies) or self._step(self._compute):
            pass
        if self._copies or self._compute:
            raise RuntimeError("the queues wait for each other")

    def _read_source(self, source: torch.Tensor) -> torch.Tensor:
        return source if self._pinned else source.clone()

    def _let_work_happen(self) -> None:
        while self._random is not None and self._random.random() < 0.5:
            self._step(self._random.choice((self._copies, self._compute)))

    def _step(self, queue: deque[Work | Event]) -> bool:
        """Let the first piece of `queue` happen; return False if it is empty or must wait."""
        if not queue or (isinstance(queue[0], Event) and not queue[0].is_set()):
            return False
        first = queue.popleft()
        if not isinstance(first, Event):
            first()
        return True
