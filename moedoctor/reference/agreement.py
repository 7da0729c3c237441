"""The distance of a result from the reference: relative errors, and whether outputs and routings agree.

An average over a batch hides one wrong token, and an absolute tolerance passes an output of zeros. So `agree`
checks each token by itself, first of all whether it is finite, and names the worst one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return [T]: ‖actual - expected‖ / ‖expected‖ of each row of [T, H]; Inf if one is not finite."""
    errors = (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)  # [T]
    finite = actual.isfinite().all(1) & expected.isfinite().all(1)  # [T]
    return torch.where(finite, errors, float("inf"))


@dataclass(frozen=True)
class Bounds:
    """The largest distance of a right result from the reference; errors are relative to the token's RMS."""

    cosine: float
    """Least cosine of a token's output and the expected one."""
    norm: float
    """A token's norm may be larger or smaller by this fraction."""
    element: float
    """An element matches if its error is at most this times (RMS of the token + its own size)."""
    matched: float
    """Least fraction of a token's elements that match."""
    worst: float
    """No element may be off by more than this times (RMS of the token + its own size)."""


BOUNDS = {
    "none": Bounds(cosine=0.9998, norm=0.015, element=0.02, matched=0.99, worst=0.08),
    "fp8": Bounds(cosine=0.998, norm=0.03, element=0.1, matched=0.95, worst=0.4),
    "nvfp4": Bounds(cosine=0.995, norm=0.04, element=0.15, matched=0.97, worst=0.6),
}
"""Quantization of activations -> how far a right output may be from the reference."""


def choose_bounds(activations: str) -> Bounds:
    """Return the bounds of a backend that quantizes activations like that (``none``, ``fp8…``, ``nvfp4``).

    Inputs are snapped to the grid, so two differences remain: intermediates are rounded to bfloat16 (2**-9 of
    a value), and a backend that quantizes activations may round in another order than the reference, so that
    values near the edge between two codes get the other code.
    """
    return BOUNDS[activations.partition("_")[0]]


@dataclass(frozen=True)
class Agreement:
    """The worst tokens of one output."""

    tokens: int
    nonfinite_tokens: int
    wrong_tokens: int
    first_nonfinite_token: int | None = None
    cosine: float | None = None
    """The lowest of a token. This and all that follows is None if no token is finite."""
    cosine_token: int | None = None
    norm_ratio: float | None = None
    """The ratio that is furthest from 1."""
    norm_token: int | None = None
    matched: float | None = None
    """The lowest fraction of a token."""
    matched_token: int | None = None
    error: float | None = None
    """The largest, relative to (RMS of the token + its own size)."""
    error_token: int | None = None
    error_element: int | None = None
    got: float | None = None
    """The worst element itself, and what it should be."""
    expected: float | None = None
    reason: str | None = None
    """The first check that failed, in words; None if the output is right."""

    @property
    def right(self) -> bool:
        """Return True if every token passes every check."""
        return self.reason is None

    def to_evidence(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)


