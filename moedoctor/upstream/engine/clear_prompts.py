"""Compares the greedy answers of two engines, on prompts that one of them decides clearly at every step.

Rounding decides between two tokens that are nearly equally likely, so only prompts count whose best token
leads in the reference. Then an engine that computes right has the same tokens, except in the rare step in
which rounding sends a token to another expert.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moedoctor.results import find_worst

CLEAR = 0.5
"""The least lead of the best token's logprob in the reference, at each step of a prompt that counts."""
MIN_CLEAR = 8
"""With fewer clear prompts nothing is compared."""
MIN_SAME = 0.8
"""The least share of clear prompts whose tokens are the reference's. Of random weights with 128 experts a
layer, rounding alone changed the tokens of one clear prompt in seven; wrong experts change nearly all."""
TOKENS, LOGPROBS = 4, 2
"""Tokens of an answer, and how many of the best have their logprob in it."""
_PROMPTS, _MAX_ID = 128, 32_000
_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "A mixture-of-experts layer sends each token to a few of its experts, which are",
    "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) +",
    "Water boils at a lower temperature on a mountain because the pressure of the air is",
    "Once upon a time, in a village by the sea, there lived an old man who",
    "The three primary colors of light are red, green and",
    "To sort a list of numbers quickly, one can split it at a pivot and sort",
    "In 1969, two astronauts walked on the surface of the moon, and a third",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")

Prompt = list[int] | str


@dataclass(frozen=True)
class Answers:
    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[Mapping[str, float]]]
    """For each prompt and step: token id -> logprob, of the `LOGPROBS` best."""


@dataclass(frozen=True)
class Comparison:
    """Two engines on the prompts that the reference decides clearly."""

    clear: int
    same: int
    """The number of clear prompts with the reference's tokens."""
    distance: float | None
    """Median, over the clear prompts, of the largest difference between the logprobs of a prompt."""
    problem: str | None = None
    """The reason why the answers are wrong, or None."""

    @property
    def is_compared(self) -> bool:
        """Return True if there are enough clear prompts to tell."""
        return self.clear >= MIN_CLEAR


def make_prompts(model: Path) -> list[Prompt]:
    """Return the beginnings of texts if the model has a tokenizer, else random token ids of 4 to 9 tokens.

    They are always the same for a model.
    """
    if any((model / name).is_file() for name in _TOKENIZERS):
        words = [text.split() for text in _TEXTS]
        return [" ".join(text[:length]) for text in words for length in range(3, len(text) + 1)]
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size = int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 512)
    draw = random.Random(0)
    return [
        [draw.randrange(3, min(size, _MAX_ID)) for _ in range(draw.randint(4, 9))] for _ in range(_PROMPTS)
    ]


def find_clear(answers: Answers) -> list[int]:
    """Return the prompts whose best token leads by `CLEAR` at every step."""
    ranked = [
        [sorted(map(float, step.values()), reverse=True) for step in steps] for steps in answers.logprobs
    ]
    return [
        prompt
        for prompt, steps in enumerate(ranked)
        if steps and all(len(values) > 1 and values[0] - values[1] >= CLEAR for values in steps)
    ]


def compare(answers: Answers, reference: Answers) -> Comparison:
    """Compare the answers on the reference's clear prompts."""
    clear = find_clear(reference)
    same = sum(list(answers.tokens[prompt]) == list(reference.tokens[prompt]) for prompt in clear)
    apart = [measure_distance(answers.logprobs[prompt], reference.logprobs[prompt]) for prompt in clear]
    problem = None
    if any(
        not math.isfinite(float(value))
        for steps in answers.logprobs
        for step in steps
        for value in step.values()
    ):
        problem = "a logprob is not finite"
    elif len(clear) >= MIN_CLEAR and same < MIN_SAME * len(clear):
        problem = f"{same} of {len(clear)} clear prompts have the tokens of the first engine that answered"
    return Comparison(len(clear), same, statistics.median(apart) if apart else None, problem)


def measure_distance(steps: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]) -> float:
    """Return the largest difference between logprobs of tokens that both report; inf without any."""
    distance = 0.0
    for step, other in zip(steps, others, strict=True):
        pairs = [(float(step[token]), float(other[token])) for token in set(step) & set(other)]
        if not pairs:
            return math.inf
        distance = find_worst(distance, *(abs(left - right) for left, right in pairs if left != right))
    return distance
