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
    ``overhead`` and ``us`` of groups that are computed as what they are, resident at the same time,
    ``overhead_in_turn`` and ``us_in_turn`` of one after another, and the largest difference from the result
    of one call. Raises RuntimeError where they differ by more than the order of addition explains.
    """
    calls, whole, top_k = grouped_calls(device, tokens=tokens, groups=groups, model=model)
    differences = {name: _difference(call(), whole) for name, call in calls.items() if name != "1"}
    for name, difference in differences.items():
        if not difference <= _ROUNDING:
            raise RuntimeError(
                f"groups ({name}) differ from one call by {difference:.1e} of the largest result"
            )
    times = compare_times(calls, baseline="1", launches=4)
    rows = [
        {
            "groups": count,
            **spread_of("overhead", times.ratios[str(count)], -1.0),
            **spread_of("us", times.times[str(count)]),
            **spread_of("overhead_in_turn", times.ratios[_in_turn(count)], -1.0),
            **spread_of("us_in_turn", times.times[_in_turn(count)]),
            "largest_difference": max(differences[str(count)], differences[_in_turn(count)]),
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
    """(what computes one layer in as many groups, the result [T, H] of one call, top-k).

    By number of groups, which are computed beside each other; with ``in turn`` after it, one after another.
    """
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

    def in_groups(count: int, *, beside: bool) -> Callable[[], torch.Tensor]:
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
            if beside:
                forward.add_resident(parts)
            else:
                for part, held in parts:
                    forward.add(part, held)
            return forward.total()

        return call

    calls = {"1": one_call}
    for count in groups:
        calls |= {str(count): in_groups(count, beside=True), _in_turn(count): in_groups(count, beside=False)}
    return calls, one_call(), model.top_k


def _in_turn(count: int) -> str:
    return f"{count} in turn"


def _difference(result: torch.Tensor, whole: torch.Tensor) -> float:
    return float((result - whole).abs().max() / whole.abs().max())
