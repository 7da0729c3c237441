"""Router logits of every kind, and the differences that two correct implementations may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch

from moedoctor.reference import routing as reference

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Ties, both zeros, values that differ by less than a softmax score can tell, scores that underflow, the
# ends of float32, NaN and Inf.
_VALUES = (
    *(0.0, -0.0, 1.0, 1.0, 2.0, -3.0, 1e-9, 2e-9, 90.0, -95.0, 200.0, -200.0),
    *(3.4e38, -3.4e38, INF, -INF, NAN),
)

GROUP_EDGES = [
    # Choices that are not finite add nothing to a group's score.
    ([0.0] * 4, [2.0, NAN, 0.0, 0.0], "zero", [0, 1]),
    ([0.0] * 4, [2.0, -INF, 0.0, 0.0], "finite", [0, 1]),
    ([0.0, NAN, 0.0, 0.0], [2.0, 3.0, 0.0, 0.0], "finite", [0, 1]),
    # A group without a finite choice comes last, even behind a sum that overflows.
    ([0.0] * 4, [NAN, INF, -3.0, -3.0], "zero", [2, 3]),
    ([0.0] * 4, [NAN, INF, -3e38, -3e38], "zero", [2, 3]),
    ([NAN, NAN, 0.0, 0.0], [3.0, 3.0, -3.0, -3.0], "finite", [2, 3]),
    # Two such groups tie, whatever the reason.
    ([NAN, NAN, 0.0, 0.0], [0.0, 0.0, NAN, NAN], "finite", [0, 1]),
]
"""Logits of one row, bias, policy, and the ids chosen from the better of two groups (sigmoid)."""


@dataclass(frozen=True)
class Call:
    """One call of a routing function."""

    name: str
    """``topk_softmax``, ``topk_sigmoid`` or ``grouped_topk``."""
    logits: torch.Tensor
    top_k: int
    options: dict[str, Any]
    """Keyword arguments."""

    @property
    def bias(self) -> torch.Tensor | None:
        return self.options.get("bias")

    @classmethod
    def group_edge(cls, row: list[float], bias: list[float], policy: str) -> Call:
        """The call of one of GROUP_EDGES."""
        options = {"num_groups": 2, "topk_groups": 1, "nan_policy": policy, "bias": torch.tensor(bias)}
        return cls("grouped_topk", torch.tensor([row]), 2, options)

    def of(self, module: Any) -> Any:
        """The call's result from `module`, any that has the three functions."""
        return getattr(module, self.name)(self.logits, self.top_k, **self.options)


@st.composite
def logits(draw: st.DrawFn, tokens: int, experts: int) -> torch.Tensor:
    """[tokens, experts] of any floating type: rows of special values, and rows without any."""
    ordinary = st.floats(-20, 20, width=32)
    kinds = st.sampled_from([ordinary, st.sampled_from(_VALUES), ordinary | st.sampled_from(_VALUES)])
    rows = [draw(st.lists(draw(kinds), min_size=experts, max_size=experts)) for _ in range(tokens)]
    return torch.tensor(rows, dtype=torch.float64).view(tokens, experts).to(draw(st.sampled_from(DTYPES)))


@st.composite
def biases(draw: st.DrawFn, experts: int) -> torch.Tensor | None:
    """None, or [experts] float32; one in a few holds numbers that are none."""
    values = st.floats(-2, 2, width=32)
    if draw(st.booleans()):
        values = values | st.sampled_from([NAN, INF, -INF, -0.0, 3e38, -3e38])
    return draw(st.none() | st.lists(values, min_size=experts, max_size=experts).map(torch.tensor))


