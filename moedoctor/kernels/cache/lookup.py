"""Lookup and eviction of an expert cache in one program, on state that stays on the device.

It decides as `moedoctor.fixes.eviction.SlotTable` does: one call is one event. Experts are lanes; a program
has them all, so that ranks and prefix sums need no second launch. Loops whose length is known only at run
time are `while` loops: Triton's interpreter takes no tensor as a range.

Shapes: E experts, lanes (E padded to a power of two, an expert each), slot_lanes (the same for the capacity),
count ids of a call in rows of width (top_k), chunk ids that are read at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moedoctor.kernels.cache import EVERY_ROW, HALVED_EVERY
from moedoctor.kernels.device_guard import make_current
from moedoctor.kernels.expert_ids import as_int32

_NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)
"""The key of an expert that may not leave."""
_HALVED_EVERY = tl.constexpr(HALVED_EVERY)
_IDS = tl.constexpr(4096)
"""Above the largest expert id, to put one below another key in one integer."""


@triton.jit
def _is_needed(
    ids_ptr: tl.tensor,
    stamp_ptr: tl.tensor,
    expert: tl.tensor,
    count: tl.tensor,
    experts: tl.constexpr,
    few: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    """Return which of the experts [lanes] are named by `ids` [count]; an id that is no expert names none.

    Many ids are marked in `stamp` int64 [E + 1], with a number that its last element counts up.
    """
    place = tl.arange(0, chunk)  # [chunk]
    if few:
        ids = as_int32(tl.load(ids_ptr + place, mask=place < count, other=-1))  # [chunk]
        named = tl.max((expert[:, None] == ids[None, :]).to(tl.int32), axis=1) > 0  # [lanes]
    else:
        mark = tl.load(stamp_ptr + experts) + 1
        start = count * 0
        while start < count:
            ids = tl.load(ids_ptr + start + place, mask=start + place < count, other=-1)  # [chunk]
            tl.store(stamp_ptr + ids, place * 0 + mark, mask=(ids >= 0) & (ids < experts))
            start += chunk
        tl.debug_barrier()
        named = tl.load(stamp_ptr + expert, mask=expert < experts, other=0) == mark
        tl.store(stamp_ptr + experts, mark)
    return named & (expert < experts)


@triton.jit
def _rank(
    major: tl.tensor,
    minor: tl.tensor,
    keys_ptr: tl.tensor,
    expert: tl.tensor,
    lanes: tl.constexpr,
    together: tl.constexpr,
) -> tl.tensor:
    """Return how many of the keys (major, minor) [lanes] are below each key."""
    if lanes <= together:
        below = (major[None, :] < major[:, None]) | (
            (major[None, :] == major[:, None]) & (minor[None, :] < minor[:, None])
        )  # [lanes, lanes]
        rank = tl.sum(below.to(tl.int32), axis=1)
    else:
        tl.store(keys_ptr + expert, major)
        tl.store(keys_ptr + lanes + expert, minor)
        tl.debug_barrier()
        rank = tl.zeros([lanes], tl.int32)
        for start in range(0, lanes, together):
            other = start + tl.arange(0, together)
            first = tl.load(keys_ptr + other)  # [together]
            second = tl.load(keys_ptr + lanes + other)  # [together]
            below = (first[None, :] < major[:, None]) | (
                (first[None, :] == major[:, None]) & (second[None, :] < minor[:, None])
            )  # [lanes, together]
            rank += tl.sum(below.to(tl.int32), axis=1)
    return rank


@triton.jit
def _keys(
    uses: tl.tensor, last: tl.tensor, now: tl.tensor, expert: tl.tensor, policy: tl.constexpr
) -> tl.tuple:
    """(major, minor) int64 [lanes]; the lowest leaves first."""
    if policy == "lru":
        keys = (last, expert.to(tl.int64))
    elif policy == "lfru":
        score = uses.to(tl.float64) / (now - last + 1).to(tl.float64)
        # Positive floats are ordered as their bits are.
        keys = (score.to(tl.int64, bitcast=True), uses * _IDS + expert)
    else:
        keys = (uses, last * _IDS + expert)
    return keys


@triton.jit
def _real_ids(rows_ptr: tl.tensor, count: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Return how many of `count` ids, `width` a row, are of rows that are no padding: at least one row's."""
    rows = tl.maximum(tl.load(rows_ptr), 1).to(tl.int64)
    return tl.minimum(rows * width, count.to(tl.int64)).to(tl.int32)