def agree(actual: torch.Tensor, expected: torch.Tensor, bounds: Bounds) -> Agreement:
    """Compare `actual` [T, H] with the reference `expected` float32 [T, H].

    Raises ValueError for another shape. A token whose expected output is zero must be zero, and a token whose
    expected output is not finite is wrong. Computes in double: in float32 squares of 1e19 overflow.
    """
    if actual.shape != expected.shape or not len(actual):
        raise ValueError(f"actual: expected {list(expected.shape)} with a token, got {list(actual.shape)}")
    got, want = actual.double(), expected.double()  # [T, H] each
    finite = got.isfinite().all(1)  # [T]
    clean = torch.where(finite[:, None], got, 0.0)  # [T, H]
    size, norm = clean.norm(dim=1), want.norm(dim=1)  # [T] each
    tiny = torch.finfo(torch.float64).tiny
    zeros = (norm == 0) & (size == 0)  # [T]
    cosine = torch.where(zeros, 1.0, (clean * want).sum(1) / (size * norm).clamp(min=tiny))  # [T]
    ratio = torch.where(zeros, 1.0, size / norm.clamp(min=tiny))  # [T]
    allowance = norm[:, None] / want.shape[1] ** 0.5 + want.abs()  # [T, H]
    error = torch.where(clean == want, 0.0, (clean - want).abs() / allowance.clamp(min=tiny))  # [T, H]
    matched = (error <= bounds.element).double().mean(1)  # [T]
    # The conditions are those of a right token, negated, so that a NaN passes nothing.
    close = (cosine >= bounds.cosine) & ((ratio - 1).abs() <= bounds.norm)  # [T]
    wrong = ~(finite & close & (matched >= bounds.matched) & (error.amax(1) <= bounds.worst))  # [T]

    bad = (~finite).nonzero().flatten().tolist()
    if not bool(finite.any()):
        reason = f"every token holds NaN or Inf, the first is token {bad[0]}"
        return Agreement(len(got), len(bad), len(bad), bad[0], reason=reason)
    cosine_token = int(torch.where(finite, cosine, 2.0).argmin())
    norm_token = int(torch.where(finite, (ratio - 1).abs(), -1.0).argmax())
    matched_token = int(torch.where(finite, matched, 2.0).argmin())
    worst = int(torch.where(finite[:, None], error, -1.0).argmax())
    token, element = divmod(worst, got.shape[1])
    agreement = Agreement(
        tokens=len(got),
        nonfinite_tokens=len(bad),
        first_nonfinite_token=bad[0] if bad else None,
        wrong_tokens=int(wrong.sum()),
        cosine=float(cosine[cosine_token]),
        cosine_token=cosine_token,
        norm_ratio=float(ratio[norm_token]),
        norm_token=norm_token,
        matched=float(matched[matched_token]),
        matched_token=matched_token,
        error=float(error[token, element]),
        error_token=token,
        error_element=element,
        got=float(got[token, element]),
        expected=float(want[token, element]),
    )
    return replace(agreement, reason=_explain(agreement, bounds))


def _explain(worst: Agreement, bounds: Bounds) -> str | None:
    assert worst.cosine is not None
    assert worst.norm_ratio is not None
    assert worst.matched is not None
    assert worst.error is not None
    if worst.nonfinite_tokens:
        count = f"{worst.nonfinite_tokens} of {worst.tokens}"
        return f"{count} tokens hold NaN or Inf, the first is token {worst.first_nonfinite_token}"
    if not worst.cosine >= bounds.cosine:
        return f"cosine {worst.cosine:.4f} at token {worst.cosine_token}, expected at least {bounds.cosine:g}"
    if not abs(worst.norm_ratio - 1) <= bounds.norm:
        ratio = f"norm ratio {worst.norm_ratio:.4f} at token {worst.norm_token}"
        return f"{ratio}, expected 1 within {bounds.norm:g}"
    if not worst.matched >= bounds.matched:
        matched = f"{worst.matched:.1%} of the elements match at token {worst.matched_token}"
        return f"{matched}, expected at least {bounds.matched:.1%}"
    if not worst.error <= bounds.worst:
        place = f"token {worst.error_token}, element {worst.error_element}"
        return f"{place}: {worst.got:.4g}, expected {worst.expected:.4g}"
    return None


def find_differing_rows(
    logits: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    expected_ids: torch.Tensor,
    *,
    scoring: str,
    bias: torch.Tensor | None = None,
    renormalize: bool = False,
    atol: float = 1e-5,
) -> torch.Tensor:
    """Return [T] bool: the rows of a routing that differ from the expected one by more than `atol`.

    `logits` [T, E] are finite or -Inf, `ids`, `weights` and `expected_ids` are [T, K]. Ids themselves are
    not compared: two experts may tie within rounding, and the order of a token's experts means nothing to
    the layer. Compared are the choices (score + `bias`) of the chosen experts from the highest down, and each
    weight with the score of its expert. A row with an id out of range differs.
    """
    logits = logits.float()  # [T, E]
    scores = torch.softmax(logits, 1) if scoring == "softmax" else torch.sigmoid(logits)  # [T, E]
    choice = scores if bias is None else scores + bias.float()  # [T, E]
    outside = (ids < 0) | (ids >= logits.shape[1])  # [T, K]
    own = ids.long().masked_fill(outside, 0)  # [T, K]
    score = scores.gather(1, own)  # [T, K]
    if renormalize:
        score = score / score.sum(1, keepdim=True)
    chosen = choice.gather(1, own).sort(dim=1, descending=True).values  # [T, K]
    best = choice.gather(1, expected_ids.long()).sort(dim=1, descending=True).values  # [T, K]
    return (outside | ((chosen - best).abs() > atol) | ~((weights - score).abs() <= atol)).any(1)
