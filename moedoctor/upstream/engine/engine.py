"""Starts a real `vllm.LLM` in a fresh Python process and brings back tokens, an error, or a death.

A request is plain data; it goes to the child through a file, and so does the answer. No shell is used, what
vLLM prints goes into a log that is read afterwards, its caches go into a folder that is removed, and nothing
that the child started outlives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moedoctor
from moedoctor.processes import deaths
from moedoctor.redaction import Redactor
from moedoctor.results import Death
from moedoctor.upstream.engine.log import LogFacts, read_log

CHILD = "moedoctor.upstream.engine.child"
ENVIRON: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What every engine gets unless the request says otherwise: one process, and no kernel built at start-up."""
ARGUMENTS: Mapping[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    "disable_log_stats": True,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "seed": 0,
}
"""Engine arguments for a tiny model. With `kv_cache_memory_bytes` vLLM takes no memory profile, so that
engines side by side do not trip over each other's memory."""
_PROBE = re.compile(r"moedoctor(\.[a-z_][a-z0-9_]*)+:[a-z_][a-z0-9_]*")
_OWN_CACHES = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "TORCHINDUCTOR_CACHE_DIR")
"""Never shared: a graph that was compiled with a fix must not be found by an engine without it."""


@dataclass(frozen=True)
class EngineRequest:
    """One engine, what it is asked, and what is looked at meanwhile."""

    model: str
    """A folder, or a name on the hub."""
    prompts: Sequence[Sequence[int] | str]
    """Token ids, or text where the model has a tokenizer."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM` over `ARGUMENTS`; None takes one of those away."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables over `ENVIRON` and this process's own."""
    max_tokens: int = 16
    logprobs: int | None = None
    """How many of the best tokens to report with their logprob at each step."""
    probe: str | None = None
    """``moedoctor.some.module:function``, called as ``function(llm, **probe_options)``; gives JSON evidence.
    One that is called before generating may give a function, which is called after it for the evidence."""
    probe_when: str = "after"
    """``before`` or ``after`` generating."""
    probe_options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 240.0
    """Time limit, from the start of the process."""
    label: str = ""

    def __post_init__(self) -> None:
        if self.probe is not None and not _PROBE.fullmatch(self.probe):
            raise ValueError(f"probe: {self.probe!r} is no moedoctor.module:function")
        if self.probe_when not in ("before", "after"):
            raise ValueError(f"probe_when: {self.probe_when!r}, expected before or after")
        if not self.prompts:
            raise ValueError("prompts: there is none")


@dataclass(frozen=True)
class EngineError:
    """How an engine failed."""

    kind: str
    """The exception's class with its module, or the way the process died."""
    message: str
    stage: str
    """``import``, ``load``, ``probe``, ``generate``, or ``process`` where it died without a word."""
    death: Death
    frames: tuple[str, ...] = ()
    """The last frames of the traceback, innermost last: ``vllm/…/uva.py:122 forward: code``."""


