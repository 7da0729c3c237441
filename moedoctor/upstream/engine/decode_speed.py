"""How fast an engine decodes, looked at inside it: greedy tokens first, then times at each batch size."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

LOGPROBS = 5


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
