"""Real engines with the fix `backend`: which NVFP4 backend they log, their tokens, and what stops them.

An engine that the fix asks by ``VLLM_NVFP4_MOE_BACKEND`` is compared with one that ``--moe-backend`` asks for
the same. A name that vLLM does not know, or that cannot be honoured, must stop the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moedoctor.fixes.backends.requests import NVFP4_VARIABLE
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult
from moedoctor.upstream.engine.experiment import (
    Ran,
    Trial,
    checkpoints,
    logprob_distance,
    run_trials,
    short_error,
)
from moedoctor.upstream.engine.offload_table import LOGPROBS, MAX_TOKENS, PROMPTS
from moedoctor.upstream.plugin.backend_fix import NAME

ASKED = ("EMULATION", "MARLIN")
AUTOMATIC = "automatic"
REFUSED = {
    "unknown": "MARLEN",
    "needs the flag": "FLASHINFER_MOE_EP_CUTEDSL",
    "not for this GPU": "FLASHINFER_TRTLLM",
}
"""Why a name must stop the engine -> the name. The last one runs on Blackwell of data centers alone."""
_SECONDS = 200.0


def choices(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each name that is asked for. Raises UnavailableError if no engine can run."""
    with checkpoints("nvfp4") as folders:
        ran = {engine.trial.request.label: engine for engine in run_trials(trials(folders["nvfp4"]))}
    automatic, *flags = (ran[label].result for label in (AUTOMATIC, *map(_flag_label, ASKED)))
    honoured = [
        _honoured(ran[_label(name)], automatic, other)
        for name, other in zip(ASKED, reversed(flags), strict=True)
    ]
    return [*honoured, *(_refused(reason, ran[_label(name)].result) for reason, name in REFUSED.items())]


def trials(folder: str) -> list[Trial]:
    """Return all engines for the NVFP4 checkpoint in `folder`."""
    return [
        _trial(folder, AUTOMATIC),
        *(_trial(folder, _flag_label(name), moe_backend=name.lower()) for name in ASKED),
        *(_trial(folder, _label(name), name, control=_flag_label(name)) for name in ASKED),
        *(_trial(folder, _label(name), name) for name in REFUSED.values()),
    ]


def _trial(folder: str, label: str, name: str = "", control: str | None = None, **arguments: Any) -> Trial:
    request = EngineRequest(
        folder,
        PROMPTS["NVFP4 MARLIN"],
        {"enforce_eager": True, "max_model_len": 64, "max_num_batched_tokens": 64, **arguments},
        {"MOEDOCTOR_FIXES": NAME if name else "", NVFP4_VARIABLE: name},
        max_tokens=MAX_TOKENS,
        logprobs=LOGPROBS,
        seconds=_SECONDS,
        label=label,
    )
    return Trial(request, {"asked": name}, control)


def _label(name: str) -> str:
    return f"{NVFP4_VARIABLE}={name}"


def _flag_label(name: str) -> str:
    return f"--moe-backend {name.lower()}"


def _honoured(ran: Ran, automatic: EngineResult, other: EngineResult) -> dict[str, Any]:
    """Return the row of an engine whose name must be honoured; `other` runs the other backend.

    Its logprobs differ from this one's, or else equal ones would not show which backend computed.
    """
    result, columns = ran.result, ran.trial.columns
    if result.error is not None:
        return {**columns, "error": short_error(result.error)}
    outcome, detail = ran.compare()
    return {
        **columns,
        "automatic": automatic.log.moe_backend or "not logged",
        "chosen": result.log.moe_backend or "not logged",
        "fixes": result.fixes,
        "version": result.version,
        "outcome": outcome.value,
        "detail": detail,
        "logprob_distance": _distance(result, ran.control),
        "distance_of_other": _distance(result, other),
        "seconds": result.seconds.get("total"),
    }


def _distance(result: EngineResult, other: EngineResult | None) -> float | None:
    return None if other is None or other.error is not None else logprob_distance(result, other)


def _refused(reason: str, result: EngineResult) -> dict[str, Any]:
    """Return the row of an engine that must not start. A line of its error must name what was asked for."""
    row = {"asked": REFUSED[reason], "reason": reason}
    if result.error is None:
        return {**row, "refused": False, "detail": f"started with {result.log.moe_backend or 'no backend'}"}
    lines = (*result.log.refused, *result.error.message.splitlines())
    line = next((line for line in lines if REFUSED[reason] in line.upper()), None)
    message = line or short_error(result.error)
    return {**row, "refused": line is not None, "stage": result.error.stage, "error": message.strip()[:300]}
