"""The router logits of MD001: rows of every kind that a router has been seen to meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CLEAN, ALL_NAN, ONE_NAN, HALF_NAN = "clean", "all_nan", "one_nan", "half_nan"
POS_INF, NEG_INF, ALL_EQUAL, ALL_NEG_INF = "pos_inf", "neg_inf", "all_equal", "all_neg_inf"

KINDS = (CLEAN, ALL_NAN, ONE_NAN, HALF_NAN, POS_INF, NEG_INF, ALL_EQUAL, ALL_NEG_INF)
NAN_KINDS = (ALL_NAN, ONE_NAN, HALF_NAN)
WELL_DEFINED_KINDS = (CLEAN, NEG_INF, ALL_EQUAL)
"""Rows whose softmax is finite: every implementation must agree on them."""


@dataclass(frozen=True)
class Rows:
    """Router logits and what was done to each row."""

    logits: torch.Tensor
    """[T, E]"""
    kinds: tuple[str, ...]
    """Kind of each of the T rows; every other row is clean, the rest take turns."""
    bias: torch.Tensor | None
    """[E] float32, for the choice only."""

    def mask(self, kinds: tuple[str, ...]) -> torch.Tensor:
        """[T] bool: the rows of these kinds."""
        return torch.tensor([kind in kinds for kind in self.kinds], device=self.logits.device)


def make_rows(tokens: int, experts: int, *, dtype: torch.dtype, bias: str, seed: int, device: str) -> Rows:
    """`tokens` rows of `experts` logits; drawn on the CPU, so a seed gives the same rows everywhere."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=draw) * 2  # [T, E]
    place = torch.randint(experts, (tokens,), generator=draw)  # [T]
    others = KINDS[1:]
    kinds = tuple(CLEAN if row % 2 == 0 else others[row // 2 % len(others)] for row in range(tokens))
    for row, kind in enumerate(kinds):
        at = int(place[row])
        if kind == ALL_NAN:
            logits[row] = float("nan")
        elif kind == ONE_NAN:
            logits[row, at] = float("nan")
        elif kind == HALF_NAN:
            logits[row, torch.randperm(experts, generator=draw)[: experts // 2]] = float("nan")
        elif kind == POS_INF:
            logits[row, at] = float("inf")
        elif kind == NEG_INF:
            logits[row, at] = float("-inf")
        elif kind == ALL_EQUAL:
            logits[row] = logits[row, at].clone()
        elif kind == ALL_NEG_INF:
            logits[row] = float("-inf")
    return Rows(logits.to(device, dtype), kinds, _bias(bias, experts, draw, device))


def _bias(kind: str, experts: int, draw: torch.Generator, device: str) -> torch.Tensor | None:
    if kind == "none":
        return None
    values = torch.rand(experts, generator=draw) - 0.5  # [E], in [-0.5, 0.5)
    if kind == "negative":
        values = values - 3.0  # every choice below -1
    return values.to(device)
