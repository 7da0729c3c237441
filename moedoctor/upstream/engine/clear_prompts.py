"""Engines compared on those of many random prompts that the float32 reference decides clearly at every step.

No prompts need to be chosen by hand, and rounding does not decide a token, unless it chooses another expert.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moedoctor.upstream.engine.engine import EngineResult
from moedoctor.upstream.engine.experiment import Ran, logprob_distance, short_error
from moedoctor.upstream.engine.moe_layers import uncomputed

CLEAR = 0.5
"""The least lead of the best token's logprob in the reference engine, at each step of a compared prompt."""
PROMPTS, TOKENS, LOGPROBS = 128, 4, 2
ARGUMENTS: Mapping[str, Any] = {"max_num_seqs": 16, "enable_prefix_caching": False}
"""What engines that answer `prompts` are started with."""


def prompts() -> list[list[int]]:
    """Return random prompts of 4 to 9 tokens, always the same."""
    draw = random.Random(0)
    return [[draw.randrange(3, 512) for _ in range(draw.randint(4, 9))] for _ in range(PROMPTS)]


def clear(reference: EngineResult) -> list[int]:
    """Return the prompts whose best token leads by `CLEAR` at every step of the reference engine."""
    decided = []
    for prompt, steps in enumerate(reference.logprobs or ()):
        ranked = [sorted(map(float, step.values()), reverse=True) for step in steps]
        if ranked and all(len(values) > 1 and values[0] - values[1] >= CLEAR for values in ranked):
            decided.append(prompt)
    return decided


def row(ran: Ran) -> dict[str, Any]:
    """Return what became of an engine whose MoE layers moedoctor may compute, and how it compares."""
    result = ran.result
    probe = result.probe or {}
    figures: dict[str, Any] = {
        **ran.trial.columns,
        "backend": result.log.moe_backend or "not logged",
        "version": result.version,
        "layers": probe.get("layers"),
        "layers_by_moedoctor": probe.get("ours"),
        "seconds": result.seconds.get("total"),
    }
    return {**figures, **compare(ran, uncomputed(ran))}


def compare(ran: Ran, reason: str | None = None) -> dict[str, Any]:
    """Return how many of the reference's clear prompts have its tokens. `reason`: why this is no comparison.

    ``logprob_distance`` is the median over the clear prompts of the largest difference in a prompt, and
    ``same_logprobs`` how many prompts have none.
    """
    result, control = ran.result, ran.control
    if result.error is not None:
        reason = short_error(result.error)
    if reason is None and control is not None and control.error is not None:
        reason = f"no reference: {short_error(control.error)}"
    if reason is not None:
        return {"outcome": "not compared", "detail": reason}
    reference = result if control is None else control
    compared = clear(reference)
    same = [prompt for prompt in compared if result.tokens[prompt] == reference.tokens[prompt]]
    apart = [logprob_distance(_only(result, prompt), _only(reference, prompt)) for prompt in compared]
    outcome = "same tokens" if len(same) == len(compared) else "other tokens"
    return {
        "outcome": "control" if control is None else outcome,
        "detail": f"{len(same)} of {len(compared)} clear prompts",
        "clear_prompts": len(compared),
        "same_prompts": len(same),
        "logprob_distance": statistics.median(apart) if apart else None,
        "same_logprobs": apart.count(0.0),
    }


def _only(result: EngineResult, prompt: int) -> EngineResult:
    return replace(result, logprobs=None if result.logprobs is None else (result.logprobs[prompt],))
