"""Whether the output of a layer agrees with the reference, token by token.

An average over a batch hides one wrong token, and an absolute tolerance passes an output of zeros. So each
check is made for every token by itself, first of all whether it is finite, and names the worst one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Bounds:
    """How far a right result may part from the reference; errors are relative to the token's RMS."""

    cosine: float
    """Least cosine of a token's output and the expected one."""
    norm: float
    """A token's norm may be this share larger or smaller."""
    element: float
    """An element matches where its error is at most this times (RMS of the token + its own size)."""
    matched: float
    """Least share of a token's elements that match."""
    worst: float
    """No element may be off by more than this times (RMS of the token + its own size)."""


@dataclass(frozen=True)
class Agreement:
    """The worst tokens of one output."""

    tokens: int
    nonfinite_tokens: int
    wrong_tokens: int
    first_nonfinite_token: int | None = None
    cosine: float | None = None
    """The lowest of a token; like all that follows None where no token is finite."""
    cosine_token: int | None = None
    norm_ratio: float | None = None
    """The one furthest from 1."""
    norm_token: int | None = None
    matched: float | None = None
    """The lowest share of a token."""
    matched_token: int | None = None
    error: float | None = None
    """The largest, relative to (RMS of the token + its own size)."""
    error_token: int | None = None
    error_element: int | None = None
    got: float | None = None
    """The worst element itself, and what it should be."""
    expected: float | None = None
    reason: str | None = None
    """The first check that failed, in words; None where the output is right."""

    @property
    def right(self) -> bool:
        """Whether every token passes every check."""
        return self.reason is None

    def evidence(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)


def agree(actual: torch.Tensor, expected: torch.Tensor, bounds: Bounds) -> Agreement:
    """Compare `actual` [T, H] with the reference `expected` float32 [T, H].

    Raises ValueError for another shape. A token whose expected output is zero must be zero, and one whose
    expected output is not finite is wrong. All is computed in double: in float32 squares of 1e19 overflow.
    """
    if actual.shape != expected.shape or not len(actual):
        raise ValueError(f"actual: expected {list(expected.shape)} with a token, got {list(actual.shape)}")
    got, want = actual.double(), expected.double()  # [T, H] each
    finite = got.isfinite().all(1)  # [T]
    clean = torch.where(finite[:, None], got, 0.0)  # [T, H]
    size, norm = clean.norm(dim=1), want.norm(dim=1)  # [T] each
    tiny = torch.finfo(torch.float64).tiny
    both_zero = (norm == 0) & (size == 0)  # [T]
    cosine = torch.where(both_zero, 1.0, (clean * want).sum(1) / (size * norm).clamp(min=tiny))  # [T]
    ratio = torch.where(both_zero, 1.0, size / norm.clamp(min=tiny))  # [T]
    allowance = norm[:, None] / want.shape[1] ** 0.5 + want.abs()  # [T, H]
    error = torch.where(clean == want, 0.0, (clean - want).abs() / allowance.clamp(min=tiny))  # [T, H]
    matched = (error <= bounds.element).double().mean(1)  # [T]
    # What is right is asked for and negated, so that a NaN passes nothing.
    close = (cosine >= bounds.cosine) & ((ratio - 1).abs() <= bounds.norm)  # [T]
    wrong = ~(finite & close & (matched >= bounds.matched) & (error.amax(1) <= bounds.worst))  # [T]
    return _describe(got, want, finite, cosine, ratio, matched, error, wrong, bounds)


def _describe(
    got: torch.Tensor,
    want: torch.Tensor,
    finite: torch.Tensor,
    cosine: torch.Tensor,
    ratio: torch.Tensor,
    matched: torch.Tensor,
    error: torch.Tensor,
    wrong: torch.Tensor,
    bounds: Bounds,
) -> Agreement:
    bad = (~finite).nonzero().flatten().tolist()
    if not bool(finite.any()):
        reason = f"every token holds NaN or Inf, the first is token {bad[0]}"
        return Agreement(len(got), len(bad), len(bad), bad[0], reason=reason)
    off = torch.where(finite, (ratio - 1).abs(), -1.0)  # [T]
    tokens = [
        int(torch.where(finite, cosine, 2.0).argmin()),
        int(off.argmax()),
        int(torch.where(finite, matched, 2.0).argmin()),
    ]
    place = int(torch.where(finite[:, None], error, -1.0).argmax())
    token, element = divmod(place, got.shape[1])
    figures = Agreement(
        tokens=len(got),
        nonfinite_tokens=len(bad),
        first_nonfinite_token=bad[0] if bad else None,
        wrong_tokens=int(wrong.sum()),
        cosine=float(cosine[tokens[0]]),
        cosine_token=tokens[0],
        norm_ratio=float(ratio[tokens[1]]),
        norm_token=tokens[1],
        matched=float(matched[tokens[2]]),
        matched_token=tokens[2],
        error=float(error[token, element]),
        error_token=token,
        error_element=element,
        got=float(got[token, element]),
        expected=float(want[token, element]),
    )
    return replace(figures, reason=_reason(figures, bounds))


def _reason(one: Agreement, bounds: Bounds) -> str | None:
    assert one.cosine is not None
    assert one.norm_ratio is not None
    assert one.matched is not None
    assert one.error is not None
    if one.nonfinite_tokens:
        first = one.first_nonfinite_token
        return f"{one.nonfinite_tokens} of {one.tokens} tokens hold NaN or Inf, the first is token {first}"
    if not one.cosine >= bounds.cosine:
        return f"cosine {one.cosine:.4f} at token {one.cosine_token}, expected at least {bounds.cosine:g}"
    if not abs(one.norm_ratio - 1) <= bounds.norm:
        return f"norm ratio {one.norm_ratio:.4f} at token {one.norm_token}, expected 1 within {bounds.norm:g}"
    if not one.matched >= bounds.matched:
        share = f"{one.matched:.1%} of the elements match at token {one.matched_token}"
        return f"{share}, expected at least {bounds.matched:.1%}"
    if not one.error <= bounds.worst:
        where = f"token {one.error_token}, element {one.error_element}"
        return f"{where}: {one.got:.4g}, expected {one.expected:.4g}"
    return None


def relative_errors(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row's difference over the norm of the expected row, [T] of [T, H].

    A row that is not finite has the error infinity.
    """
    errors = (output - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)  # [T]
    return torch.where(output.isfinite().all(1), errors, float("inf"))
