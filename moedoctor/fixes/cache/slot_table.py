"""Which expert is in which slot, and which one leaves: the bookkeeping of a cache, without its bytes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moedoctor.fixes.cache.policies import POLICIES

ONLINE_POLICIES = tuple(POLICIES)
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

    A hit is O(1); an expert's second use is at most O(capacity) under ``lfu`` and ``lfru``. A miss is O(1)
    under ``lru`` and at most O(capacity) under the others, but for sorting those whom they look at; ``aging``
    goes through all experts every so many calls.
    """

    def __init__(self, num_experts: int, capacity: int, policy: str = "lfru") -> None:
        """Raises ValueError for an unknown policy and for sizes below 1."""
        if policy not in POLICIES:
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
        """[E]: calls that used the expert since it was loaded, or as ``aging`` counts them."""
        self.clock = 0
        """Calls so far."""
        self._residents = POLICIES[policy](num_experts)
        self._free = list(range(capacity))

    @property
    def last(self) -> list[int]:
        """[E]: the call of each resident expert's last use, 0 for others."""
        ages = self._residents.ages()
        return [ages.get(expert, 0) for expert in range(len(self.slot_of))]

    @classmethod
    def restored(
        cls, capacity: int, policy: str, slot_of: list[int], uses: list[int], last: list[int], clock: int
    ) -> SlotTable:
        """The table that is in this state; the lists are by expert."""
        table = cls(len(slot_of), capacity, policy)
        table.slot_of, table.uses, table.clock = slot_of, uses, clock
        held = sorted((last[expert], expert) for expert, slot in enumerate(slot_of) if slot >= 0)
        for used, expert in held:
            table._residents.restore(expert, uses[expert], used)
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
        missing, slots = self._admit(experts)
        return Plan(len(experts) - len(missing), list(map(Load, missing, slots)))

    def step(self, experts: Sequence[int]) -> int:
        """`plan`, and the number of misses."""
        return len(self._admit(experts)[0])

    def _admit(self, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """(who has to be loaded, and where to)"""
        if len(experts) > self.capacity:
            raise CacheOverflow(len(experts), self.capacity)
        if not experts:
            return [], []  # not a call: empty groups must not age anyone
        self.clock += 1
        slot_of, expert_of = self.slot_of, self.expert_of
        missing, victims = self._residents.step(experts, self.uses, self.clock, len(self._free))
        if not missing:
            return missing, []
        slots, self._free = self._free[: len(missing)], self._free[len(missing) :]
        for victim in victims:
            slots.append(slot_of[victim])
            slot_of[victim] = -1
        for expert, slot in zip(missing, slots):  # noqa: B905  as long as each other, and this is hot
            slot_of[expert], expert_of[slot] = slot, expert
        return missing, slots

    def forget(self, expert: int) -> None:
        """`expert` is not resident after all; its slot is free."""
        slot = self.slot_of[expert]
        if slot >= 0:
            self.slot_of[expert] = self.expert_of[slot] = -1
            self._residents.forget(expert)
            insort(self._free, slot)
