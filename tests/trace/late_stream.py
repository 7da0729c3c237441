"""A model of a CUDA stream: what is launched happens in order, but later than the host goes on."""

from collections import deque
from collections.abc import Callable

import pytest
import torch

from moedoctor.kernels import kept_rows
from moedoctor.kernels.kept_rows import KeptRows, MoeCall
from moedoctor.trace import call_keeper


class LateStream:
    """Work of the device that has not happened yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work: deque[Callable[[], object]] = deque()
        self.dead = False
        """True if the device has failed: nothing happens any more, and each question raises."""
        begin_step, keep = kept_rows.begin_step_on_host, KeptRows.keep_on_host

        def launch_step(header: torch.Tensor, *given: int, frees: bool) -> None:
            self.work.append(lambda: begin_step(header, *given, frees=frees))

        def launch_keep(rows: KeptRows, layer: int, call: MoeCall) -> None:
            self.work.append(lambda: keep(rows, layer, call))

        stream = self

        class Event:
            """As `torch.cuda.Event`."""

            def __init__(self) -> None:
                self.passed = 0
                self.recorded = 0

            def record(self) -> None:
                self.recorded += 1
                number = self.recorded
                stream.work.append(lambda: setattr(self, "passed", number))

            def query(self) -> bool:
                if stream.dead:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                return self.passed == self.recorded

            def synchronize(self) -> None:
                while not self.query():
                    stream.run(1)

        class LateCopy(call_keeper.HeaderCopy):
            """Arrives when the stream gets there."""

            def __init__(self, *, on_gpu: bool) -> None:
                super().__init__(on_gpu=on_gpu)
                self._arrived = Event()

            def begin(self, header: torch.Tensor) -> None:
                stream.work.append(lambda: self.header.copy_(header))
                self._arrived.record()

        monkeypatch.setattr(kept_rows, "begin_step_on_host", launch_step)
        monkeypatch.setattr(KeptRows, "keep_on_host", launch_keep)
        monkeypatch.setattr(call_keeper, "HeaderCopy", LateCopy)

    def run(self, most: int) -> None:
        """Let the device do up to so much work."""
        for _ in range(min(most, 0 if self.dead else len(self.work))):
            self.work.popleft()()
