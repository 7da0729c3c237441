"""One backend against the reference: poisoned memory, repeated calls, and the negative controls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moedoctor.bench.backends.reference import Reference
from moedoctor.bench.controls import wrong_outputs, wrong_problems
from moedoctor.bench.moe.parity_bounds import bounds_of
from moedoctor.reference.moe_backend import Backend, Prepared
from moedoctor.reference.moe_layer import Problem, expected_output
from moedoctor.reference.token_agreement import Agreement, agree

_POISON = 0xFF
"""A byte that makes NaN of bfloat16, float16, float32 and E4M3."""
_CALLS = 3


@dataclass(frozen=True)
class ParityResult:
    """What a backend's output is worth."""

    agreement: Agreement
    """The worst of the calls."""
    deterministic: bool
    """Whether all calls gave the same bits."""
    missed: tuple[str, ...]
    """Negative controls that the comparison did not notice: a harness that cannot be trusted."""
    controls: dict[str, str | None]
    """Control -> what the comparison said of it."""
    calls: int = _CALLS

    @property
    def right(self) -> bool:
        """Whether the output is right and the harness can be trusted with it."""
        return self.agreement.right and not self.missed

    def evidence(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            **self.agreement.evidence(),
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
    """Compare `backend` on `problem` with the reference, and show that the comparison sees faults.

    `prepared` is the backend's form of the problem's layer and `expected` the reference's float32 [T, H],
    where there is one already. Without `weights` no fault is planted in weights, as each takes a copy.

    Faults are planted in a right computation: the backend's own or, where that is wrong, the reference's.
    Else a backend that swaps gate and up would look like a comparison that does not notice the swap.
    """
    activations = backend.variant.activations
    bounds = bounds_of(activations)
    expected = expected_output(problem, activations) if expected is None else expected  # [T, H]
    prepared = backend.prepare(problem.layer) if prepared is None else prepared
    outputs = [call(prepared, problem) for _ in range(_CALLS)]  # [T, H] each
    agreements = [agree(one, expected, bounds) for one in outputs]
    worst = next((one for one in agreements if not one.right), agreements[0])
    sound, output = backend, outputs[0]
    if not worst.right:
        sound = Reference(backend.variant.quantization, activations)
        prepared, output = sound.prepare(problem.layer), expected.bfloat16()
    said: dict[str, str | None] = {}
    for name, wrong in wrong_problems(problem, weights=weights):
        own = prepared if wrong.layer is problem.layer else sound.prepare(wrong.layer)
        said[name] = agree(call(own, wrong), expected, bounds).reason
    for name, one in wrong_outputs(output).items():
        said[name] = agree(one, expected, bounds).reason
    return ParityResult(
        worst,
        all(torch.equal(outputs[0], one) for one in outputs[1:]),
        tuple(name for name, reason in said.items() if reason is None),
        said,
    )


def call(prepared: Prepared, problem: Problem) -> torch.Tensor:
    """One call whose output, workspace and scratch memory held NaN before. bfloat16 [T, H], a copy."""
    poison(prepared, problem.x)
    return prepared(problem.x, problem.topk_weights, problem.topk_ids).clone()


def poison(prepared: Prepared, like: torch.Tensor) -> None:
    """Fill the backend's workspaces with NaN, and leave NaN in what the allocator hands out next."""
    for buffer in prepared.workspaces():
        buffer.view(torch.uint8).fill_(_POISON)
    sizes = [like.numel() * like.element_size() * factor for factor in (1, 1, 2, 4, 8, 16)]
    for block in [torch.empty(size, dtype=torch.uint8, device=like.device) for size in sizes]:
        block.fill_(_POISON)
