"""How fast an engine decodes, looked at inside it: by the host's clock and by events on the GPU."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Iterator, Sequence
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
    runner, which has no function for that call, from before its inputs are prepared to after the call. It
    stays empty without a GPU.
    """
    import torch

    pairs: list[tuple[Any, Any]] = []
    if not torch.cuda.is_available():
        yield pairs
        return

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
        for module, name in _STEPS_OF_RUNNERS:
            runner = importlib.import_module(module).GPUModelRunner
            original = getattr(runner, name)
            stack.callback(setattr, runner, name, original)
            setattr(runner, name, timed(original))
        yield pairs


def decode_steps(pairs: Sequence[tuple[Any, Any]]) -> list[float]:
    """Return the milliseconds of each step of a generation but the prefill and the first decode step.

    A generation of two tokens has these two, so a longer one takes so much more. Waits for the GPU.
    """
    steps = pairs[2:]
    if steps:
        steps[-1][1].synchronize()
    return [float(start.elapsed_time(end)) for start, end in steps]