@triton.jit(do_not_specialize=["count", "width", "group"])  # which would compile it once more for group 1
def lookup_kernel(
    ids_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    late_ptr: tl.tensor,
    slot_of_ptr: tl.tensor,
    expert_of_ptr: tl.tensor,
    uses_ptr: tl.tensor,
    last_ptr: tl.tensor,
    loaded_ptr: tl.tensor,
    clock_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    group_of_ptr: tl.tensor,
    group_experts_ptr: tl.tensor,
    late_experts_ptr: tl.tensor,
    copies_ptr: tl.tensor,
    stamp_ptr: tl.tensor,
    scratch_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    group: tl.tensor,
    experts: tl.constexpr,
    capacity: tl.constexpr,
    policy: tl.constexpr,
    grouped: tl.constexpr,
    splits: tl.constexpr,
    counted: tl.constexpr,
    few: tl.constexpr,
    chunk: tl.constexpr,
    lanes: tl.constexpr,
    slot_lanes: tl.constexpr,
    together: tl.constexpr,
) -> None:
    """Make the experts of `ids` [count] resident in the bookkeeping; one program.

    Writes `slot_ids` [count], and to `copies` int32 [1 + 2 * capacity] the number of copies, their experts
    and their slots. `splits`: slots that are still to be filled go to `late` [count] instead. `counts`
    int64 [4] are calls, hits, misses and prefetched. `grouped`: only the experts with
    ``group_of[expert] == group``; `group_experts` int32 [capacity] gets the group's expert in each slot, or
    -1. With `splits` it gets the hits, and `late_experts` int32 [capacity] the others. `loaded` int64 [E] is
    the call that loaded each expert, `scratch` int32 [capacity], `keys` int64 [2 * lanes]. `rows` int32 [1]:
    rows of `width` ids that are no padding; the others get the slots of the first row.
    """
    expert = tl.arange(0, lanes)  # [lanes]
    real = expert < experts
    now = tl.load(clock_ptr) + 1
    slot = tl.load(slot_of_ptr + expert, mask=real, other=-1)  # [lanes]
    uses = tl.load(uses_ptr + expert, mask=real, other=0)  # [lanes]
    last = tl.load(last_ptr + expert, mask=real, other=0)  # [lanes]
    limit = _real_ids(rows_ptr, count, width)
    needed = _is_needed(ids_ptr, stamp_ptr, expert, limit, experts, few, chunk)
    if grouped:
        needed = needed & (tl.load(group_of_ptr + expert, mask=real, other=-1) == group)
    resident = slot >= 0
    missing = needed & (slot < 0)
    misses = tl.sum(missing.to(tl.int32), axis=0)
    hits = tl.sum((needed & resident).to(tl.int32), axis=0)
    if policy == "aging":
        uses = tl.where((now % _HALVED_EVERY == 0) & (hits + misses > 0), uses >> 1, uses)
    tl.store(copies_ptr, misses)
    if misses > 0:
        place = tl.arange(0, slot_lanes)  # [slot_lanes]
        held = tl.load(expert_of_ptr + place, mask=place < capacity, other=0)
        free = (held < 0) & (place < capacity)
        free_rank = tl.cumsum(free.to(tl.int32), axis=0) - 1
        frees = tl.sum(free.to(tl.int32), axis=0)
        tl.store(scratch_ptr + free_rank, place, mask=free & (free_rank < misses))
        victim = needed & (expert < 0)
        if frees < misses:
            major, minor = _keys(uses, last, now, expert, policy)
            may_leave = resident & (needed == 0)
            major = tl.where(may_leave, major, _NEVER)
            rank = frees + _rank(major, minor, keys_ptr, expert, lanes, together)
            victim = may_leave & (rank < misses)
            tl.store(scratch_ptr + rank, slot, mask=victim)
        tl.debug_barrier()
        order = tl.cumsum(missing.to(tl.int32), axis=0) - 1
        target = tl.load(scratch_ptr + order, mask=missing, other=-1)  # [lanes]
        tl.store(copies_ptr + 1 + order, expert, mask=missing)
        tl.store(copies_ptr + 1 + capacity + order, target, mask=missing)
        tl.store(expert_of_ptr + target, expert, mask=missing)
        slot = tl.where(missing, target, tl.where(victim, -1, slot))
        tl.store(slot_of_ptr + expert, slot, mask=missing | victim)
        if policy != "aging":
            uses = tl.where(missing, 0, uses)
    tl.store(uses_ptr + expert, tl.where(needed, uses + 1, uses), mask=real)
    tl.store(loaded_ptr + expert, last * 0 + now, mask=missing)
    if grouped or splits:
        every = tl.arange(0, slot_lanes)  # [slot_lanes]
        tl.store(group_experts_ptr + every, every * 0 - 1, mask=every < capacity)
        if splits:
            tl.store(late_experts_ptr + every, every * 0 - 1, mask=every < capacity)
        tl.debug_barrier()
        if splits:
            tl.store(group_experts_ptr + slot, expert, mask=needed & resident)
            tl.store(late_experts_ptr + slot, expert, mask=missing)
        else:
            tl.store(group_experts_ptr + slot, expert, mask=needed)
    tl.store(last_ptr + expert, last * 0 + now, mask=needed)
    tl.debug_barrier()
    if hits + misses > 0:
        tl.store(clock_ptr, now)
    if counted:
        if group == 0:
            tl.store(counts_ptr, tl.load(counts_ptr) + 1)
        tl.store(counts_ptr + 1, tl.load(counts_ptr + 1) + hits)
        tl.store(counts_ptr + 2, tl.load(counts_ptr + 2) + misses)
    else:
        tl.store(counts_ptr + 3, tl.load(counts_ptr + 3) + misses)
    # The slots of the ids: -1 for ids that are no expert, or none of this group.
    number = tl.arange(0, chunk)  # [chunk]
    start = count * 0
    while start < count:
        place = start + number
        inside = place < count
        ids = tl.load(ids_ptr + tl.where(place < limit, place, place % width), mask=inside, other=-1)
        known = (ids >= 0) & (ids < experts)
        if grouped:
            known = known & (tl.load(group_of_ptr + ids, mask=known, other=-1) == group)
        slots = tl.load(slot_of_ptr + ids, mask=known, other=-1)
        if splits:
            late = tl.load(loaded_ptr + ids, mask=known, other=0) == now
            tl.store(late_ptr + place, tl.where(late, slots, -1), mask=inside)
            slots = tl.where(late, -1, slots)
        tl.store(slot_ids_ptr + place, slots, mask=inside)
        start += chunk


