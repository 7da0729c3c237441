"""The engines of the fix `backend`: which are started, and what their rows say."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import engine_stub
import pytest
from engine_stub import died

from moedoctor.upstream.engine import backend_choice as engines
from moedoctor.upstream.engine import engine
from moedoctor.upstream.engine.engine import EngineResult, LogFacts
from moedoctor.upstream.engine.experiment import Ran, Trial, pair

STOPPED = "vLLM is stopped: backend is refused: VLLM_NVFP4_MOE_BACKEND={}: it has cutlass (set 1)"
LOGPROBS = {"EMULATION": -0.5, "MARLIN": -0.25, "HUMMING": -0.125}


def chosen(trial: Trial) -> str:
    """The backend that vLLM would log for an engine."""
    arguments, environ = trial.request.arguments, trial.request.environ
    asked = str(arguments.get("moe_backend") or environ["VLLM_NVFP4_MOE_BACKEND"]).upper()
    return asked or "HUMMING"


def answer(trial: Trial) -> EngineResult:
    if trial.columns["asked"] in engines.REFUSED.values():
        return died(STOPPED.format(trial.columns["asked"]), kind="SystemExit")
    backend = chosen(trial)
    return EngineResult(
        trial.request.label,
        tokens=((1,),),
        logprobs=(({"1": LOGPROBS[backend]},),),
        log=LogFacts(moe_backend=backend),
        fixes="backend (…)" if trial.request.environ["MOEDOCTOR_FIXES"] else None,
    )


def choices(monkeypatch: pytest.MonkeyPatch, changed: Mapping[str, EngineResult]) -> list[dict[str, Any]]:
    def run(trials: Sequence[Trial]) -> list[Ran]:
        return pair(trials, [changed.get(trial.request.label, answer(trial)) for trial in trials])

    monkeypatch.setattr(engines, "run_trials", run)
    return engines.choices({})


def test_a_name_is_compared_with_the_flag_and_what_cannot_be_honoured_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = choices(monkeypatch, {})
    assert [row["asked"] for row in rows] == ["EMULATION", "MARLIN", *engines.REFUSED.values()]
    for row in rows[:2]:
        assert (row["automatic"], row["chosen"], row["fixes"]) == ("HUMMING", row["asked"], "backend (…)")
        assert (row["outcome"], row["logprob_distance"]) == ("same tokens", 0)
        assert row["distance_of_other"] == 0.25
        assert "error" not in row
    assert all(row["refused"] and row["asked"] in row["error"] for row in rows[2:])


def test_only_engines_with_the_variable_have_the_fix_and_only_others_the_flag() -> None:
    trials = engines.trials("/m")
    assert len({trial.request.label for trial in trials}) == 8
    for trial in trials:
        environ, arguments = trial.request.environ, trial.request.arguments
        assert (environ["MOEDOCTOR_FIXES"] == "backend") == bool(environ["VLLM_NVFP4_MOE_BACKEND"])
        assert not ("moe_backend" in arguments and environ["MOEDOCTOR_FIXES"])
    asked = {trial.request.label: trial.control for trial in trials if trial.control}
    assert asked == {
        "VLLM_NVFP4_MOE_BACKEND=EMULATION": "--moe-backend emulation",
        "VLLM_NVFP4_MOE_BACKEND=MARLIN": "--moe-backend marlin",
    }


def test_an_engine_that_failed_or_should_have_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    started = EngineResult("x", tokens=((1,),), log=LogFacts(moe_backend="HUMMING"))
    rows = choices(
        monkeypatch,
        {
            "VLLM_NVFP4_MOE_BACKEND=EMULATION": died("no memory"),
            "--moe-backend emulation": died("no memory"),
            "VLLM_NVFP4_MOE_BACKEND=MARLEN": started,
            "VLLM_NVFP4_MOE_BACKEND=FLASHINFER_TRTLLM": died("no memory"),
        },
    )
    assert rows[0] == {"asked": "EMULATION", "error": "RuntimeError: no memory"}
    assert rows[1]["distance_of_other"] is None
    assert (rows[2]["refused"], rows[2]["detail"]) == (False, "started with HUMMING")
    assert rows[3]["refused"]
    assert (rows[4]["refused"], rows[4]["error"]) == (False, "RuntimeError: no memory")


def test_the_engines_run_in_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stand-in always logs MARLIN and its tokens do not depend on the backend."""
    path = os.pathsep.join([str(engine_stub.write(tmp_path)), *sys.path])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(engine, "need_engine", lambda: None)
    rows = engines.choices({})
    assert [row.get("outcome") for row in rows[:2]] == ["same tokens", "same tokens"]
    assert {row["chosen"] for row in rows[:2]} == {"MARLIN"}
    assert not any(row["refused"] for row in rows[2:])
    json.dumps(rows)
