"""Starts a real `vllm.LLM` in a fresh Python process and returns its tokens, its error, or how it died.

A request is plain data, and so are the answers of the child, `moedoctor.upstream.engine.child`. The last one
counts: an engine that is killed keeps what it had answered. vLLM's output goes to a log that is read
afterwards, and vLLM's caches go to a folder that is removed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moedoctor.plugin.extensions import TRACES, Need
from moedoctor.plugin.register import RECORD, STATUS_VARIABLE, need, read_vllm_version
from moedoctor.processes import deaths
from moedoctor.processes.ask import Ended, run_module
from moedoctor.redaction import Redactor
from moedoctor.results import Death, UnavailableError
from moedoctor.upstream.releases.wheel import find_package_folders

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
"""Variables of every engine unless the request changes them: one process, and no kernel built at start-up."""
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
"""Engine arguments for a tiny model. With `kv_cache_memory_bytes` vLLM does not profile its memory, so
engines that run side by side do not disturb each other."""
_PATH = re.compile(r"(?<![\w./])/[^\s\"']+")
_INSTALLED_IN = re.compile(r".*/(?=(?:vllm|torch|triton|humming|flashinfer|moedoctor)/)")
"""The folder of a package at the start of a path in a message; it says nothing about the failure."""
_NVFP4_SELECTION = "model_executor/layers/fused_moe/oracle/nvfp4.py"
_PROBE = re.compile(r"moedoctor(\.[a-z_][a-z0-9_]*)+:[a-z_][a-z0-9_]*")
_OWN_CACHES = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "TORCHINDUCTOR_CACHE_DIR")
"""Never shared: an engine without a fix must not find a graph that was compiled with it."""
_LOG = {
    "moe_backend": re.compile(r"Using '?(\w+)'? (?:backend for )?\w+ MoE(?: backend)?"),
    "offloader": re.compile(r"Offloader set to (\w+)"),
    "offloaded": re.compile(r"Total CPU offloaded parameters: ([\d.]+)"),
    "kv_cache_gib": re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
    "kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
    "offloaded_by_us": re.compile(
        r"moedoctor: offload: ([\d.]+ of [\d.]+ MiB on the host(?:, fetched [A-Za-z ]+)?)"
    ),
}
"""Field of `LogFacts` -> the line that shows it."""
_LOADING = {
    "weights": re.compile(r"Model loading took .{1,60} and ([\d.]+) seconds"),
    "compile": re.compile(r"torch\.compile took ([\d.]+) s in total"),
    "capture": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
}
"""Part of the stage ``load`` -> the line that shows its seconds."""
_REFUSED = re.compile(
    r"moedoctor: (?:(?:left out: )?the (?:fix|trace) .{1,200} is not applied|vLLM is stopped"
    r"|left out: (?:backend|expert_cache|moe): |expert_cache: cpu(?:=\S+)? computes nothing"
    r"(?!: another model)).+"  # that of a draft beside its target
)
_AS_ANSWERED = ("version", "allocated", "load_peak", "host_bytes", "host_peak", "probe")
"""The fields of `EngineResult` that the child answers by these names."""
_recorder: Mapping[str, str] = {}
"""Variables of every engine whose request sets no `RECORD`: see `record_calls`."""


@dataclass(frozen=True)
class EngineRequest:
    """One engine, its prompts, and what is looked at meanwhile."""

    model: str
    """A folder, or a name on the hub."""
    prompts: Sequence[Sequence[int] | str]
    """Token ids, or text if the model has a tokenizer."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM` over `ARGUMENTS`; None removes one of those."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables over `ENVIRON` and this process's own."""
    flags: Sequence[str] = ()
    """Flags of `vllm serve` over `arguments`; the release's own parser reads them."""
    max_tokens: int = 16
    logprobs: int | None = None
    """The number of best tokens to report with their logprob at each step."""
    probe: str | None = None
    """``moedoctor.some.module:function``, called as ``function(llm, **probe_options)``; returns JSON
    evidence. A generator yields its evidence so far, and the last is kept. A probe that is called before
    generating may return a function instead, which is called afterwards."""
    probe_when: str = "after"
    """``before`` or ``after`` generating."""
    probe_options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 240.0
    """Time limit, from the start of the process."""
    label: str = ""

    def __post_init__(self) -> None:
        if self.probe is not None and not _PROBE.fullmatch(self.probe):
            raise ValueError(f"probe: got {self.probe!r}, expected moedoctor.module:function")
        if self.probe_when not in ("before", "after"):
            raise ValueError(f"probe_when: got {self.probe_when!r}, expected before or after")
        if not self.prompts:
            raise ValueError("prompts: expected at least one")


