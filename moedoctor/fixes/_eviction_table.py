"""Which expert is in which slot, and which one leaves: the bookkeeping of a cache, without its bytes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

Victims = Callable[[Mapping[int, int], Sequence[int], int, int], list[int]]
"""(candidate -> last use, by last use and id; uses by expert; now; count) -> those who leave."""


def _lru(order: Mapping[int, int], uses: Sequence[int], now: int, count: int) -> list[int]:
    return list(islice(order, count))


def _lfu(order: Mapping[int, int], uses: Sequence[int], now: int, count: int) -> list[int]:
    if count == 1:
        return [min(order, key=uses.__getitem__)]
    return sorted(order, key=uses.__getitem__)[:count]  # stable: ties stay in the order of use


def _lfru(order: Mapping[int, int], uses: Sequence[int], now: int, count: int) -> list[int]:
    lowest: list[tuple[float, int, int]] = []
    limit, beyond, missing = float("inf"), now + 1, count
    youngest = beyond
    for expert, used in order.items():
        if used > youngest:
            break
        score = uses[expert] / (beyond - used)
        if score > limit:
            continue
        if missing:
            missing -= 1
            lowest.append((score, uses[expert], expert))
            if missing:
                continue
            lowest.sort()
        else:
            insort(lowest, (score, uses[expert], expert))
            lowest.pop()
        limit = lowest[-1][0]
        # Everyone was used at least once, so an age below 1 / limit scores higher; rounding aside.
        youngest = beyond + 1 - int(1 / limit)
    return [expert for _, _, expert in sorted(lowest)]


_POLICIES: Mapping[str, Victims] = {"lru": _lru, "lfu": _lfu, "lfru": _lfru}
ONLINE_POLICIES = tuple(_POLICIES)
"""Policies that know only the past."""


class CacheOverflow(RuntimeError):  # noqa: N818  the name in the design
    """A call needs more experts than the cache has slots."""

    def __init__(self, needed: int, capacity: int, *, at_most: bool = False) -> None:
        self.needed = needed
        """Distinct experts that the call needs, or may need where only its shape is known."""
        self.capacity = capacity
        bound = "up to " if at_most else ""
        super().__init__(
            f"the call needs {bound}{needed} experts and the cache has {capacity} slots: "
            f"use groups(), or a capacity of at least {needed}"
        )


class Load(NamedTuple):
    """One expert to copy into one slot."""

    expert: int
    slot: int


class Plan(NamedTuple):
    """What a call needs done before it can compute."""

    hits: int
    loads: list[Load]
    """By ascending expert; no slot among them holds an expert that the call needs."""


class SlotTable:
    """Experts and slots under one policy. Not thread-safe.

    A hit is O(1). A miss is O(1) under ``lru`` and at most O(capacity) under the others; ``lfru`` looks at
    experts from the oldest on and stops where no younger one can have a lower score.
    """

    def __init__(self, num_experts: int, capacity: int, policy: str = "lfru") -> None:
        """Raises ValueError for an unknown policy and for sizes below 1."""
        if policy not in _POLICIES:
            raise ValueError(f"policy must be one of {', '.join(ONLINE_POLICIES)}, got {policy!r}")
        if num_experts < 1 or capacity < 1:
            raise ValueError(f"num_experts and capacity must be at least 1, got {num_experts} and {capacity}")
        self.capacity = capacity
        self.policy = policy
        self.slot_of = [-1] * num_experts
        """[E]: -1 for an expert that is not resident."""
        self.expert_of = [-1] * capacity
        """[capacity]: -1 for a free slot."""
        self.uses = [0] * num_experts
        """[E]: calls that used the expert since it was loaded."""
        self.clock = 0
        """Calls so far."""
        self._victims = _POLICIES[policy]
        self._free = list(range(capacity))
        self._order: dict[int, int] = {}
        """Resident expert -> the call of its last use; by last use, those of one call by id."""

    @property
    def last(self) -> list[int]:
        """[E]: the call of each resident expert's last use, 0 for others."""
        return [self._order.get(expert, 0) for expert in range(len(self.slot_of))]

    @classmethod
    def restored(
        cls, capacity: int, policy: str, slot_of: list[int], uses: list[int], last: list[int], clock: int
    ) -> SlotTable:
        """The table that is in this state; the lists are by expert."""
        table = cls(len(slot_of), capacity, policy)
        table.slot_of, table.uses, table.clock = slot_of, uses, clock
        held = sorted((last[expert], expert) for expert, slot in enumerate(slot_of) if slot >= 0)
        table._order = {expert: used for used, expert in held}
        for expert in table._order:
            table.expert_of[slot_of[expert]] = expert
        table._free = [slot for slot, expert in enumerate(table.expert_of) if expert < 0]
        return table

    def split(self, experts: Iterable[int]) -> list[list[int]]:
        """Distinct `experts` in parts of at most `capacity`, resident ones first, each part ascending.

        Negative ids are none.
        """
        slot_of, capacity = self.slot_of, self.capacity
        needed = sorted({one for one in experts if one >= 0}, key=lambda one: (slot_of[one] < 0, one))
        return [sorted(needed[start : start + capacity]) for start in range(0, len(needed), capacity)]

    def plan(self, experts: Sequence[int]) -> Plan:
        """Make `experts`, which are distinct and ascending, resident. `forget` those whose copy fails.

        Raises CacheOverflow, and changes nothing, where they are more than the slots.
        """
        if len(experts) > self.capacity:
            raise CacheOverflow(len(experts), self.capacity)
        if not experts:
            return Plan(0, [])  # not a call: empty groups must not age anyone
        slot_of, uses, order = self.slot_of, self.uses, self._order
        self.clock = now = self.clock + 1
        missing = []
        for expert in experts:
            if slot_of[expert] < 0:
                missing.append(expert)
            else:
                del order[expert]  # what this call needs is nobody's victim
        loads = self._place(missing) if missing else []
        for expert in experts:
            uses[expert] += 1
            order[expert] = now
        return Plan(len(experts) - len(missing), loads)

    def step(self, experts: Sequence[int]) -> int:
        """`plan`, and the number of misses."""
        return len(self.plan(experts).loads)

    def _place(self, missing: list[int]) -> list[Load]:
        slot_of, expert_of, count = self.slot_of, self.expert_of, len(missing)
        slots, self._free = self._free[:count], self._free[count:]
        if len(slots) < count:
            for victim in self._victims(self._order, self.uses, self.clock, count - len(slots)):
                del self._order[victim]
                slots.append(slot_of[victim])
                slot_of[victim] = -1
        for expert, slot in zip(missing, slots, strict=True):
            slot_of[expert], expert_of[slot], self.uses[expert] = slot, expert, 0
        return list(map(Load, missing, slots))

    def forget(self, expert: int) -> None:
        """`expert` is not resident after all; its slot is free."""
        slot = self.slot_of[expert]
        if slot >= 0:
            self.slot_of[expert] = self.expert_of[slot] = -1
            del self._order[expert]
            insort(self._free, slot)
