"""The engines of the fix `moe`: which are started, how rows are made, and that they take turns."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moedoctor.results import Death, UnavailableError
from moedoctor.upstream.engine import moe_layers as engines
from moedoctor.upstream.engine.engine import EngineError, EngineResult, LogFacts
from moedoctor.upstream.engine.experiment import Ran, Trial, pair


def answered(trial: Trial, **changes: Any) -> EngineResult:
    ours = 0 if trial.columns["computer"] == engines.THEIRS else 2
    return EngineResult(
        label=trial.request.label,
        **{
            "tokens": ((1, 2),),
            "logprobs": (({"1": -0.5}, {"2": -0.25}),),
            "probe": {"layers": 2, "ours": ours},
            "log": LogFacts(moe_backend="TRITON"),
            **changes,
        },
    )


def test_every_quantization_has_a_reference_a_fault_and_both_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(trials: Sequence[Trial]) -> list[Ran]:
        for trial in trials:
            backend = trial.request.arguments.get("moe_backend")
            assert backend == ("triton" if trial.columns["quantization"] == "BF16" else None)
        return pair(trials, [answered(trial) for trial in trials])

    monkeypatch.setattr(engines, "run_trials", run)
    rows = engines.tokens({})
    assert len(rows) == 18
    for quantization in engines.SCHEMES:
        kinds = {(row["computer"], row["mode"]) for row in rows if row["quantization"] == quantization}
        assert kinds == set(engines.ENGINES)
    assert {row["outcome"] for row in rows} == {"control", "same tokens"}
    assert all(row["logprob_distance"] in (None, 0.0) for row in rows)
    assert engines.fixed(engines.THEIRS) == {"MOEDOCTOR_FIXES": ""}
    assert engines.fixed(engines.REFERENCE_ENGINE)["MOEDOCTOR_MOE"] == "reference"
    assert engines.fixed(engines.OURS) == {"MOEDOCTOR_FIXES": "moe", "MOEDOCTOR_MOE": "kernels"}


def test_an_engine_without_our_layers_has_no_outcome() -> None:
    trials = [
        engines.trial("BF16", computer, "eager", "/m", [[1, 2]])
        for computer in (engines.REFERENCE_ENGINE, engines.OURS)
    ]
    results = [answered(trials[0]), answered(trials[1], probe={"layers": 2, "ours": 0})]
    rows = [engines._row(ran) for ran in pair(trials, results)]
    assert [row["outcome"] for row in rows] == ["control", "no fix"]


def timed(step_ms: Mapping[str, Sequence[float]], gpu: Mapping[str, float] | None = None) -> list[Ran]:
    trials = [
        Trial(
            engines._timed(f"/m/{quantization}", "/meet", computer, 4),
            {"quantization": quantization, "computer": computer},
        )
        for quantization in engines.SCHEMES
        for computer in (engines.THEIRS, engines.OURS)
    ]
    results = []
    for trial in trials:
        computer = str(trial.columns["computer"])
        layers = {"layers": 12, "ours": 0 if computer == engines.THEIRS else 12}
        times = {str(batch): list(step_ms[computer]) for batch in engines._BATCHES}
        on_gpu = {batch: [gpu[computer]] * 3 if gpu else [] for batch in times}
        results.append(answered(trial, probe={**layers, "step_ms": times, "gpu_ms": on_gpu}))
    return pair(trials, results)


def test_a_share_is_of_medians() -> None:
    ran = timed({engines.THEIRS: [2.0] * 9 + [9.0], engines.OURS: [1.0] * 9 + [50.0]})
    rows = engines._speeds(ran, 48)
    assert len(rows) == 6
    assert {(row["share"], row["gpu_share"]) for row in rows} == {(2.0, None)}
    ran = timed({engines.THEIRS: [2.0], engines.OURS: [1.0]}, {engines.THEIRS: 0.9, engines.OURS: 0.6})
    assert [row["gpu_share"] for row in engines._speeds(ran, 48)] == [pytest.approx(1.5)] * 6
    assert {(row["batch"], row["tokens_per_second"]) for row in rows} == {(1, 1000.0), (8, 8000.0)}


def test_an_engine_that_failed_or_lacks_the_fix_is_not_timed() -> None:
    ran = timed({engines.THEIRS: [2.0], engines.OURS: [1.0]})
    error = EngineError("ValueError", "no memory", "load", Death.EXCEPTION)
    ran[0] = Ran(ran[0].trial, answered(ran[0].trial, error=error))
    ran[3].result.probe["ours"] = 0
    rows = engines._speeds(ran, 48)
    assert [row.get("error", "timed") for row in rows] == [
        "ValueError: no memory",
        "an engine was not computed by what it was asked for",
        "timed",
        "timed",
    ]


def test_engines_that_are_compared_are_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for those beside it, in a folder of their own, and has the layers that fit."""
    started = []

    def run(trials: Sequence[Trial], *, parallel: int) -> list[Ran]:
        options = [trial.request.probe_options or {} for trial in trials]
        assert {option["engines"] for option in options} == {len(trials)} == {parallel}
        (meet,) = {option["meet"] for option in options}
        started.append((meet, [trial.columns["quantization"] for trial in trials]))
        for trial in trials:
            config = json.loads(Path(trial.request.model, "config.json").read_text(encoding="utf-8"))
            assert config["num_hidden_layers"] == 26
        layers = {"layers": 26, "ours": 26}
        times = {str(batch): [1.0] for batch in engines._BATCHES}
        probes = [
            {
                **layers,
                "step_ms": times,
                "gpu_ms": times,
                **({"ours": 0} if "vLLM" in trial.request.label else {}),
            }
            for trial in trials
        ]
        results = [answered(trial, probe=probe) for trial, probe in zip(trials, probes, strict=True)]
        return pair(trials, results)

    monkeypatch.setattr(engines, "need_engine", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (int(84.5e9), int(85e9)))
    monkeypatch.setattr(engines, "run_trials", run)
    rows = engines.speed({})
    assert [(row["quantization"], row["layers"]) for row in rows[::2]] == [
        (quantization, 26) for quantization in engines.SCHEMES
    ]
    assert [names for _, names in started] == [["BF16"] * 2, ["FP8"] * 2 + ["NVFP4"] * 2]
    assert len({meet for meet, _ in started}) == 2