@dataclass(frozen=True)
class EngineError:
    kind: str
    """The exception's class with its module, or the way in which the process died."""
    message: str
    stage: str
    """``import``, ``load``, ``probe``, ``generate``, or ``process`` if the process died or was killed."""
    death: Death
    frames: tuple[str, ...] = ()
    """The last frames of the traceback, innermost last: ``vllm/…/uva.py:122 forward: code``."""

    def summarize(self) -> str:
        """Return stage, class and the first line of the message."""
        return f"{self.stage}: {self.kind}: {self.message.partition(chr(10))[0][:300]}"


@dataclass(frozen=True)
class LogFacts:
    """Facts that are only logged; None or empty if they were not. A repeated line counts once, the first."""

    moe_backend: str | None = None
    """As vLLM names it: ``MARLIN``, ``TRITON`` …"""
    offloader: str | None = None
    offloaded: str | None = None
    """GiB, as it is logged."""
    kv_cache_gib: str | None = None
    kv_cache_tokens: str | None = None
    """The tokens that the KV cache holds, such as ``1,048,576``."""
    offloaded_by_us: str | None = None
    """The result of the fix `offload`: ``1.5 of 1.6 MiB on the host, fetched inside the MoE operator``."""
    refused: tuple[str, ...] = ()
    """The plug-in's refusals, each with its reason."""


def read_log(text: str) -> LogFacts:
    lines = {name: pattern.search(text) for name, pattern in _LOG.items()}
    refused = tuple(dict.fromkeys(match[0] for match in _REFUSED.finditer(text)))
    return LogFacts(**{name: match[1] for name, match in lines.items() if match}, refused=refused)


@dataclass(frozen=True)
class EngineResult:
    label: str
    tokens: tuple[tuple[int, ...], ...] = ()
    """Generated ids for each prompt."""
    texts: tuple[str, ...] = ()
    logprobs: tuple[tuple[Mapping[str, float], ...], ...] | None = None
    """For each prompt and step: token id -> logprob."""
    error: EngineError | None = None
    version: str | None = None
    """The vLLM that ran."""
    fixes: str | None = None
    """The fixes and traces of ours that were active, each with what it does; None if there were none. A
    recording that only `record_calls` asked for is left out."""
    log: LogFacts = field(default_factory=LogFacts)
    allocated: int | None = None
    """Bytes that torch held on the GPU after loading; None without a GPU."""
    load_peak: int | None = None
    """Bytes that torch held at most while weights were loaded and repacked, beyond those held afterwards."""
    host_bytes: int | None = None
    """Memory of the engine's process on the host after loading; None if the system does not say."""
    host_peak: int | None = None
    """The most that it held up to then, pages of mapped files included."""
    probe: Any = None
    """The probe's result, or the last value that it yielded before the engine failed."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of each stage that ended: ``import``, ``load``, ``generate`` and ``probe``; of the parts of ``load``
    that vLLM logged: ``weights``, ``compile`` and ``capture``; and ``total``."""


def need_engine() -> None:
    """Raise UnavailableError, which skips the case, if no engine can run here."""
    if importlib.util.find_spec("vllm") is None:
        raise UnavailableError("vllm is not installed here")
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("needs an NVIDIA GPU that torch can use")


def has_backend(scheme: str, moe_backend: str) -> bool:
    """Return True if the installed vLLM has the backend for a checkpoint of this scheme. Reads a source file.

    Only HUMMING is asked for: releases up to 0.21.0 have it, but not for NVFP4.
    """
    if (scheme, moe_backend) != ("nvfp4", "humming"):
        return True
    files = [folder / _NVFP4_SELECTION for folder in find_package_folders("vllm")]
    return any(file.is_file() and "HUMMING" in file.read_text(encoding="utf-8") for file in files)


def need_backend(scheme: str, moe_backend: str | None) -> None:
    """Raise UnavailableError, which skips the case, if no engine can run here with this backend."""
    need_engine()
    if moe_backend is not None and not has_backend(scheme, moe_backend):
        raise UnavailableError(f"this vLLM has no MoE backend {moe_backend} for {scheme}")


def record_calls(folder: Path, when: str) -> None:
    """Let the engines of this process record a wrong call in `folder`, if the installed vLLM can record.

    `when` says which call, as MOEDOCTOR_RECORD_WHEN does. A request that sets `RECORD` itself keeps its own.
    """
    global _recorder
    able = need("record", TRACES["record"], read_vllm_version())[0] is Need.MADE_FOR
    _recorder = {RECORD: str(folder), "MOEDOCTOR_RECORD_WHEN": when} if able else {}