@dataclass(frozen=True)
class EngineResult:
    """What one engine did."""

    label: str
    tokens: tuple[tuple[int, ...], ...] = ()
    """Generated ids for each prompt."""
    texts: tuple[str, ...] = ()
    logprobs: tuple[tuple[Mapping[str, float], ...], ...] | None = None
    """For each prompt and step: token id -> logprob."""
    error: EngineError | None = None
    version: str | None = None
    """The vLLM that ran."""
    log: LogFacts = field(default_factory=LogFacts)
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Bytes on the GPU after loading and at the end."""
    probe: Any = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """``load``, ``generate`` and ``total``."""

    def summary(self) -> dict[str, Any]:
        """The result as plain evidence, without its log and logprobs."""
        said = None if self.error is None else f"{self.error.kind}: {self.error.message}"
        return {
            "label": self.label,
            "tokens": [list(one) for one in self.tokens],
            "error": said,
            "frames": [] if self.error is None else list(self.error.frames[-3:]),
            "moe_backend": self.log.moe_backend,
            "offloaded": self.log.offloaded,
            "fixes": self.log.fixes,
            "seconds": dict(self.seconds),
        }


def run_engines(requests: Sequence[EngineRequest], *, parallel: int = 4) -> list[EngineResult]:
    """Run all, up to `parallel` side by side on the same GPU; results in the order of `requests`."""
    with ThreadPoolExecutor(max_workers=max(1, parallel)) as pool:
        return list(pool.map(run_engine, requests))


def run_engine(request: EngineRequest) -> EngineResult:
    """Start the engine, ask it, end it. Raises nothing for what vLLM does: that is `EngineResult.error`."""
    with tempfile.TemporaryDirectory(prefix="moedoctor-engine-") as name:
        folder = Path(name)
        asked, answered, log = folder / "request.json", folder / "answer.json", folder / "log.txt"
        asked.write_text(json.dumps(_document(request)), encoding="utf-8")
        started = time.monotonic()
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(asked), str(answered)],
                stdin=subprocess.PIPE,  # closed with this process: the child then ends its whole group
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environ(request, folder),
                start_new_session=True,
            )
        try:
            code: int | None = process.wait(timeout=request.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        total = round(time.monotonic() - started, 2)
        text = log.read_text(encoding="utf-8", errors="backslashreplace")
        return _result(request, _answer(answered), code, text, total)


def _document(request: EngineRequest) -> dict[str, Any]:
    merged = {**ARGUMENTS, **request.arguments}
    arguments = {"model": request.model, **{key: one for key, one in merged.items() if one is not None}}
    by_ids = all(not isinstance(one, str) for one in request.prompts)
    arguments.setdefault("skip_tokenizer_init", by_ids)
    return {
        "arguments": arguments,
        "prompts": [one if isinstance(one, str) else list(one) for one in request.prompts],
        "max_tokens": request.max_tokens,
        "logprobs": request.logprobs,
        "probe": request.probe,
        "probe_when": request.probe_when,
        "probe_options": dict(request.probe_options),
    }


def _environ(request: EngineRequest, folder: Path) -> dict[str, str]:
    """The child's environment: it finds this moedoctor also where that is no installed package."""
    here = str(Path(moedoctor.__file__).resolve().parent.parent)
    paths = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    caches = {name: str(folder / "cache") for name in _OWN_CACHES}
    search = {"PYTHONPATH": os.pathsep.join([*paths, here])}
    return {**os.environ, **search, "PYTHONDONTWRITEBYTECODE": "1", **caches, **ENVIRON, **request.environ}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child and everything that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads its group, also after its own death
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _answer(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _result(
    request: EngineRequest, answer: Mapping[str, Any], code: int | None, text: str, total: float
) -> EngineResult:
    logprobs = answer.get("logprobs")
    return EngineResult(
        label=request.label,
        tokens=tuple(tuple(one) for one in answer.get("tokens", ())),
        texts=tuple(answer.get("texts", ())),
        logprobs=None if logprobs is None else tuple(tuple(one) for one in logprobs),
        error=_error(request, answer, code, text),
        version=answer.get("version"),
        log=read_log(text),
        memory=answer.get("memory", {}),
        probe=answer.get("probe"),
        seconds={**answer.get("seconds", {}), "total": total},
    )


def _error(
    request: EngineRequest, answer: Mapping[str, Any], code: int | None, text: str
) -> EngineError | None:
    hide = Redactor.of_this_process().text
    told = answer.get("error")
    if told is not None:
        message = hide(str(told["message"]))
        death = deaths.classify(message) or Death.EXCEPTION
        frames = tuple(hide(str(one)) for one in told.get("frames", ()))
        return EngineError(str(told["kind"]), message, str(told["stage"]), death, frames)
    if code is None:
        crash = deaths.hang(request.seconds, text)
    elif "tokens" not in answer:
        crash = deaths.from_exit(code, text)
    else:
        return None
    return EngineError(crash.death.value, hide(crash.message), "process", crash.death)