@pytest.mark.parametrize(("free", "layers"), [(149.5e9, 48), (84.5e9, 26), (25e9, 5)])
def test_layers_that_fit(free: float, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (int(free), int(free)))
    assert engines._layers_that_fit() == layers


def test_without_memory_for_a_layer_no_engine_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (int(11e9), int(24e9)))
    with pytest.raises(UnavailableError, match=r"do not fit in 11\.0 GB of GPU memory"):
        engines._layers_that_fit()


def test_engines_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one of them never starts."""
    lock, working = threading.Lock(), []

    def generate(llm: Any, batch: int, tokens: int) -> float:
        if tokens != 4:  # not the warm-up
            with lock:
                working.append(llm)
                assert set(working) == {llm}, "two engines at once"
            time.sleep(0.002)
            with lock:
                working.remove(llm)
        return tokens * 1e-3

    monkeypatch.setattr(engines, "_generate_seconds", generate)
    monkeypatch.setattr(engines, "computed_by", lambda llm: {"layers": 1, "ours": 1})
    monkeypatch.setattr(engines, "_PATIENCE", 0.3)
    monkeypatch.setattr(engines.os, "getpid", threading.get_ident)

    def probe(name: str) -> Any:
        return engines.decode_times(name, batches=(1, 8), steps=4, rounds=5, meet=str(tmp_path), engines=3)

    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(probe, ("a", "b")):
            assert {len(times) for times in got["step_ms"].values()} == {5}
            assert all(abs(time - 1.0) < 1e-6 for times in got["step_ms"].values() for time in times)


def test_gpu_times_of_a_step_are_those_of_the_long_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[int] = []

    def generate(llm: Any, batch: int, tokens: int) -> float:
        events.extend([3] * (tokens - 1))
        return tokens * 1e-3

    monkeypatch.setattr(engines, "_generate_seconds", generate)
    monkeypatch.setattr(engines, "computed_by", lambda llm: {})
    monkeypatch.setattr(engines, "graph_events", lambda: contextlib.nullcontext(events))
    monkeypatch.setattr("moedoctor.upstream.engine.decode_speed.milliseconds", list)
    got = engines.decode_times(None, batches=(1, 8), steps=4, rounds=2, meet=str(tmp_path), engines=1)
    assert got["gpu_ms"] == {"1": [3, 3], "8": [3, 3]}