def run_engines(requests: Sequence[EngineRequest], *, parallel: int = 4) -> list[EngineResult]:
    """Run all, up to `parallel` side by side on the same GPU; results in the order of `requests`."""
    with ThreadPoolExecutor(max_workers=max(1, parallel)) as pool:
        return list(pool.map(run_engine, requests))


def run_engine(request: EngineRequest) -> EngineResult:
    """Start the engine, ask it, end it. Raises nothing for a failure of vLLM: see `EngineResult.error`."""
    recorder = {} if RECORD in request.environ else _recorder
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        fixes = Path(name) / "fixes.json"
        ended = run_module(
            CHILD,
            _write_request(request),
            seconds=request.seconds,
            environ={STATUS_VARIABLE: str(fixes), **ENVIRON, **recorder, **request.environ},
            caches=_OWN_CACHES,
        )
        active = json.loads(fixes.read_text(encoding="utf-8")) if fixes.is_file() else []
    if recorder:
        active = [line for line in active if not line.startswith("record ")]
    answer: dict[str, Any] = ended.answers[-1] if ended.answers else {}
    logprobs = answer.get("logprobs")
    return EngineResult(
        label=request.label,
        tokens=tuple(tuple(ids) for ids in answer.get("tokens", ())),
        texts=tuple(answer.get("texts", ())),
        logprobs=None if logprobs is None else tuple(tuple(steps) for steps in logprobs),
        error=_read_error(answer, ended),
        fixes="; ".join(active) or None,
        log=read_log(ended.log),
        **{name: answer.get(name) for name in _AS_ANSWERED},
        seconds={**_read_loading(ended.log), **answer.get("seconds", {}), "total": round(ended.seconds, 2)},
    )


def _write_request(request: EngineRequest) -> dict[str, Any]:
    merged = {**ARGUMENTS, **request.arguments}
    by_ids = all(not isinstance(prompt, str) for prompt in request.prompts)
    arguments = {
        "model": request.model,
        "skip_tokenizer_init": by_ids,
        **{key: value for key, value in merged.items() if value is not None},
    }
    return {**asdict(request), "arguments": arguments}


def _read_error(answer: Mapping[str, Any], ended: Ended) -> EngineError | None:
    redact = Redactor.from_this_process().mask

    def hide(text: str) -> str:
        return _PATH.sub(_cut_folder, redact(text))

    error = answer.get("error")
    if error is not None:
        message = hide(str(error["message"]))
        death = deaths.classify(message) or Death.EXCEPTION
        frames = tuple(hide(str(frame)) for frame in error.get("frames", ()))
        return EngineError(str(error["kind"]), message, str(error["stage"]), death, frames)
    if ended.code is None:
        crash = deaths.hang(ended.limit, ended.log)
        message = ": ".join(filter(None, (crash.message, _describe_stages(answer, ended))))
    elif not answer.get("finished"):
        crash = deaths.from_exit(ended.code, ended.log)
        message = crash.message
    else:
        return None
    return EngineError(crash.death.value, hide(message), "process", crash.death)


def _cut_folder(path: re.Match[str]) -> str:
    """Return a path without the folder that its package is installed in."""
    folder = _INSTALLED_IN.match(path[0])
    return path[0][folder.end() if folder else 0 :]


def _describe_stages(answer: Mapping[str, Any], ended: Ended) -> str | None:
    """Return what a killed engine had done: ``import took 9 s; load had run for 231 s (weights 200 s)``."""
    if "stage" not in answer:
        return None
    took: Mapping[str, float] = answer["seconds"]
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in _read_loading(ended.log).items())
    inside = {"load": f" ({parts})"} if parts else {}
    done = ", ".join(
        f"{name} {'' if index else 'took '}{seconds:.0f} s{inside.get(name, '')}"
        for index, (name, seconds) in enumerate(took.items())
    )
    stage, probe = answer["stage"], answer.get("probe")
    running = f"{stage} had run for {ended.seconds - sum(took.values()):.0f} s"
    if stage == "load":
        running += inside.get(stage, "")
    if stage == "probe" and isinstance(probe, list):
        running += f" and had {len(probe)} rows"
    return f"{done}; {running}" if done else running


def _read_loading(log: str) -> dict[str, float]:
    """Return the seconds of the parts of ``load`` that vLLM logged. The first line of each counts."""
    lines = {name: pattern.search(log) for name, pattern in _LOADING.items()}
    return {name: float(line[1]) for name, line in lines.items() if line}
