"""Engines that are timed in turn: one at a time, together until the end, and the ratio of their rounds."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moedoctor.upstream import nan_overhead
from moedoctor.upstream.engine import EngineResult


def result(name: str, times: list[float]) -> EngineResult:
    return EngineResult(label=name, probe={"step_ms": times})


def test_only_one_engine_works_at_a_time_and_all_stay_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working, most, calls, guard = [0], [0], [0], threading.Lock()
    ended: list[float] = []

    def seconds(llm: Any, tokens: int) -> float:
        if tokens == 48:  # the warm-up is not in turn
            return 0.0
        with guard:
            working[0] += 1
            most[0] = max(most[0], working[0])
            calls[0] += 1
        time.sleep(0.002)
        with guard:
            working[0] -= 1
            ended.append(time.monotonic())
        return tokens * 1e-3

    def probe(name: str) -> tuple[dict[str, Any], float]:
        found = nan_overhead.decode_times(None, steps=48, rounds=3, meet=str(tmp_path), name=name)
        return found, time.monotonic()

    monkeypatch.setattr(nan_overhead, "_seconds", seconds)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(probe, nan_overhead._NAMES))
    assert (most[0], calls[0]) == (1, 4 * 3 * 2)
    assert all(one["step_ms"] == pytest.approx([1.0] * 3) for one, _ in found)
    assert min(left for _, left in found) >= max(ended)


def test_an_engine_that_does_not_come_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nan_overhead, "_PATIENCE", 0.1)
    with pytest.raises(TimeoutError, match="not all engines were up"):
        nan_overhead._wait_for_all(tmp_path, "on 1", "up")


def test_each_round_is_held_against_the_same_round_of_the_engine_beside() -> None:
    results = [
        result("off 1", [1.0, 2.0]),
        result("on 1", [1.1, 2.2]),
        result("off 2", [1.0, 4.0]),
        result("on 2", [1.1, 4.4]),
    ]
    figures = nan_overhead._figures(results)
    assert figures["overhead"] == pytest.approx(0.1)
    assert figures["overhead_p20"] == figures["overhead_p80"] == pytest.approx(0.1)
    assert (figures["step_ms_off"], figures["rounds"]) == (1.5, 4)
