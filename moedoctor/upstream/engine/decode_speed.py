"""Measures inside an engine for `bench --engine`: answers, decode speed by two clocks, experts."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from moedoctor.upstream.engine.clear_prompts import LOGPROBS, TOKENS, Prompt
from moedoctor.upstream.engine.probes import get_model

PATIENCE = 120.0
"""Seconds that an engine waits for the others to be ready."""
_STEPS_OF_RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "_model_forward"),
    ("vllm.v1.worker.gpu.model_runner", "execute_model"),
)
"""The V1 and the V2 model runner, of which an engine has one: its module, and the function of a step."""
_ROUTERS = ("gate.weight", "router.weight", "router.proj.weight")
"""The endings of the names of a router's weights."""


def measure_engine(
    llm: Any,
    *,
    prompts: Sequence[Prompt],
    batches: Sequence[int],
    tokens: int,
    repeats: int,
    control: bool = False,
    meet: str | None = None,
    engines: int = 1,
) -> Iterator[dict[str, Any]]:
    """Probe: yield what has been measured so far.

    ``answers`` to the prompts; with `control`, ``wrong_answers`` while each router has the rows of other
    experts; ``experts``, the classes that compute MoE layers with their number; and ``speeds``, a row for
    each of `batches`: ``first_s`` and ``whole_s``, the seconds until one token and until `tokens` of them in
    each of `repeats`, ``decoded``, how many tokens are between the two, ``gpu_step_ms``, the GPU's time of a
    decode step, and ``gpu_clock``, what its events are around: ``graphs`` or ``steps``. ``host_growth`` are
    the bytes of this process on the host that the repeats after the first added.

    Speeds are of text drawn at temperature 1 from fixed seeds: greedy text of some models repeats itself, and
    then asks for the same experts. Engines that share the folder `meet` take turns, repeat by repeat.
    """
    result: dict[str, Any] = {"experts": count_experts(llm)}
    if prompts:
        result["answers"] = _answer(llm, prompts)
        yield result
        if control:
            with exchange_routers(llm) as changed:
                result["routers_changed"] = changed
                result["wrong_answers"] = _answer(llm, prompts) if changed else None
            yield result
    lists = "first_s", "whole_s", "gpu_step_ms", "gpu_clock"
    speeds: list[dict[str, Any]] = [
        {"batch": batch, "decoded": batch * (tokens - 1), **{name: [] for name in lists}} for batch in batches
    ]
    for batch in batches:
        _draw(llm, batch, tokens)  # warm-up
    held: list[int] = []
    with record_step_events() as steps, record_graph_events() as replays, _take_turns(meet, engines) as turn:
        for _ in range(repeats):
            with turn():
                for row in speeds:
                    row["first_s"].append(_draw(llm, row["batch"], 1))
                    steps.clear()
                    replays.clear()
                    row["whole_s"].append(_draw(llm, row["batch"], tokens))
                    # After the prefill a generation has tokens - 1 decode steps.
                    by_graph = time_decode_replays(replays, tokens - 2)
                    if by_gpu := by_graph or measure_milliseconds(steps[2:]):
                        row["gpu_step_ms"].append(statistics.median(by_gpu))
                        row["gpu_clock"].append("graphs" if by_graph else "steps")
            held += filter(None, [read_status("VmRSS:")])
    yield {**result, "speeds": speeds, "host_growth": held[-1] - held[0] if held[1:] else None}


def read_status(name: str) -> int | None:
    """Return the bytes of a line of this process's status; None if the system does not say."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10
    return None


def count_experts(llm: Any) -> dict[str, int]:
    """Return the classes that compute the MoE layers, with how many layers each computes."""
    owned: Iterator[Any] = (getattr(module, "quant_method", None) for module in get_model(llm).modules())
    methods = {id(method): method for method in owned if hasattr(method, "moe_kernel")}
    kernels = (getattr(method.moe_kernel, "impl", None) for method in methods.values())
    return dict(Counter(type(getattr(kernel, "fused_experts", None)).__name__ for kernel in kernels))


@contextmanager
def exchange_routers(llm: Any) -> Iterator[int]:
    """Give each router the rows of other experts for a while; yield how many routers have them.

    Every token then goes to experts that are not its own, whatever computes them. An engine whose answers
    stay the same would hide wrong experts.
    """
    import torch

    routers = [
        parameter
        for name, parameter in get_model(llm).named_parameters()
        if name.endswith(_ROUTERS) and parameter.dim() == 2 and len(parameter) > 1  # [experts, hidden]
    ]

    def roll(by: int) -> None:
        with torch.inference_mode():
            for weight in routers:
                values = weight.data.view(torch.uint8)  # torch cannot roll 8-bit floats
                values.copy_(values.roll(by, 0))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    roll(1)
    try:
        yield len(routers)
    finally:
        roll(-1)


def _answer(llm: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the greedy tokens and the logprobs of the best tokens."""
    outputs = generate(llm, prompts, temperature=0.0, max_tokens=TOKENS, logprobs=LOGPROBS)
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [{str(token): float(at.logprob) for token, at in step.items()} for step in output.logprobs]
            for output in outputs
        ],
    }


