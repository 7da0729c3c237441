"""One backend against the reference: poisoned memory, repeated calls, and the negative controls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moedoctor.bench.moe.controls import list_controls, list_wrong_problems
from moedoctor.bench.moe.own_backends import Reference
from moedoctor.reference.agreement import Agreement, agree, choose_bounds
from moedoctor.reference.moe_backend import Backend, Prepared
from moedoctor.reference.moe_layer import Problem, compute_expected
from moedoctor.trace.wrong_calls import keep_if_wrong

IDS = ("distinct", "duplicates", "empty", "fewer")
"""Kinds of expert ids; see `make_unusual_ids`."""
_POISON = 0xFF
"""A byte that makes NaN of bfloat16, float16, float32 and E4M3."""
_CALLS = 3


@dataclass(frozen=True)
class ParityResult:
    """The comparison of a backend's output with the reference."""

    agreement: Agreement
    """The worst of the calls."""
    deterministic: bool
    """True if all calls gave the same bits."""
    missed: tuple[str, ...]
    """Negative controls that the comparison did not notice: a harness that cannot be trusted."""
    controls: dict[str, str | None]
    """Control -> the first check that failed, in words, or None."""
    calls: int = _CALLS

    @property
    def right(self) -> bool:
        """True if the output is right and the harness can be trusted with it."""
        return self.agreement.right and not self.missed

    def to_evidence(self) -> dict[str, Any]:
        return {
            **self.agreement.to_evidence(),
            "deterministic": self.deterministic,
            "calls": self.calls,
            "controls": dict(self.controls),
            "controls_missed": list(self.missed),
        }


def check_parity(
    backend: Backend,
    problem: Problem,
    prepared: Prepared | None = None,
    *,
    weights: bool = True,
    expected: torch.Tensor | None = None,
) -> ParityResult:
    """Compare `backend` on `problem` with the reference, and show that the comparison notices faults.

    `prepared` is the backend's form of the problem's layer and `expected` the reference's float32 [T, H], if
    the caller has them already. `weights=False` plants no fault in weights, as each takes a copy.

    Faults are planted in a right computation: the backend's own or, if that is wrong, the reference's.
    Otherwise a backend that swaps gate and up would look like a comparison that does not notice the swap.
    """
    activations = backend.variant.activations
    bounds = choose_bounds(activations)
    prepared = backend.prepare(problem.layer) if prepared is None else prepared
    outputs = [call(prepared, problem) for _ in range(_CALLS)]  # [T, H] each
    expected = expect(problem, activations, outputs[0]) if expected is None else expected  # [T, H]
    agreements = [agree(output, expected, bounds) for output in outputs]
    worst = next((agreement for agreement in agreements if not agreement.right), agreements[0])
    keep_if_wrong(problem, outputs[agreements.index(worst)], worst, activations, backend.variant.label)
    sound, right_output = backend, outputs[0]
    if not worst.right:
        sound = Reference(backend.variant.quantization, activations)
        prepared, right_output = sound.prepare(problem.layer), expected.bfloat16()
    reasons: dict[str, str | None] = {}
    for name, wrong in list_wrong_problems(problem, weights=weights):
        own = prepared if wrong.layer is problem.layer else sound.prepare(wrong.layer)
        reasons[name] = agree(call(own, wrong), expected, bounds).reason
    for control in list_controls():
        if control.on_output is not None:
            reasons[control.name] = agree(control.on_output(right_output), expected, bounds).reason
    return ParityResult(
        worst,
        all(torch.equal(outputs[0], output) for output in outputs[1:]),
        tuple(name for name, reason in reasons.items() if reason is None),
        reasons,
    )


def expect(problem: Problem, activations: str, output: torch.Tensor) -> torch.Tensor:
    """Return the reference's float32 [T, H], rounded as `output` [T, H] if that is not right otherwise."""
    expected = compute_expected(problem, activations)
    if agree(output, expected, choose_bounds(activations)).right:
        return expected
    return compute_expected(problem, activations, output)


def call(prepared: Prepared, problem: Problem) -> torch.Tensor:
    """Call once with NaN in the output, workspace and scratch memory. Return a copy, bfloat16 [T, H]."""
    poison(prepared, problem.x)
    return prepared(problem.x, problem.topk_weights, problem.topk_ids).clone()


def poison(prepared: Prepared, like: torch.Tensor) -> None:
    """Fill the backend's workspaces with NaN, and leave NaN in the memory that the allocator returns next."""
    for buffer in prepared.list_workspaces():
        buffer.view(torch.uint8).fill_(_POISON)
    sizes = [like.numel() * like.element_size() * factor for factor in (1, 1, 2, 4, 8, 16)]
    for block in [torch.empty(size, dtype=torch.uint8, device=like.device) for size in sizes]:
        block.fill_(_POISON)


def make_unusual_ids(topk_ids: torch.Tensor, kind: str) -> torch.Tensor:
    """Return `topk_ids` [T, K] with ids that a router rarely gives.

    ``duplicates``: every second token has the same expert in its first two lanes. ``empty``: a third of the
    tokens have -1 everywhere and another third one expert fewer; the first and the last token keep theirs,
    because planted faults change those. ``fewer``: all of these tokens have one expert fewer. ``distinct``:
    nothing changes. Raises ValueError for another kind, and for duplicates with a top_k of 1.
    """
    if kind not in IDS:
        raise ValueError(f"ids: expected {', '.join(IDS)}, got {kind!r}")
    ids = topk_ids.clone()  # [T, K]
    if kind == "duplicates":
        if ids.shape[1] < 2:
            raise ValueError("ids: duplicates need a top_k of at least 2")
        ids[::2, 1] = ids[::2, 0]
    elif kind in ("empty", "fewer"):
        inside = ids[1:-1]  # [T - 2, K], a view
        inside[::3, 0 if kind == "empty" else -1 :] = -1
        inside[1::3, -1] = -1
    return ids
