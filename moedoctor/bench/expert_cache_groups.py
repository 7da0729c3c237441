"""What computing a call in groups of experts adds, with every expert resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moedoctor.bench.expert_cache import spread_of
from moedoctor.bench.expert_cache_decode import Model, host_weights
from moedoctor.bench.timing import compare_times
from moedoctor.fixes.moe_forward import group_bound, moe_forward
from moedoctor.fixes.moe_groups import GroupedForward

_ROUNDING = 1e-5


def group_cost(
    device: str, *, tokens: int = 1024, groups: Sequence[int] = (2, 4, 8), model: Model | None = None
) -> dict[str, Any]:
    """A call in groups against one call, as CUDA-graph replays in turn.

    Slots hold experts in random order; a group is a run of neighbouring slots. A row a number of groups:
    ``overhead``, ``us``, and the largest difference of the two results. Raises RuntimeError where they differ
    by more than the order of addition explains.
    """
    calls, whole, top_k = grouped_calls(device, tokens=tokens, groups=groups, model=model)
    differences = {count: _difference(calls[str(count)](), whole) for count in groups}
    for count, difference in differences.items():
        if not difference <= _ROUNDING:
            raise RuntimeError(
                f"{count} groups differ from one call by {difference:.1e} of the largest result"
            )
    times = compare_times(calls, baseline="1", launches=4)
    rows = [
        {
            "groups": count,
            **spread_of("overhead", times.ratios[str(count)], -1.0),
            **spread_of("us", times.times[str(count)]),
            "largest_difference": differences[count],
        }
        for count in groups
    ]
    return {
        "tokens": tokens,
        "one_call_us": times.times["1"].median,
        "bound": group_bound(top_k),
        "rows": rows,
    }


def grouped_calls(
    device: str, *, tokens: int, groups: Sequence[int], model: Model | None = None
) -> tuple[dict[str, Callable[[], torch.Tensor]], torch.Tensor, int]:
    """(what computes one layer in as many groups, the result [T, H] of one call, top-k)."""
    model = model or Model(host_layers=1)
    weights = {name: one.to(device) for name, one in host_weights(model, device)[0].items()}
    draw = torch.Generator(device).manual_seed(0)
    experts = torch.randperm(model.experts, generator=draw, device=device).int()  # [slots]
    slot_of = experts.argsort().int()  # [E]
    scores = torch.rand(tokens, model.experts, generator=draw, device=device)  # [T, E]
    ids = scores.topk(model.top_k, dim=1).indices.int()  # [T, K]
    slot_ids = slot_of[ids.long()]  # [T, K]
    shares = torch.rand(tokens, model.top_k, generator=draw, device=device)  # [T, K]
    x = torch.randn(tokens, model.hidden, generator=draw, device=device).bfloat16()  # [T, H]

    def one_call() -> torch.Tensor:
        return moe_forward(x, weights, slot_ids, shares)

    def in_groups(count: int) -> Callable[[], torch.Tensor]:
        size = model.experts // count
        parts = [
            (
                {name: one[start : start + size] for name, one in weights.items()},
                experts[start : start + size],
            )
            for start in range(0, model.experts, size)
        ]

        def call() -> torch.Tensor:
            forward = GroupedForward(x, ids, shares, model.experts)
            for part, held in parts:
                forward.add(part, held)
            return forward.total()

        return call

    return {"1": one_call, **{str(count): in_groups(count) for count in groups}}, one_call(), model.top_k


def _difference(result: torch.Tensor, whole: torch.Tensor) -> float:
    return float((result - whole).abs().max() / whole.abs().max())
