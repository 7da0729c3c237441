"""How fast an engine decodes, looked at inside it: by the host's clock and by events on the GPU."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

LOGPROBS = 5
_STEPS_OF_RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "_model_forward"),
    ("vllm.v1.worker.gpu.model_runner", "execute_model"),
)
"""The V1 and the V2 model runner, of which an engine has one: its module, and the function of a step."""


def decode_speed(
    llm: Any,
    *,
    prompts: Sequence[Sequence[int] | str],
    batches: Sequence[int],
    tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Probe: return the greedy tokens and the times of each batch size.

    A row holds ``tokens`` and ``logprobs`` of the warm-up for each prompt; for each repeat ``first_s`` and
    ``whole_s``, the seconds until one token and until all; ``decoded``, the number of tokens between; and
    ``repeatable``, whether every repeat gave the tokens of the warm-up.
    """
    rows = []
    for batch in batches:
        chosen = [prompts[index % len(prompts)] for index in range(batch)]
        _, outputs = generate(llm, chosen, tokens, logprobs=LOGPROBS)
        expected = [list(output.token_ids) for output in outputs]
        logprobs = [
            [{str(token): float(at.logprob) for token, at in step.items()} for step in output.logprobs]
            for output in outputs
        ]
        first, whole, repeatable = [], [], True
        for _ in range(repeats):
            first.append(generate(llm, chosen, 1)[0])
            seconds, outputs = generate(llm, chosen, tokens)
            whole.append(seconds)
            repeatable &= [list(output.token_ids) for output in outputs] == expected
        rows.append(
            {
                "batch": batch,
                "tokens": expected,
                "logprobs": logprobs,
                "decoded": sum(len(ids) for ids in expected) - batch,
                "first_s": first,
                "whole_s": whole,
                "repeatable": repeatable,
            }
        )
    return rows


def generate(
    llm: Any, prompts: Sequence[Sequence[int] | str], tokens: int, *, logprobs: int | None = None
) -> tuple[float, list[Any]]:
    """Generate greedily; return the seconds and the answer to each prompt."""
    vllm: Any = importlib.import_module("vllm")
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    given = [prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)} for prompt in prompts]
    started = time.perf_counter()
    outputs = llm.generate(given, sampling, use_tqdm=False)
    return time.perf_counter() - started, [output.outputs[0] for output in outputs]


@contextmanager
def step_events() -> Iterator[list[tuple[Any, Any]]]:
    """Time the steps of the vLLM in this process, including what a trace launches.

    The list gets a pair of events for each step: from before and after the model's call, or with the V2 model
    runner, which has no function for that call, from before its inputs are prepared to after the call. So
    that runner's times hold work of the host. The list stays empty without a GPU.
    """

    def runners() -> list[tuple[Any, str]]:
        return [(importlib.import_module(module).GPUModelRunner, name) for module, name in _STEPS_OF_RUNNERS]

    with _events(runners) as pairs:
        yield pairs


@contextmanager
def graph_events() -> Iterator[list[tuple[Any, Any]]]:
    """Time the replays of CUDA graphs in this process, from before to after each.

    Of full graphs there is one for each decode step, and hardly any work of the host is between its events.
    The list stays empty without a GPU.
    """
    import torch

    with _events(lambda: [(torch.cuda.CUDAGraph, "replay")]) as pairs:
        yield pairs


@contextmanager
def _events(methods: Callable[[], Sequence[tuple[Any, str]]]) -> Iterator[list[tuple[Any, Any]]]:
    """Record an event before and after each call of the methods, classes and names; nothing without a GPU."""
    import torch

    pairs: list[tuple[Any, Any]] = []

    def timed(original: Any) -> Any:
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
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, timed(original))
        yield pairs


def milliseconds(pairs: Sequence[tuple[Any, Any]]) -> list[float]:
    """Return the GPU time between the events of each pair. Waits for the GPU."""
    if pairs:
        pairs[-1][1].synchronize()
    return [float(start.elapsed_time(end)) for start, end in pairs]


def decode_replays(pairs: Sequence[tuple[Any, Any]], steps: int) -> list[float] | None:
    """Return the milliseconds of the last `steps` replays of a generation of `steps` + 2 tokens.

    Before them are the first decode step and, if each prompt is one token, the prefill. Returns None if the
    number of replays does not fit, because then they are not one for each step.
    """
    return milliseconds(pairs[-steps:]) if steps + 1 <= len(pairs) <= steps + 2 else None
