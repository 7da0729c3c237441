"""Engines timed in turn: only one works at a time, all stay until the end, and the ratio of rounds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moedoctor.results import UnavailableError
from moedoctor.upstream.engine import nan_overhead
from moedoctor.upstream.engine.engine import EngineResult


def result(name: str, times: list[float]) -> EngineResult:
    probe = {"step_ms": times, "gpu_ms": [], "compared": 4, "seconds_comparing": 0.2}
    return EngineResult(label=name, probe=probe)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nan_overhead, "step_events", lambda: contextlib.nullcontext([]))
    monkeypatch.setattr(nan_overhead, "milliseconds", lambda events: [2.0, 1.0, 1.0])


def test_only_one_engine_works_at_a_time_and_all_stay_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working, most, calls, guard = [0], [0], [0], threading.Lock()
    ended: list[float] = []
    order: list[str] = []
    local = threading.local()

    def seconds(llm: Any, tokens: int) -> float:
        if tokens == 48:  # the warm-up is not in turn
            return 0.0
        with guard:
            working[0] += 1
            most[0] = max(most[0], working[0])
            calls[0] += 1
            order.append(local.name)
        time.sleep(0.002)
        with guard:
            working[0] -= 1
            ended.append(time.monotonic())
        return tokens * 1e-3

    def comparisons() -> tuple[int, float]:
        local.asked = getattr(local, "asked", 0) + 1
        return ((3, 0.1), (7, 0.5))[local.asked - 1]

    def probe(name: str) -> tuple[dict[str, Any], float]:
        local.name = name
        found = nan_overhead.decode_times(None, steps=48, rounds=3, meet=str(tmp_path), name=name)
        return found, time.monotonic()

    monkeypatch.setattr(nan_overhead, "_seconds", seconds)
    monkeypatch.setattr(nan_overhead.record, "comparisons", comparisons)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(probe, nan_overhead._NAMES))
    assert (most[0], calls[0]) == (1, 4 * 3 * 2)
    assert all(evidence["step_ms"] == pytest.approx([1.0] * 3) for evidence, _ in found)
    assert all(evidence["gpu_ms"] == [1.0] * 3 for evidence, _ in found)
    assert all(evidence["compared"] == 7 - 3 for evidence, _ in found), "those of the warm-up do not count"
    assert order[::2] == list(nan_overhead.turns(3))
    assert order[::2][:8] == ["off 1", "on 1", "on 2", "off 2", "off 2", "on 2", "on 1", "off 1"]
    assert [name.split()[0] for name in order[::2]] == ["off", "on", "on", "off"] * 3
    assert min(left for _, left in found) >= max(ended)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
@pytest.mark.skipif(os.cpu_count() == 1, reason="there is one core only")
def test_all_engines_work_on_one_core_and_wait_on_others() -> None:
    every = os.sched_getaffinity(0)
    with nan_overhead._one_core() as work:
        assert os.sched_getaffinity(0) == every - {max(every)}
        with work():
            assert os.sched_getaffinity(0) == {max(every)}
        assert os.sched_getaffinity(0) == every - {max(every)}
    assert os.sched_getaffinity(0) == every


def test_models_are_written_and_only_the_variables_make_engines_differ(tmp_path: Path) -> None:
    for model in (nan_overhead._TINY, nan_overhead._LARGE):  # the third would be large
        folder = tmp_path / str(model.layers)
        model.write(folder / "model", model.layers)
        config = json.loads((folder / "model" / "config.json").read_text())
        assert config["num_hidden_layers"] == model.layers
        off, on = (
            nan_overhead._request(model, folder, name, {"A": "b"}, {"steps": 1}) for name in ("off 1", "on 1")
        )
        assert off.arguments == on.arguments
        assert set(on.environ.items()) - set(off.environ.items()) == {("A", "b")}


@pytest.mark.parametrize(
    ("measure", "when"),
    [("recording", "nan"), ("recording_crash", "crash"), ("recording_mismatch", "mismatch=0.01")],
)
@pytest.mark.parametrize(
    "trouble", ["", "off 2: active was record", "on 1: active was nothing", "1 calls were recorded"]
)
def test_a_recording_that_was_not_active_or_is_over_has_no_cost(
    monkeypatch: pytest.MonkeyPatch, measure: str, when: str, trouble: str
) -> None:
    def run(trials: list[Any], parallel: int) -> list[Any]:
        ran = []
        for trial in trials:
            name, environ = trial.request.label.removeprefix("trace "), trial.request.environ
            assert environ.get("MOEDOCTOR_RECORD_WHEN") == (when if name.startswith("on") else None)
            assert trial.request.probe_options["steps"] == (600 if when.startswith("mismatch") else 48)
            assert "cudagraph_mode" not in trial.request.arguments["compilation_config"]
            active = "record" if name.startswith("on") else None
            if trouble.startswith(name):
                active = None if active else "record"
            if "MOEDOCTOR_RECORD" in environ and trouble.startswith("1 calls"):
                Path(environ["MOEDOCTOR_RECORD"]).mkdir(exist_ok=True)
                (Path(environ["MOEDOCTOR_RECORD"]) / "some.moecapsule").touch()
            ran.append(
                types.SimpleNamespace(result=dataclasses.replace(result(name, [1.0] * 8), fixes=active))
            )
        return ran

    monkeypatch.setattr(nan_overhead, "run_trials", run)
    monkeypatch.setattr(nan_overhead, "write_qwen3_moe", lambda *given, **sizes: None)
    if trouble:
        with pytest.raises(UnavailableError, match=trouble):
            getattr(nan_overhead, measure)({})
    else:
        (row,) = getattr(nan_overhead, measure)({})
        assert (row["overhead"], row["cudagraph_mode"]) == (0, "default")
        assert row.get("compared") == ([4, 4] if when.startswith("mismatch") else None)


def test_means_count_the_rounds_in_which_a_call_was_compared() -> None:
    """The best median of a block leaves them out: a comparison that costs much would look free."""
    block = nan_overhead._BLOCK
    slow = [1.0] * block + ([1.0] * 6 + [3.0] * 2)
    results = [
        result(name, slow if name.startswith("on") else [1.0] * 2 * block) for name in nan_overhead._NAMES
    ]
    assert nan_overhead._figures(results)["overhead"] == 0
    figures = nan_overhead._figures(results, statistics.mean)
    assert figures["overhead"] == pytest.approx(0.25)
    assert (figures["compared"], figures["compare_ms"]) == ([4, 4], pytest.approx(50))


def test_waiting_for_other_engines_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nan_overhead, "_PATIENCE", 0.1)
    with pytest.raises(TimeoutError, match="not all engines were up"):
        nan_overhead._wait_for_all(tmp_path, "on 1", "up")
    with pytest.raises(TimeoutError, match=r"its turn did not come within 0\.1 s"):
        nan_overhead._wait_for(tmp_path / "0.done", "its turn did not come")


def test_the_best_block_of_each_engine_counts_and_identical_engines_give_the_noise() -> None:
    block = nan_overhead._BLOCK
    quiet, loud = [1.0] * block, [3.0] * block
    times = {"off 1": 1.0, "on 1": 1.1, "on 2": 1.1, "off 2": 1.02}
    results = [
        result(name, [times[name] * load for load in (loud + quiet if name[-1] == "1" else quiet + loud)])
        for name in nan_overhead._NAMES
    ]
    figures = nan_overhead._figures(results)
    assert figures["overhead"] == pytest.approx(1.1 / 1.01 - 1)
    assert figures["noise"] == pytest.approx(0.02)
    assert figures["each_off"] == pytest.approx([1.0, 1.02])
    assert (figures["step_ms_off"], figures["rounds"]) == (pytest.approx(1.01), 2 * block)
    assert "gpu_overhead" not in figures
    for engine in results:
        engine.probe["gpu_ms"] = [0.5 if "off" in engine.label else 0.6]
    figures = nan_overhead._figures(results)
    assert figures["gpu_overhead"] == pytest.approx(0.2)
    assert figures["gpu_noise"] == 0