def _draw(llm: Any, batch: int, tokens: int) -> float:
    """Return the seconds in which so many sequences get so many tokens each."""
    # Each sequence has other tokens, so that a batch reaches other experts.
    prompts: list[Prompt] = [
        [(37 * (index + 1) + 11 * place) % 400 + 5 for place in range(8)] for index in range(batch)
    ]
    started = time.perf_counter()
    generate(llm, prompts, temperature=1.0, seed=1, max_tokens=tokens)
    return time.perf_counter() - started


def generate(llm: Any, prompts: Sequence[Prompt], **sampling: Any) -> list[Any]:
    """Return the output of each prompt; without an end and without text unless `sampling` says otherwise."""
    vllm: Any = importlib.import_module("vllm")
    parameters = vllm.SamplingParams(**{"ignore_eos": True, "detokenize": False, **sampling})
    given = [prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(given, parameters, use_tqdm=False)]


@contextmanager
def _take_turns(
    meet: str | None, engines: int
) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Yield a context in which this engine alone works, of `engines` that share the folder `meet`.

    They begin when all are ready, or when `PATIENCE` is over, so that one that did not start stops no other.
    """
    if meet is None:
        yield contextlib.nullcontext
        return
    folder = Path(meet)
    (folder / f"{os.getpid()}.ready").touch()
    until = time.monotonic() + PATIENCE
    while len(list(folder.glob("*.ready"))) < engines and time.monotonic() < until:
        time.sleep(0.05)

    @contextmanager
    def turn() -> Iterator[None]:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.05)  # let another have the lock

    with (folder / "turn").open("w") as file:
        yield turn


def record_step_events() -> contextlib.AbstractContextManager[list[tuple[Any, Any]]]:
    """Time the steps of the vLLM in this process, including what a trace launches.

    The list gets a pair of events for each step: from before and after the model's call, or with the V2 model
    runner, which has no function for that call, from before its inputs are prepared to after the call. So
    that runner's times hold work of the host. The list stays empty without a GPU.
    """
    return _record_events(
        lambda: [(importlib.import_module(module).GPUModelRunner, name) for module, name in _STEPS_OF_RUNNERS]
    )


def record_graph_events() -> contextlib.AbstractContextManager[list[tuple[Any, Any]]]:
    """Time the replays of CUDA graphs in this process, from before to after each.

    Of full graphs there is one for each decode step, and hardly any work of the host is between its events.
    The list stays empty without a GPU.
    """
    import torch

    return _record_events(lambda: [(torch.cuda.CUDAGraph, "replay")])


@contextmanager
def _record_events(methods: Callable[[], Sequence[tuple[Any, str]]]) -> Iterator[list[tuple[Any, Any]]]:
    """Record an event before and after each call of the methods, classes and names; nothing without a GPU."""
    import torch

    pairs: list[tuple[Any, Any]] = []

    def time_calls(original: Any) -> Any:
        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = original(*arguments, **options)
            end.record()
            pairs.append((start, end))
            return result

        return call

    with ExitStack() as stack:
        for owner, name in methods() if torch.cuda.is_available() else ():
            stack.enter_context(mock.patch.object(owner, name, time_calls(getattr(owner, name))))
        yield pairs


def measure_milliseconds(pairs: Sequence[tuple[Any, Any]]) -> list[float]:
    """Return the GPU time between the events of each pair. Waits for the GPU."""
    if pairs:
        pairs[-1][1].synchronize()
    return [float(start.elapsed_time(end)) for start, end in pairs]


def time_decode_replays(pairs: Sequence[tuple[Any, Any]], steps: int) -> list[float] | None:
    """Return the milliseconds of the last `steps` replays of a generation of `steps` + 2 tokens.

    Before them are the first decode step and, if each prompt is one token, the prefill. Returns None if the
    number of replays does not fit, because then they are not one for each step.
    """
    return measure_milliseconds(pairs[-steps:]) if steps + 1 <= len(pairs) <= steps + 2 else None
