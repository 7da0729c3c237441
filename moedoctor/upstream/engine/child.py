"""What runs inside an engine's process: ``python -m moedoctor.upstream.engine.child REQUEST ANSWER``.

Reads a request, starts vLLM, writes the answer, and leaves at once: after an illegal access the destructors
of CUDA can hang. What happened so far is in the answer also where a later stage fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moedoctor.results import plain

_SETS = ("cpu_offload_params", "offload_params")
"""Arguments that vLLM wants as sets, which JSON has not."""
_FRAMES = 14
_MESSAGE = 3000


def main(request: Path, answer: Path) -> None:
    """Carry out the request in one file, write the answer into the other, end the process."""
    _end_with_parent()
    faulthandler.enable()
    asked = json.loads(request.read_text(encoding="utf-8"))
    told: dict[str, Any] = {"seconds": {}}
    stage = ["import"]
    try:
        _perform(asked, told, stage)
    except BaseException as error:
        traceback.print_exc()
        told["error"] = {"stage": stage[0], **describe(error)}
    unfinished = answer.with_suffix(".part")
    unfinished.write_text(json.dumps(plain(told)), encoding="utf-8")
    unfinished.rename(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _perform(asked: Mapping[str, Any], told: dict[str, Any], stage: list[str]) -> None:
    vllm = importlib.import_module("vllm")
    told["version"] = str(vllm.__version__)
    stage[0] = "load"
    arguments = {key: set(one) if key in _SETS else one for key, one in asked["arguments"].items()}
    llm = _timed(told, "load", lambda: vllm.LLM(**arguments))
    told["memory"] = {"after_load": device_memory()}
    stage[0] = "probe"
    later = _probe(asked, llm) if asked["probe"] and asked["probe_when"] == "before" else None
    if later is not None and not callable(later):
        told["probe"] = plain(later)
    stage[0] = "generate"
    outputs = _timed(told, "generate", lambda: _generate(vllm, llm, asked))
    _synchronise()
    told["memory"]["at_end"] = device_memory()
    told["tokens"] = [list(one.outputs[0].token_ids) for one in outputs]
    told["texts"] = [str(one.outputs[0].text or "") for one in outputs]
    if asked["logprobs"] is not None:
        told["logprobs"] = [[_logprobs(step) for step in one.outputs[0].logprobs or ()] for one in outputs]
    stage[0] = "probe"
    if callable(later):
        told["probe"] = plain(later())
    elif asked["probe"] and asked["probe_when"] == "after":
        told["probe"] = plain(_probe(asked, llm))


def _generate(vllm: Any, llm: Any, asked: Mapping[str, Any]) -> Any:
    text = any(isinstance(one, str) for one in asked["prompts"])
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=asked["max_tokens"],
        logprobs=asked["logprobs"],
        ignore_eos=not text,
        detokenize=text,
    )
    prompts = [one if isinstance(one, str) else {"prompt_token_ids": one} for one in asked["prompts"]]
    return llm.generate(prompts, sampling)


def _logprobs(step: Mapping[int, Any]) -> dict[str, float]:
    return {str(token): round(float(one.logprob), 6) for token, one in step.items()}


def _probe(asked: Mapping[str, Any], llm: Any) -> Any:
    module, _, name = asked["probe"].partition(":")
    if not module.startswith("moedoctor."):
        raise ValueError(f"{module} is no module of moedoctor")
    return getattr(importlib.import_module(module), name)(llm, **asked["probe_options"])


def _timed(told: dict[str, Any], name: str, action: Callable[[], Any]) -> Any:
    started = time.monotonic()
    try:
        return action()
    finally:
        told["seconds"][name] = round(time.monotonic() - started, 2)


def device_memory() -> dict[str, int]:
    """Bytes on the GPU: what torch holds, its peak, and what is free for everybody."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": int(torch.cuda.memory_allocated()),
        "peak": int(torch.cuda.max_memory_allocated()),
        "free": int(free),
        "total": int(total),
    }


def _synchronise() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # an illegal access shows only at the next synchronisation


def describe(error: BaseException) -> dict[str, Any]:
    """Class, message and last frames of the error, and the first one where it wraps another."""
    first: BaseException = error
    while (
        cause := first.__cause__ or (None if first.__suppress_context__ else first.__context__)
    ) is not None:
        first = cause
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    frames = [
        f"{_short(frame.filename)}:{frame.lineno} {frame.name}: {frame.line or ''}".rstrip(": ")
        for frame in traceback.extract_tb(first.__traceback__)[-_FRAMES:]
    ]
    message = str(error)[:_MESSAGE]
    if first is not error:
        origin = f"{type(first).__module__}.{type(first).__qualname__}".removeprefix("builtins.")
        message += f"\n{origin}: {str(first)[:_MESSAGE]}"
    return {"kind": kind.removeprefix("builtins."), "message": message, "frames": frames}


def _short(file: str) -> str:
    """The path of a source file from its package on."""
    parts = Path(file).parts
    for marker in ("site-packages", "dist-packages", "site"):
        if marker in parts:
            return "/".join(parts[parts.index(marker) + 1 :])
    return "/".join(parts[-3:])


def _end_with_parent() -> None:
    """Nothing of this group outlives the process that started it: its end closes our stdin.

    A process of its own waits for that, for a thread would wait for the interpreter's lock, too.
    """
    if os.fork() == 0:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        if os.getpgid(0) == os.getppid():  # started as leader of a group, as `run_engine` does
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