@triton.jit(do_not_specialize=["count", "width"])
def group_kernel(
    ids_ptr: tl.tensor,
    slot_of_ptr: tl.tensor,
    uses_ptr: tl.tensor,
    group_of_ptr: tl.tensor,
    stamp_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    experts: tl.constexpr,
    capacity: tl.constexpr,
    few: tl.constexpr,
    chunk: tl.constexpr,
    lanes: tl.constexpr,
    together: tl.constexpr,
) -> None:
    """Split the experts of `ids` [count] into groups of `capacity`; one program.

    Resident experts come first, then the least used ones. So the most used are resident in the next call.
    `keys`, `rows` and `width` as `lookup_kernel`.
    """
    expert = tl.arange(0, lanes)  # [lanes]
    real = expert < experts
    limit = _real_ids(rows_ptr, count, width)
    needed = _is_needed(ids_ptr, stamp_ptr, expert, limit, experts, few, chunk)
    resident = tl.load(slot_of_ptr + expert, mask=real, other=-1) >= 0
    hits = (needed & resident).to(tl.int32)
    uses = tl.load(uses_ptr + expert, mask=real, other=0)  # [lanes]
    uses = tl.where(needed & (resident == 0), uses, _NEVER)
    rank = _rank(uses, expert.to(tl.int64), keys_ptr, expert, lanes, together)
    order = tl.where(resident, tl.cumsum(hits, axis=0) - 1, tl.sum(hits, axis=0) + rank)
    tl.store(group_of_ptr + expert, tl.where(needed, order // capacity, -1), mask=real)


MOST_EXPERTS = 1024
"""One program ranks this many."""
_FEW = 64
"""Up to this many ids are compared with every expert in registers."""
_TOGETHER = 128
"""Up to this many experts are all ranked against each other at once."""


class LookupState(NamedTuple):
    """Everything `lookup_kernel` reads and writes, at fixed addresses, in the order of its parameters."""

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
    late_experts: torch.Tensor
    """int32 [capacity]: the expert that the last call with `late` loads into each slot, or -1"""
    copies: torch.Tensor
    """int32 [1 + 2 * capacity]: how many, experts, slots"""
    stamp: torch.Tensor
    """int64 [E + 1]"""
    scratch: torch.Tensor
    """int32 [capacity]"""
    keys: torch.Tensor
    """int64 [2 * lanes]"""
    rows: torch.Tensor
    """int32 [1]: rows of a call that are no padding"""
    policy: str

    @classmethod
    def make(cls, num_experts: int, capacity: int, policy: str, device: torch.device) -> LookupState:
        def fill(size: int) -> torch.Tensor:
            return torch.full((size,), -1, dtype=torch.int32, device=device)

        def make_zeros(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            slot_of=fill(num_experts),
            expert_of=fill(capacity),
            uses=make_zeros(num_experts),
            last=make_zeros(num_experts),
            loaded=make_zeros(num_experts),
            clock=make_zeros(1),
            counts=make_zeros(4),
            group_of=fill(num_experts),
            group_experts=fill(capacity),
            late_experts=fill(capacity),
            copies=make_zeros(1 + 2 * capacity, torch.int32),
            stamp=make_zeros(num_experts + 1),
            scratch=make_zeros(capacity, torch.int32),
            keys=make_zeros(2 * triton.next_power_of_2(num_experts)),
            rows=torch.full((1,), EVERY_ROW, dtype=torch.int32, device=device),
            policy=policy,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, as the kernel takes them."""
        return self[:-1]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in self.tensors)


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

    Rows from ``state.rows`` on count as the first one; a row is as long as the last dimension. An id that is
    no expert, below 0 or from E on, gets slot -1 and nothing is read for it. `late`, of the same shape, gets
    the slots that are still to be filled, if it is given. `group`: only the experts that `launch_groups` gave
    this number. The caller makes sure that they fit.
    """
    experts, capacity = state.slot_of.numel(), state.expert_of.numel()
    lanes = triton.next_power_of_2(experts)
    few, chunk = _choose_chunk(ids.numel())
    with make_current(ids):
        lookup_kernel[(1,)](
            ids,
            slot_ids,
            slot_ids if late is None else late,
            *state.tensors,
            ids.numel(),
            _measure_width(ids),
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
            together=_count_together(lanes),
            num_warps=4 if few and lanes <= _TOGETHER else 8,
        )


def launch_groups(state: LookupState, ids: torch.Tensor) -> None:
    """Split the experts of `ids` (contiguous, any shape) into groups that fit, by number in `group_of`."""
    lanes = triton.next_power_of_2(state.slot_of.numel())
    few, chunk = _choose_chunk(ids.numel())
    with make_current(ids):
        group_kernel[(1,)](
            ids,
            state.slot_of,
            state.uses,
            state.group_of,
            state.stamp,
            state.keys,
            state.rows,
            ids.numel(),
            _measure_width(ids),
            experts=state.slot_of.numel(),
            capacity=state.expert_of.numel(),
            few=few,
            chunk=chunk,
            lanes=lanes,
            together=_count_together(lanes),
        )


def _count_together(lanes: int) -> int:
    """Return how many of the experts are compared with each expert at once."""
    return lanes if lanes <= _TOGETHER else 32


def _measure_width(ids: torch.Tensor) -> int:
    """Return the length of a row, at least 1."""
    return max(ids.shape[-1], 1) if ids.dim() else 1


def _choose_chunk(count: int) -> tuple[bool, int]:
    """Return whether the ids are few, and how many are read at once."""
    return (True, max(triton.next_power_of_2(count), 2)) if count <= _FEW else (False, 1024)
