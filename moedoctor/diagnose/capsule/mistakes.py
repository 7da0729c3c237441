"""The mistakes that a MoE kernel is known to make, as ways in which the steps of a layer go wrong.

A layer is computed in the steps of `STEPS`. A wrong output is explained by a `Deviation`: the steps that went
wrong, and how. So two mistakes at once need no words of their own. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

STEPS = ("input", "w13", "activation", "middle", "w2", "sum")
"""Quantize the input, multiply by w13, activate, quantize again, multiply by w2, add up a token's experts."""
RIGHT = "right"


@dataclass(frozen=True)
class Mistake:
    name: str
    steps: tuple[str, ...]
    """The steps that go wrong; in one of them, or in all at once."""
    words: str
    """The behavior of a kernel with it, to follow "the output is that of …"."""
    entry: str | None = None
    """The known failure that it belongs to."""


MISTAKES = (
    Mistake("gate_up_swapped", ("w13",), "the gate and up halves of w13 swapped", "MD017"),
    Mistake("gate_up_interleaved", ("w13",), "rows of gate and up read in turn, stored as halves", "MD017"),
    Mistake("global_scale_inverted", ("w13", "w2"), "the reciprocal of the global scale"),
    Mistake("global_scale_missing", ("w13", "w2"), "no global scale"),
    Mistake("w1_w3_scales_exchanged", ("w13",), "the global scales of w1 and w3 exchanged", "MD014"),
    Mistake("w1_scale_for_w3", ("w13",), "the global scale of w1 for w3 too", "MD014"),
    Mistake("linear_for_swizzled", ("w13", "w2"), "linear block scales read as swizzled", "MD018"),
    Mistake("swizzled_for_linear", ("w13", "w2"), "swizzled block scales read as linear", "MD018"),
    Mistake("group_size_doubled", ("w13", "w2"), "block scales read in groups twice as wide"),
    Mistake("block_scales_transposed", ("w13", "w2"), "rows and columns of the block scales exchanged"),
    Mistake("nibbles_swapped", ("w13", "w2"), "the two values of a byte swapped"),
    Mistake("halves_transposed", ("w13", "w2"), "the two halves of the columns exchanged"),
    Mistake("activation_is_silu", ("activation",), "SiLU as the activation"),
    Mistake("activation_is_gelu_tanh", ("activation",), "GELU as the activation"),
    Mistake("activation_is_relu", ("activation",), "ReLU as the activation"),
    Mistake("activation_missing", ("activation",), "no activation"),
    Mistake("activation_clamped", ("activation",), "an activation that is clamped at 7"),
    Mistake("activations_not_quantized", ("input", "middle"), "activations that are not quantized"),
    Mistake(
        "activation_scale_twice", ("input", "middle"), "the scale of the activations applied twice", "MD015"
    ),
    Mistake("activations_quantized_twice", ("input", "middle"), "activations that are quantized twice"),
    Mistake("expert_dropped", ("sum",), "experts left out"),
    Mistake("expert_off_by_one", ("sum",), "the next expert in place of the one that was chosen"),
    Mistake("duplicate_summed_once", ("sum",), "an expert that a token has twice, added once", "MD011"),
    Mistake("sentinel_as_last_expert", ("sum",), "ids of -1 taken for the last expert", "MD016"),
    Mistake("weights_not_applied", ("sum",), "router weights that are not applied"),
    Mistake("weights_applied_twice", ("sum",), "router weights applied twice"),
)
BY_NAME: Mapping[str, Mistake] = {mistake.name: mistake for mistake in MISTAKES}

Deviation = tuple[tuple[str, str], ...]
"""(step, option) of each step that goes wrong, in the order of `STEPS`; empty for the right computation."""


def list_deviations(mistake: Mistake) -> Iterator[Deviation]:
    """Yield the ways in which it can happen: in each of its steps alone, then in all of them."""
    for step in mistake.steps:
        yield ((step, mistake.name),)
    if len(mistake.steps) > 1:
        yield tuple((step, mistake.name) for step in mistake.steps)


def join(first: Deviation, second: Deviation) -> Deviation | None:
    """Return both at once, or None if they are about the same step."""
    steps = dict(first) | dict(second)
    if len(steps) < len(first) + len(second):
        return None
    return tuple((step, steps[step]) for step in STEPS if step in steps)


def name_mistakes(deviation: Deviation) -> tuple[str, ...]:
    return tuple(dict.fromkeys(option for _, option in deviation))


def list_pairs(deviations: Sequence[Deviation]) -> Iterator[Deviation]:
    """Yield each two of the deviations at once, where they are about different steps and mistakes."""
    for first, second in combinations(deviations, 2):
        combined = join(first, second)
        if combined is not None and not set(name_mistakes(first)) & set(name_mistakes(second)):
            yield combined
