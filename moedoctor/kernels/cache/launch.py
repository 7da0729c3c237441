"""Launches the expert cache's lookup on state that is allocated once."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton

from moedoctor.kernels.cache.lookup import group_kernel, lookup_kernel

MOST_EXPERTS = 1024
"""What one program ranks."""
_FEW = 64
"""Ids that are compared with every expert in registers."""
_TOGETHER = 128
"""Experts ranked against each other at once."""


def interprets() -> bool:
    """Whether Triton runs kernels in its interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@dataclass(frozen=True)
class LookupState:
    """Everything `lookup_kernel` reads and writes, at fixed addresses."""

    policy: str
    slot_of: torch.Tensor
    """int32 [E]"""
    expert_of: torch.Tensor
    """int32 [capacity]"""
    uses: torch.Tensor
    """int64 [E]"""
    last: torch.Tensor
    """int64 [E]"""
    loaded: torch.Tensor
    """int64 [E]"""
    clock: torch.Tensor
    """int64 [1]"""
    counts: torch.Tensor
    """int64 [4]: calls, hits, misses, prefetched"""
    group_of: torch.Tensor
    """int32 [E]"""
    group_experts: torch.Tensor
    """int32 [capacity]: the expert of the last group that each slot holds, or -1"""
    copies: torch.Tensor
    """int32 [1 + 2 * capacity]: how many, experts, slots"""
    stamp: torch.Tensor
    """int64 [E + 1]"""
    scratch: torch.Tensor
    """int32 [capacity]"""
    keys: torch.Tensor
    """int64 [2 * lanes]"""

    @classmethod
    def empty(cls, num_experts: int, capacity: int, policy: str, device: torch.device) -> LookupState:
        def filled(size: int, value: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        return cls(
            policy,
            slot_of=filled(num_experts, -1, torch.int32),
            expert_of=filled(capacity, -1, torch.int32),
            uses=filled(num_experts, 0, torch.int64),
            last=filled(num_experts, 0, torch.int64),
            loaded=filled(num_experts, 0, torch.int64),
            clock=filled(1, 0, torch.int64),
            counts=filled(4, 0, torch.int64),
            group_of=filled(num_experts, -1, torch.int32),
            group_experts=filled(capacity, -1, torch.int32),
            copies=filled(1 + 2 * capacity, 0, torch.int32),
            stamp=filled(num_experts + 1, 0, torch.int64),
            scratch=filled(capacity, 0, torch.int32),
            keys=filled(2 * triton.next_power_of_2(num_experts), 0, torch.int64),
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(one.nbytes for one in vars(self).values() if isinstance(one, torch.Tensor))


def launch_lookup(
    state: LookupState,
    ids: torch.Tensor,
    slot_ids: torch.Tensor,
    *,
    late: torch.Tensor | None = None,
    group: int | None = None,
    counted: bool = True,
) -> None:
    """Make the experts of `ids` (contiguous, any shape) resident, and translate them into `slot_ids`.

    `late`, of the same shape, gets the slots that are still to be filled, where it is given. `group`: only
    the experts that `launch_groups` gave this number. The caller sees to it that they fit.
    """
    experts, capacity = state.slot_of.numel(), state.expert_of.numel()
    lanes = triton.next_power_of_2(experts)
    few, chunk = _chunk(ids.numel())
    with torch.cuda.device_of(ids):
        lookup_kernel[(1,)](
            ids,
            slot_ids,
            slot_ids if late is None else late,
            state.slot_of,
            state.expert_of,
            state.uses,
            state.last,
            state.loaded,
            state.clock,
            state.counts,
            state.group_of,
            state.group_experts,
            state.copies,
            state.stamp,
            state.scratch,
            state.keys,
            ids.numel(),
            group or 0,
            experts=experts,
            capacity=capacity,
            policy=state.policy,
            grouped=group is not None,
            splits=late is not None,
            counted=counted,
            few=few,
            chunk=chunk,
            lanes=lanes,
            slot_lanes=triton.next_power_of_2(capacity),
            together=_TOGETHER if lanes <= _TOGETHER else 32,
            num_warps=4 if few and lanes <= _TOGETHER else 8,
        )


def launch_groups(state: LookupState, ids: torch.Tensor) -> None:
    """Part the experts of `ids` (contiguous, any shape) into groups that fit, by number in `group_of`."""
    few, chunk = _chunk(ids.numel())
    with torch.cuda.device_of(ids):
        group_kernel[(1,)](
            ids,
            state.slot_of,
            state.group_of,
            state.stamp,
            ids.numel(),
            experts=state.slot_of.numel(),
            capacity=state.expert_of.numel(),
            few=few,
            chunk=chunk,
            lanes=triton.next_power_of_2(state.slot_of.numel()),
        )


def _chunk(count: int) -> tuple[bool, int]:
    """(whether the ids are few, how many are read at once)"""
    return (True, max(triton.next_power_of_2(count), 2)) if count <= _FEW else (False, 1024)
