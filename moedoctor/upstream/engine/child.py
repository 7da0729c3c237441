"""Runs inside an engine's process: starts vLLM as the request says, and answers what it did.

It answers when each stage begins, and for each value of a probe that is a generator. An answer holds all that
was there before, so the last one is enough, also if the process is killed after it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from moedoctor.processes.ask import answer
from moedoctor.results import to_plain
from moedoctor.upstream.engine.decode_speed import generate, read_status

_SETS = ("cpu_offload_params", "offload_params")
"""Arguments that vLLM wants as sets, which JSON does not have."""
_FRAMES = 14
_MESSAGE = 3000


def respond(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Carry out the request, and give the answer so far whenever there is more of it.

    The last answer is `finished` or has an `error`, and also holds what came before the error. After it, a
    call that is still being recorded is saved: `answer` ends the process at once.
    """
    response: dict[str, Any] = {"stage": "import", "seconds": {}}
    stages = _perform(request, response)
    while "finished" not in response and "error" not in response:
        try:
            next(stages)
        except StopIteration:
            response |= {"stage": "record", "finished": True}
        except BaseException as error:
            traceback.print_exc()
            response["error"] = {"stage": response["stage"], **describe(error)}
        yield response
    if "moedoctor.plugin.record" in sys.modules:  # else nothing is recorded here
        sys.modules["moedoctor.plugin.record"].finish()


def _perform(request: Mapping[str, Any], response: dict[str, Any]) -> Iterator[None]:
    """Go through the stages, and stop for a moment whenever `response` has something new."""
    with _time_stage(response, "import"):
        yield
        vllm = importlib.import_module("vllm")
    response["version"] = str(vllm.__version__)
    with _time_stage(response, "load"), _watch_loading(response):
        yield
        given = {**request["arguments"], **_read_flags(request["flags"])}
        llm = vllm.LLM(**{key: set(value) if key in _SETS else value for key, value in given.items()})
    response["host_bytes"], response["host_peak"] = map(read_status, ("VmRSS:", "VmHWM:"))
    torch = sys.modules.get("torch")
    in_use = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda = torch.cuda if torch is not None and in_use else None
    response["allocated"] = None if cuda is None else int(cuda.memory_allocated())
    probe: Any = functools.partial(_probe, request, llm) if request["probe"] else None
    if probe is not None and request["probe_when"] == "before":
        probe = yield from _look(response, probe)
    with _time_stage(response, "generate"):
        yield
        has_text = any(isinstance(prompt, str) for prompt in request["prompts"])
        limits = {"max_tokens": request["max_tokens"], "logprobs": request["logprobs"]}
        kinds = {"ignore_eos": not has_text, "detokenize": has_text}
        best = generate(llm, request["prompts"], temperature=0.0, **limits, **kinds)
    if cuda is not None:
        cuda.synchronize()  # an illegal access shows only at the next synchronization
    response["tokens"] = [list(output.token_ids) for output in best]
    response["texts"] = [str(output.text or "") for output in best]
    if request["logprobs"] is not None:
        response["logprobs"] = [
            [
                {str(token): round(float(at.logprob), 6) for token, at in step.items()}
                for step in output.logprobs
            ]
            for output in best
        ]
    if probe is not None:
        yield from _look(response, probe)


def _read_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that flags of `vllm serve` stand for, read by vLLM's own parser.

    Raises ValueError for a flag that this release does not know.
    """
    if not flags:
        return {}
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    importlib.import_module("vllm.engine.arg_utils").EngineArgs.add_cli_args(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # only what is given may replace an argument

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"vLLM's parser refuses {shlex.join(flags)}: {message}")

    parser.error = refuse
    return dict(vars(parser.parse_args(list(flags))))


def _look(response: dict[str, Any], probe: Callable[[], Any]) -> Generator[None, None, Any]:
    """Call the probe; return the function that it wants to be called after generating, or None."""
    with _time_stage(response, "probe"):
        yield
        value = probe()
        if callable(value):
            return value
        for so_far in value if isinstance(value, Iterator) else (value,):
            response["probe"] = to_plain(so_far)
            yield
    return None


@contextlib.contextmanager
def _watch_loading(response: dict[str, Any]) -> Iterator[None]:
    """Note in `response` the bytes that torch held while weights were loaded beyond those it held afterwards.

    vLLM's default loaders are watched, in this process. The KV cache and warm-up come later and do not count.
    """
    loader: Any = None
    with contextlib.suppress(ImportError):
        loader = importlib.import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader
    if loader is None:
        yield
        return
    load = loader.load_model

    @functools.wraps(load)  # fixes look at its parameters and its source
    def load_model(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        cuda = importlib.import_module("torch").cuda
        if cuda.is_available():
            gc.collect()
            response["load_peak"] = int(cuda.max_memory_allocated() - cuda.memory_allocated())
        return model

    with mock.patch.object(loader, "load_model", load_model):
        yield


@contextlib.contextmanager
def _time_stage(response: dict[str, Any], name: str) -> Iterator[None]:
    """Note in `response` that a stage runs, and its seconds when it ends."""
    response["stage"] = name
    started, before = time.monotonic(), response["seconds"].get(name, 0.0)
    try:
        yield
    finally:
        response["seconds"][name] = round(before + time.monotonic() - started, 2)


def _probe(request: Mapping[str, Any], llm: Any) -> Any:
    module, _, name = request["probe"].partition(":")
    return getattr(importlib.import_module(module), name)(llm, **request["probe_options"])


def describe(error: BaseException) -> dict[str, Any]:
    """Class, message and last frames of the error, and the first error if it wraps another."""
    first: BaseException = error
    while (
        cause := first.__cause__ or (None if first.__suppress_context__ else first.__context__)
    ) is not None:
        first = cause
    frames = [
        f"{_shorten(frame.filename)}:{frame.lineno} {frame.name}: {frame.line or ''}".rstrip(": ")
        for frame in traceback.extract_tb(first.__traceback__)[-_FRAMES:]
    ]
    message = str(error)[:_MESSAGE]
    if first is not error:
        message += f"\n{_name_class(first)}: {str(first)[:_MESSAGE]}"
    return {"kind": _name_class(error), "message": message, "frames": frames}


def _name_class(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")


def _shorten(file: str) -> str:
    """The path of a source file from its package on."""
    parts = Path(file).parts
    for marker in ("site-packages", "dist-packages", "site"):
        if marker in parts:
            return "/".join(parts[parts.index(marker) + 1 :])
    return "/".join(parts[-3:])


if __name__ == "__main__":
    answer(respond)