@st.composite
def calls(draw: st.DrawFn, names: tuple[str, ...] = ("topk_softmax", "topk_sigmoid", "grouped_topk")) -> Call:
    """A valid call of one of the functions."""
    name = draw(st.sampled_from(names))
    groups = draw(st.integers(1, 5)) if name == "grouped_topk" else 1
    size = draw(st.integers(1, 12 // groups))
    experts = groups * size
    options: dict[str, Any] = {
        "bias": draw(biases(experts)),
        "renormalize": draw(st.booleans()),
        "nan_policy": draw(st.sampled_from(["zero", "finite"])),
    }
    reachable = experts
    if name == "grouped_topk":
        best = draw(st.integers(1, groups))
        reachable = best * size
        options |= {"num_groups": groups, "topk_groups": best}
        options |= {"scoring": draw(st.sampled_from(["softmax", "sigmoid"]))}
        options |= {"routed_scaling_factor": draw(st.sampled_from([1.0, 2.5]))}
    x = draw(logits(draw(st.integers(0, 4)), experts))  # [T, E]
    return Call(name, x, draw(st.integers(1, reachable)), options)


def rows_of_every_kind(
    experts: int, dtype: torch.dtype, *, ordinary: int = 20, seed: int = 0
) -> torch.Tensor:
    """[18 + ordinary, experts]: one row of each special kind, then ordinary ones."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(18 + ordinary, experts, generator=draw) * 3
    half = experts // 2
    x[0] = NAN
    x[1, half] = NAN
    x[2, half:] = NAN
    x[3, half] = INF
    x[4, 0], x[4, -1] = INF, NAN
    x[5] = -INF
    x[6, half] = -INF
    x[7, 1:] = -INF
    x[8] = 1.5
    x[9] = 0.0
    x[9, half] = -0.0
    x[10] = x[10].round()  # many ties
    x[11] *= 60  # most scores underflow
    x[12] *= 1e-9  # different logits, equal scores
    x[13, half] = 1000.0
    x[14] = x[14].abs() + 15  # sigmoid scores of 1
    x[15] = NAN
    x[15, -1] = -INF
    x[16] = 0.0
    x[16, 0], x[16, -1] = -0.0, NAN
    x[17, : half - 1], x[17, half - 1], x[17, half:] = -500.0, -INF, 0.0  # ties of scores of 0
    return x.to(dtype)


def assert_well_formed(weights: torch.Tensor, ids: torch.Tensor, call: Call) -> None:
    """Check what holds for every input: shapes, types, distinct ids in range, finite weights."""
    tokens, experts = call.logits.shape
    assert weights.shape == ids.shape == (tokens, call.top_k)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert weights.isfinite().all()
    assert ((ids >= 0) & (ids < experts)).all()
    ordered = ids.sort(dim=-1).values
    assert (ordered[:, 1:] != ordered[:, :-1]).all()


def assert_agrees(weights: torch.Tensor, ids: torch.Tensor, call: Call) -> None:
    """`weights` and `ids` are the reference's, up to the rounding of an exponential.

    Experts may change places only where their choices differ, and by no more than rounding. Equal choices
    of equal logits must go to the lower id, and rows ranked by their logits leave nothing to rounding.
    """
    assert_well_formed(weights, ids, call)
    _, expected = call.of(reference)
    x = call.logits.float()  # [T, E]
    scores = _scores(call)  # [T, E]
    bias = torch.zeros(x.shape[1]) if call.bias is None else call.bias.float()  # [E]
    choice = (scores + bias).nan_to_num(nan=0.0)  # [T, E]

    ours, theirs = ids.long(), expected.long()  # [T, K]
    moved = ours != theirs
    gap = (choice.gather(1, ours) - choice.gather(1, theirs)).abs()
    size = choice.gather(1, theirs).abs() + bias[theirs].abs()
    by_logits = call.options.get("nan_policy") == "finite" and call.bias is None
    exact = (~x.isfinite()).any(dim=-1, keepdim=True) & torch.tensor(by_logits)  # [T, 1]
    same = (x.gather(1, ours) == x.gather(1, theirs)) & (bias[ours] == bias[theirs])
    wrong = moved & (exact | same | (gap > 3e-6 * size + 1e-37))
    assert not wrong.any(), (
        f"rows {wrong.any(dim=-1).nonzero().flatten().tolist()}: {ids[wrong]} for {expected[wrong]}"
    )

    expected_weights = scores.gather(1, ours)  # [T, K]
    if call.options.get("renormalize"):
        total = expected_weights.sum(dim=-1, keepdim=True)
        expected_weights = expected_weights / torch.where(total > 0, total, 1.0)
    expected_weights = expected_weights * call.options.get("routed_scaling_factor", 1.0)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-5, atol=1e-37)


def _scores(call: Call) -> torch.Tensor:
    """The reference's scores [T, E]: all experts routed, put back in place."""
    scoring = call.options.get("scoring") or call.name.removeprefix("topk_")
    function = getattr(reference, f"topk_{scoring}")
    policy = call.options.get("nan_policy", "zero")
    weights, ids = function(call.logits, call.logits.shape[1], nan_policy=policy)
    return torch.zeros_like(weights).scatter(1, ids.long(), weights)
