"""One examination for everybody's routers, MoE kernels, expert caches and offloaders.

    from moedoctor.testing import check_router
    print(check_router("my_kernels.routing:topk_softmax"))

Each question runs in a child process, with a fixed seed. An implementation may declare its options with
`declare`; `moedoctor.testing.adapters` has examples. No function here raises for
a wrong answer: `ConformReport.failed` lists them, each with a line that repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict, Unpack

from moedoctor.testing.examine import TargetError, examine
from moedoctor.testing.questions import (
    Answer,
    ConformReport,
    Question,
    Sizes,
    Verdict,
    declare,
    load_questions,
)

__all__ = [
    "Answer",
    "ConformReport",
    "Question",
    "TargetError",
    "Verdict",
    "check_expert_cache",
    "check_moe",
    "check_offloader",
    "check_router",
    "declare",
    "load_questions",
]

Target = str | Callable[..., Any]
"""A function or class at the top level of a module, or ``package.module:name`` or ``file.py:name``."""


class How(TypedDict, total=False):
    """The arguments that all checks share."""

    device: str
    """``cpu`` (default) or ``cuda:0``."""
    only: Sequence[str]
    """Names of questions; by default all of them."""
    sizes: Sizes
    """Replace the sizes of the questions: ``{"tokens": 1, "experts": 8, "top_k": 2}``."""
    seed: int
    """0 by default."""
    seconds: float
    """A problem that takes longer is a crash; 60 by default."""


def check_router(
    fn: Target, *, scoring: str | None = None, renormalize: bool | None = None, **how: Unpack[How]
) -> ConformReport:
    """Ask a router: ``fn(logits [T, E], top_k) -> (weights [T, K], ids [T, K])``.

    `scoring`: ``softmax`` (default) or ``sigmoid``, as `fn` computes. `renormalize`: True if `fn` always
    divides a row's weights by their sum. If `fn` has the parameters ``renormalize``, ``bias`` [E], or
    ``num_groups`` and ``topk_groups``, it is asked about these as well. A bias that has no default is zeros
    unless a question sets it, and with a bias the score of a group is the sum of its two best. `how` is in
    `How`. Raises TargetError, and ValueError for a function that a child cannot import.
    """
    return examine(fn, "router", {"scoring": scoring, "renormalize": renormalize}, **how)


def check_moe(
    fn: Target,
    *,
    formats: Sequence[str] | None = None,
    activations: Sequence[str] | None = None,
    gate: str | None = None,
    block_scales: str | None = None,
    inputs: str | Mapping[str, str] | None = None,
    **how: Unpack[How],
) -> ConformReport:
    """Ask a MoE kernel: ``fn(hidden_states, w13, w2, topk_weights, topk_ids, scales) -> [T, H]``.

    `hidden_states` bfloat16 [T, H], `topk_weights` float32 [T, K], `topk_ids` int32 [T, K]. `formats` of the
    weights, by default all five: ``bf16`` (w13 [E, 2I, H], w2 [E, H, I], no scales), ``fp8`` (scales ``w13``
    and ``w2`` [E]), ``fp8-block`` (a scale for 128 x 128 weights), ``nvfp4`` and ``mxfp4`` (two codes a byte;
    scales ``w13`` and ``w2`` of 16 or 32 values, for nvfp4 also ``w13_global`` and ``w2_global`` [E]).
    `activations`: ``silu`` (default), ``gelu``, ``gelu_tanh``, ``relu2``; another than the first needs a
    parameter ``activation``. The layout: `gate` ``first`` (default), ``last`` or ``interleaved``, and
    `block_scales` ``linear`` (default) or ``swizzled`` in tiles of 128x4. `inputs`: the format to which `fn`
    rounds activations: ``none`` (default), ``fp8_token`` or ``fp8_block``, or ``fp8`` and ``nvfp4`` with
    scales ``w13_input`` and ``w2_input``; or one for each format. Errors as `check_router`.
    """
    options: dict[str, Any] = {"formats": formats, "activations": activations, "gate": gate}
    options |= {"block_scales": block_scales, "inputs": inputs}
    return examine(fn, "moe", options, **how)


def check_expert_cache(make: Target, *, dtype: str | None = None, **how: Unpack[How]) -> ConformReport:
    """Ask an expert cache: ``make(weights, capacity)`` with host tensors ``w13`` [E, 2I, H] and ``w2``.

    It returns an object with ``acquire(topk_ids)`` or ``prepare(topk_ids)``. Either returns (weights, slots)
    or an object with ``weights`` and ``slot_ids``: tensors [capacity, ...] by the names of `weights`, and the
    slot of each id [T, K]. A layer is computed with them, so that a wrong slot is a wrong number. `make` gets
    the device if it has a parameter ``device``; `dtype` of the weights is ``float32`` by default. An object
    with ``groups(topk_ids)`` is asked to compute calls that do not fit. Errors as `check_router`.
    """
    return examine(make, "cache", {"dtype": dtype}, **how)


def check_offloader(make: Target, **how: Unpack[How]) -> ConformReport:
    """Ask an offloader: ``make(module, budget_bytes)`` moves weights of `module` to the host, in place.

    Its outputs must stay the same bit for bit. Errors as `check_router`.
    """
    return examine(make, "offloader", **how)
