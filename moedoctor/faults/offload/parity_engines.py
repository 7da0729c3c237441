"""The engines of MD008: tiny checkpoints side by side, or one's own model, first without offload and then
with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moedoctor.faults.offload.parity_engines_judge import ParityParameters, first_calls, first_parting
from moedoctor.results import Observation
from moedoctor.upstream.engine import offload_engine
from moedoctor.upstream.engine.compare import short_error
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult, run_engines
from moedoctor.upstream.engine.offload_cells import BACKENDS as TINY
from moedoctor.upstream.engine.offload_cells import ON_GPU, UNPINNED, UVA

BACKENDS = tuple(TINY)
_SECONDS = 1500.0
_LOGPROBS = 5
_PROMPT_CALLS = 16


def observe(parameters: ParityParameters) -> Observation:
    """Runs in the child of a case. Raises UnavailableError where no engine can run."""
    offload_engine.need_engine()
    assert parameters.mode is not None
    fixes = "" if parameters.fixes == "none" else parameters.fixes
    if parameters.model is None:
        places = (ON_GPU, UVA)
        return offload_engine.observe(BACKENDS, parameters.mode, places, fixes)
    requests = [own_request(parameters, offload=offload, fixes=fixes) for offload in (False, True)]
    control, other = run_engines(requests, parallel=2 if fit_together(parameters) else 1)
    return Observation(compare(control, other, parameters))


def fit_together(parameters: ParityParameters) -> bool:
    """Whether the arguments say that two engines fit beside each other.

    Without a size for the KV cache an engine measures free memory, which the other would disturb.
    """
    more: dict[str, Any] = json.loads(parameters.arguments)
    return more.get("gpu_memory_utilization", 1.0) <= 0.45 and "kv_cache_memory_bytes" in more


def own_request(parameters: ParityParameters, *, offload: bool, fixes: str) -> EngineRequest:
    """An engine for the user's own model, with its own settings: nothing of the tiny ones is kept."""
    assert parameters.model is not None
    more: dict[str, Any] = json.loads(parameters.arguments)
    arguments: dict[str, Any] = {
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.9,
        "attention_backend": None,
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "enforce_eager": parameters.mode == "eager",
        "moe_backend": None if parameters.moe_backend == "auto" else parameters.moe_backend,
        **more,
    }
    if offload:
        arguments["cpu_offload_gb"] = parameters.cpu_offload_gb
    environ = {"MOEDOCTOR_FIXES": fixes, "HF_HUB_OFFLINE": "0" if parameters.online else "1"}
    if parameters.access == "copies":
        environ |= UNPINNED
    eager = parameters.mode == "eager"
    folder = Path(parameters.model)
    return EngineRequest(
        str(folder.resolve())
        if folder.is_dir()
        else parameters.model,  # the engine runs in a folder of its own
        (parameters.prompt,),
        arguments,
        environ,
        max_tokens=parameters.max_tokens,
        logprobs=_LOGPROBS,
        probe="moedoctor.upstream.engine.probes:layers_and_places",
        probe_when="before",
        # One call for each token, and those of a long prompt; compiled code passes the hooks by.
        probe_options={"calls": parameters.max_tokens + _PROMPT_CALLS if eager else 0},
        seconds=_SECONDS,
        label=f"{parameters.model} {'with' if offload else 'without'} offload",
    )


def compare(control: EngineResult, other: EngineResult, parameters: ParityParameters) -> Mapping[str, Any]:
    """What both said, and the first layer whose output parts."""
    alike = _alike(control, other)
    return {
        "vllm": other.version or control.version,
        "backend": other.log.moe_backend,
        "fixes_asked": parameters.fixes,
        "fixes": other.log.fixes,
        "offloader": other.log.offloader,
        "offloaded_gib": other.log.offloaded,
        "parameter_bytes": (other.probe or {}).get("parameter_bytes"),
        "host_bytes": (other.probe or {}).get("host_bytes"),
        "expected": parameters.expected,
        "control_text": control.texts[0] if control.error is None else None,
        "control_error": _said(control),
        "offload_text": other.texts[0] if other.error is None else None,
        "offload_error": _said(other),
        "not_looked_into": other.error is not None and other.error.stage == "probe",
        "same_tokens": control.error is None and other.error is None and control.tokens == other.tokens,
        "tokens_alike": alike,
        "lead": None if alike is None else _lead(control, other, alike),
        "control_layers": first_calls(control.probe),
        "seconds": {"control": control.seconds.get("total"), "offload": other.seconds.get("total")},
        **first_parting(control.probe, other.probe, alike),
    }


def _alike(control: EngineResult, other: EngineResult) -> int | None:
    """How many tokens are the same before the answers part; None where they do not, or one is missing."""
    if control.error is not None or other.error is not None or control.tokens == other.tokens:
        return None
    pairs = enumerate(zip(other.tokens[0], control.tokens[0], strict=False))
    shorter = min(len(other.tokens[0]), len(control.tokens[0]))
    return next((index for index, (mine, wanted) in pairs if mine != wanted), shorter)


def _lead(control: EngineResult, other: EngineResult, alike: int) -> float | None:
    """By how much the control held its own token for likelier than the other's; None where it does not list
    that one."""
    steps = control.logprobs[0] if control.logprobs else ()
    if not all(alike < len(some) for some in (steps, control.tokens[0], other.tokens[0])):
        return None
    mine, wanted = str(other.tokens[0][alike]), str(control.tokens[0][alike])
    step = steps[alike]
    return round(step[wanted] - step[mine], 6) if mine in step and wanted in step else None


def _said(result: EngineResult) -> str | None:
    return None if result.error is None else short_error(result)
