"""GPU time of an engine's steps, from the first to the last launch of each, by events on its stream."""

from __future__ import annotations

import functools
import importlib
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RUNNER = "vllm.v1.worker.gpu_model_runner"


class StepEvents:
    """Pairs of events around the model's call in each step since `clear`."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []

    def clear(self) -> None:
        self._pairs.clear()

    def milliseconds(self, skipped: int) -> float | None:
        """The median of all steps but the first `skipped`; None without a step. Waits for the device."""
        pairs = self._pairs[skipped:]
        if not pairs:
            return None
        pairs[-1][1].synchronize()
        return statistics.median(float(start.elapsed_time(end)) for start, end in pairs)

    def around(self, original: Any) -> Any:
        """`original` with an event before and one after it."""
        import torch

        @functools.wraps(original)
        def timed(*arguments: Any, **options: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = original(*arguments, **options)
            end.record()
            self._pairs.append((start, end))
            return result

        return timed


@contextmanager
def step_events() -> Iterator[StepEvents]:
    """Times the steps of the vLLM of this process, what a trace launches included."""
    runner = importlib.import_module(_RUNNER).GPUModelRunner
    events, original = StepEvents(), runner._model_forward
    runner._model_forward = events.around(original)
    try:
        yield events
    finally:
        runner._model_forward = original
