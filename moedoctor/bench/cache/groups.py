"""What computing a call in groups of experts adds, with every expert resident."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moedoctor.bench.cache.decode import Model, host_weights
from moedoctor.bench.cache.speed import spread_of
from moedoctor.bench.timing import Comparison, compare_rounds, compare_times
from moedoctor.fixes.moe.forward import GroupedForward, group_bound, moe_forward

Calls = Mapping[str, Callable[[], torch.Tensor]]
"""What computes one layer, [T, H], by name; ``1`` computes it in one call."""
EAGER = "_eager_wall_clock"
"""Ends the names of figures that hold the host's launches too, which `graph_rounds` leaves out."""
_ROUNDING = 1e-5
_EAGER_CALLS, _EAGER_ROUNDS = 10, 9


@dataclass(frozen=True)
class ResidentLayer:
    """One layer with every expert resident, and the inputs of a call of it."""

    weights: dict[str, torch.Tensor]
    """bfloat16 ``w13`` [slots, 2I, H] and ``w2`` [slots, H, I]"""
    experts: torch.Tensor
    """int32 [slots]: what each slot holds, in random order."""
    ids: torch.Tensor
    """int32 [T, K]"""
    slot_ids: torch.Tensor
    """int32 [T, K]: the slots of `ids`."""
    shares: torch.Tensor
    """float32 [T, K]"""
    x: torch.Tensor
    """bfloat16 [T, H]"""

    @classmethod
    def make(cls, device: str, *, tokens: int, model: Model | None = None) -> ResidentLayer:
        """Random weights, routes and activations; the same ones for the same arguments."""
        model = model or Model(host_layers=1)
        weights = {name: one.to(device) for name, one in host_weights(model, device)[0].items()}
        draw = torch.Generator(device).manual_seed(0)
        experts = torch.randperm(model.experts, generator=draw, device=device).int()  # [slots]
        slot_of = experts.argsort().int()  # [E]
        scores = torch.rand(tokens, model.experts, generator=draw, device=device)  # [T, E]
        ids = scores.topk(model.top_k, dim=1).indices.int()  # [T, K]
        shares = torch.rand(tokens, model.top_k, generator=draw, device=device)  # [T, K]
        x = torch.randn(tokens, model.hidden, generator=draw, device=device).bfloat16()  # [T, H]
        return cls(weights, experts, ids, slot_of[ids.long()], shares, x)


def group_cost(
    device: str,
    *,
    tokens: int = 1024,
    groups: Sequence[int] = (2, 4, 8),
    model: Model | None = None,
    eager: bool = False,
) -> dict[str, Any]:
    """A call in groups against one call, as CUDA-graph replays in turn.

    Slots hold experts in random order; a group is a run of neighbouring slots. A row a number of groups:
    ``overhead`` and ``us`` of groups that are computed as what they are, resident at the same time,
    ``overhead_in_turn`` and ``us_in_turn`` of one after another, and the largest difference from the result
    of one call. With `eager` the same by wall clock of calls without a graph, in columns that end in `EAGER`.
    Raises RuntimeError where results differ by more than the order of addition explains.
    """
    calls, whole, top_k = grouped_calls(device, tokens=tokens, groups=groups, model=model)
    differences = checked_differences(calls, whole, _ROUNDING)
    methods = {"": graph_rounds(calls)} | ({EAGER: eager_rounds(calls)} if eager else {})
    rows = [
        {
            "groups": count,
            **{
                key: value
                for method, times in methods.items()
                for order, name in (("", str(count)), ("_in_turn", _in_turn(count)))
                for key, value in added_columns(times, name, count, order + method).items()
            },
            "largest_difference": max(differences[str(count)], differences[_in_turn(count)]),
        }
        for count in groups
    ]
    return {
        "tokens": tokens,
        **{f"one_call_us{method}": times.times["1"].median for method, times in methods.items()},
        "bound": group_bound(top_k),
        "rows": rows,
    }


def grouped_calls(
    device: str, *, tokens: int, groups: Sequence[int], model: Model | None = None
) -> tuple[dict[str, Callable[[], torch.Tensor]], torch.Tensor, int]:
    """(what computes one layer in as many groups, the result [T, H] of one call, top-k).

    By number of groups, which are computed beside each other; with ``in turn`` after it, one after another.
    """
    layer = ResidentLayer.make(device, tokens=tokens, model=model)
    slots = len(layer.experts)

    def one_call() -> torch.Tensor:
        return moe_forward(layer.x, layer.weights, layer.slot_ids, layer.shares)

    def in_groups(count: int, *, beside: bool) -> Callable[[], torch.Tensor]:
        size = slots // count
        parts = [
            (
                {name: one[start : start + size] for name, one in layer.weights.items()},
                layer.experts[start : start + size],
            )
            for start in range(0, slots, size)
        ]

        def call() -> torch.Tensor:
            forward = GroupedForward(layer.x, layer.ids, layer.shares, slots)
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
    return calls, one_call(), layer.ids.shape[1]


def checked_differences(calls: Calls, whole: torch.Tensor, limit: float) -> dict[str, float]:
    """The largest difference of each call from `whole` [T, H], relative to the largest result.

    Raises RuntimeError where one is above `limit`: what computes something else is not to be timed.
    """
    found = {name: _difference(call(), whole) for name, call in calls.items() if name != "1"}
    for name, difference in found.items():
        if not difference <= limit:
            raise RuntimeError(
                f"groups ({name}) differ from one call by {difference:.1e} of the largest result"
            )
    return found


def graph_rounds(calls: Calls) -> Comparison:
    """GPU microseconds a call, as CUDA-graph replays in turn."""
    return compare_times(calls, baseline="1", launches=4)


def eager_rounds(calls: Calls) -> Comparison:
    """Microseconds a call by the wall clock, launches by the host included, without a graph, in turn."""
    return compare_rounds(
        {name: functools.partial(_wall_us, call) for name, call in calls.items()},
        baseline="1",
        rounds=_EAGER_ROUNDS,
    )


def added_columns(times: Comparison, name: str, groups: int, suffix: str = "") -> dict[str, float]:
    """What `name`, the layer in `groups` groups, takes and adds to one call: columns that end in `suffix`.

    ``overhead`` is a share of one call's time of the same round. ``us_a_further_group`` is what each group
    after the first adds, in microseconds, from the two medians; it does not depend on how long one call is.
    """
    further = (times.times[name].median - times.times["1"].median) / max(groups - 1, 1)
    return {
        **spread_of(f"overhead{suffix}", times.ratios[name], -1.0),
        **spread_of(f"us{suffix}", times.times[name]),
        f"us_a_further_group{suffix}": further,
    }


def _wall_us(call: Callable[[], torch.Tensor]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_EAGER_CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / _EAGER_CALLS * 1e6


def _in_turn(count: int) -> str:
    return f"{count} in turn"


def _difference(result: torch.Tensor, whole: torch.Tensor) -> float:
    return float((result - whole).abs().max() / whole.abs().max())
