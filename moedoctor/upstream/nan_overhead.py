"""What the NaN trace costs a decode step: engines with and without it side by side, timed in turn.

Four engines are up at once and only one of them works at a time, so that clocks and neighbours strike all
alike. A round is the difference between a long and a short generation.
"""

from __future__ import annotations

import fcntl
import importlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.subjects.base import UnavailableError
from moedoctor.upstream.engine import EngineRequest, EngineResult, run_engines
from moedoctor.upstream.nan_requests import BATCH, SECONDS, engine_arguments, prompts, said, traced

LAYERS = 4
_NAMES = ("off 1", "on 1", "off 2", "on 2")
_STEPS, _ROUNDS = 48, 40
_PATIENCE = 200.0
"""Seconds that an engine waits for the others to be up, or to be through."""


def overhead(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Milliseconds of a decode step without and with the trace, and the ratio less 1 with its spread."""
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folder = Path(name)
        model = write_qwen3_moe(
            folder / "model", layers=LAYERS, hidden=512, intermediate=256, experts=32, top_k=4
        )
        results = run_engines([_request(model, folder, one) for one in _NAMES], parallel=len(_NAMES))
    for result in results:
        if result.error is not None:
            raise UnavailableError(f"{result.label}: {said(result)}")
    return [_figures(results)]


def decode_times(llm: Any, *, steps: int, rounds: int, meet: str, name: str) -> dict[str, Any]:
    """Probe: milliseconds of a decode step in each round; `meet` is a folder that the engines share."""
    folder = Path(meet)
    _seconds(llm, steps)  # warm-up
    _wait_for_all(folder, name, "up")
    times = []
    with (folder / "turn").open("a") as turn:
        for _ in range(rounds):
            fcntl.flock(turn, fcntl.LOCK_EX)
            # A generation of two tokens has the prefill and one decode step; the rest is decode steps.
            times.append((_seconds(llm, steps + 2) - _seconds(llm, 2)) / steps * 1e3)
            fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(0.01)  # so that another one gets the turn
    _wait_for_all(folder, name, "through")
    return {"step_ms": times}


def _seconds(llm: Any, tokens: int) -> float:
    vllm: Any = importlib.import_module("vllm")
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": one} for one in prompts()], sampling, use_tqdm=False)
    return time.perf_counter() - started


def _wait_for_all(folder: Path, name: str, stage: str) -> None:
    (folder / f"{name}.{stage}").touch()
    until = time.monotonic() + _PATIENCE
    while not all((folder / f"{one}.{stage}").exists() for one in _NAMES):
        if time.monotonic() > until:
            raise TimeoutError(f"not all engines were {stage} within {_PATIENCE:g} s")
        time.sleep(0.05)


def _request(model: Path, folder: Path, name: str) -> EngineRequest:
    return EngineRequest(
        str(model),
        prompts(),
        engine_arguments(),
        traced() if name.startswith("on") else {},
        max_tokens=2,
        probe="moedoctor.upstream.nan_overhead:decode_times",
        probe_options={"steps": _STEPS, "rounds": _ROUNDS, "meet": str(folder), "name": name},
        seconds=SECONDS,
        label=f"trace {name}",
    )


def _figures(results: Sequence[EngineResult]) -> dict[str, Any]:
    off = [result.probe["step_ms"] for result in results[::2]]
    on = [result.probe["step_ms"] for result in results[1::2]]
    ratios = sorted(
        mine / base
        for with_trace, without in zip(on, off, strict=True)
        for mine, base in zip(with_trace, without, strict=True)
    )
    return {
        "step_ms_off": statistics.median(one for times in off for one in times),
        "step_ms_on": statistics.median(one for times in on for one in times),
        "overhead": statistics.median(ratios) - 1,
        "overhead_p20": ratios[len(ratios) // 5] - 1,
        "overhead_p80": ratios[len(ratios) * 4 // 5] - 1,
        "medians_off": [statistics.median(one) for one in off],
        "medians_on": [statistics.median(one) for one in on],
        "layers": LAYERS,
        "batch": BATCH,
        "rounds": len(ratios),
    }
