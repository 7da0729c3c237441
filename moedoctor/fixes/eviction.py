"""The expert that leaves a full cache: `lru`, `lfu`, `lfru`, `aging`, and `belady`, which knows the future.

One rule keeps a cache right under every policy: a call is one event. Its hits are taken first, then its
misses get the free slots and the slots of experts that this call does not need. Walking through a call's
experts one by one, as vllm-project/vllm#37190 does, can evict an expert that the same call has already
placed; its tokens are then computed with another expert's weights.

The policies order the resident experts that a call does not need. The lowest leaves first, ties by lower id.
Clock and frequency count calls, not tokens. Except for ``aging``, frequency starts anew when an expert is
loaded.

- ``lru``: the call of the last use.
- ``lfu``: frequency, the calls that used it since it was loaded; then the last use.
- ``lfru``: frequency over age, ``uses / (now - last + 1)``; then frequency. This is the score of the PR
  (`expert_weight_provider.py` at 6d0ac79f), whose clock counts single accesses. "Decayed" in its
  discussion means this division: that code holds no other decay. It is not the LFRU of the caching
  literature, which parts a cache into a privileged and an unprivileged half.
- ``aging``: frequency that outlives the expert's stay and is halved every 48 calls; then the last use. A
  frequent expert that was evicted once keeps its count until it returns. (Frequency that fades by age is the
  LRFU of Lee et al., IEEE Trans. Comput. 50, 2001; halving the counts is how LFU is aged.)
- ``belady``: the next use, furthest first: the optimum. Only a replay knows it.

Pure Python, no torch. `simulate` is meant to replay a million expert accesses a second on one core.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import lt
from typing import NamedTuple, Protocol

from moedoctor.fixes.cache.policies import POLICIES as _RESIDENTS
from moedoctor.fixes.cache.policies import Change

ONLINE_POLICIES = tuple(_RESIDENTS)
"""Policies that know only the past: what a running cache takes."""
POLICIES = (*ONLINE_POLICIES, "belady")
"""The policies that `simulate` takes."""


class CacheOverflow(RuntimeError):  # noqa: N818  the name in the design
    """A call needs more experts than the cache has slots."""

    def __init__(self, needed: int, capacity: int, *, at_most: bool = False) -> None:
        self.needed = needed
        """Distinct experts that the call needs; with `at_most` the most that its shape allows."""
        self.capacity = capacity
        bound = "up to " if at_most else ""
        super().__init__(
            f"the call needs {bound}{needed} experts and the cache has {capacity} slots: "
            f"use groups(), or a capacity of at least {needed}"
        )


@dataclass(frozen=True)
class CacheStats:
    """The counts of a cache over a number of calls."""

    calls: int
    hits: int
    """Distinct experts of a call that were resident when it came, over all calls."""
    misses: int
    """Distinct experts of a call that had to be loaded, over all calls."""
    wrong: int = 0
    """Calls that would compute with an expert that is not in the slot that its mapping names."""
    prefetched: int = 0
    """Experts loaded ahead of a call that may need them."""

    @property
    def accesses(self) -> int:
        """Distinct experts that the calls needed, summed."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        """Hits over accesses, 0 to 1; 1 if nothing was needed."""
        return self.hits / self.accesses if self.accesses else 1.0

    @classmethod
    def sum(cls, parts: Iterable[CacheStats]) -> CacheStats:
        """Add up the counts of several caches."""
        parts = list(parts)
        return cls(*(sum(getattr(stats, field.name) for stats in parts) for field in fields(cls)))


class Load(NamedTuple):
    """One expert to copy into one slot."""

    expert: int
    slot: int


class CacheTable(Protocol):
    """Bookkeeping that `replay` can drive: `SlotTable`, or a restatement of somebody else's rule."""

    capacity: int
    slot_of: list[int]
    """[E]: where each expert is believed to be, -1 for nowhere."""
    expert_of: list[int]
    """[capacity]: what each slot really holds, -1 for nothing."""

    def split(self, experts: Iterable[int]) -> list[list[int]]:
        """Return the distinct experts of a call in parts of at most `capacity`."""

    def step(self, experts: Sequence[int]) -> int:
        """Make distinct `experts` resident and return the number of misses."""


class SlotTable:
    """Experts and slots under one policy: the bookkeeping of a cache, without its bytes. Not thread-safe.

    A hit is O(1); an expert's second use is at most O(capacity) under ``lfu`` and ``lfru``. A miss is O(1)
    under ``lru`` and at most O(capacity) under the others, apart from sorting the experts that they look at;
    ``aging`` goes through all experts every so many calls.
    """

    def __init__(self, num_experts: int, capacity: int, policy: str = "lfru") -> None:
        """Raise ValueError for an unknown policy and for sizes below 1."""
        if policy not in _RESIDENTS:
            raise ValueError(f"policy must be one of {', '.join(ONLINE_POLICIES)}, got {policy!r}")
        _check_sizes(num_experts, capacity)
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
        self._residents = _RESIDENTS[policy](num_experts)
        self._free = list(range(capacity))

    @property
    def last(self) -> list[int]:
        """[E]: the call of each resident expert's last use, 0 for others."""
        ages = self._residents.list_ages()
        return [ages.get(expert, 0) for expert in range(len(self.slot_of))]

    @classmethod
    def restore(
        cls, capacity: int, policy: str, slot_of: list[int], uses: list[int], last: list[int], clock: int
    ) -> SlotTable:
        """Return the table that is in this state; the lists are by expert."""
        table = cls(len(slot_of), capacity, policy)
        table.slot_of, table.uses, table.clock = slot_of, uses, clock
        held = sorted((last[expert], expert) for expert, slot in enumerate(slot_of) if slot >= 0)
        for used, expert in held:
            table._residents.restore(expert, uses[expert], used)
            table.expert_of[slot_of[expert]] = expert
        table._free = [slot for slot, expert in enumerate(table.expert_of) if expert < 0]
        return table

    def split(self, experts: Iterable[int]) -> list[list[int]]:
        """Return distinct `experts` in parts of at most `capacity`, each ascending.

        Resident experts come first, then the least used ones. So the most used are resident in the next
        call. Negative ids are left out.
        """
        slot_of = self.slot_of
        needed = {expert for expert in experts if expert >= 0}
        resident = {expert for expert in needed if slot_of[expert] >= 0}
        return _split_into_parts(needed, resident, self.uses, self.capacity)

    def plan(self, experts: Sequence[int]) -> list[Load]:
        """Make `experts`, which are distinct and ascending, resident; return what to copy, in their order.

        `forget` those whose copy fails. Raises CacheOverflow, and changes nothing, if they are more than the
        slots. Without experts it is not a call: an empty group must not age anyone.
        """
        if len(experts) > self.capacity:
            raise CacheOverflow(len(experts), self.capacity)
        if not experts:
            return []
        self.clock += 1
        slot_of, expert_of = self.slot_of, self.expert_of
        missing, victims = self._residents.step(experts, self.uses, self.clock, len(self._free))
        if not missing:
            return []
        slots, self._free = self._free[: len(missing)], self._free[len(missing) :]
        for victim in victims:
            slots.append(slot_of[victim])
            slot_of[victim] = -1
        loads = list(map(Load, missing, slots))
        for expert, slot in loads:
            slot_of[expert], expert_of[slot] = slot, expert
        return loads

    def step(self, experts: Sequence[int]) -> int:
        """Do as `plan` does, and return the number of misses."""
        return len(self.plan(experts))

    def forget(self, expert: int) -> None:
        """Free the slot of `expert`, which is not resident after all."""
        slot = self.slot_of[expert]
        if slot >= 0:
            self.slot_of[expert] = self.expert_of[slot] = -1
            self._residents.forget(expert)
            insort(self._free, slot)


def simulate(
    trace: Sequence[Sequence[int]], *, num_experts: int, capacity: int, policy: str = "lfru"
) -> CacheStats:
    """Replay `trace`, the expert ids that each call needs, through an empty cache of `capacity` slots.

    Ids may repeat within a call, and -1 means no expert. A call that needs more experts than there are slots
    runs in groups as `SlotTable.split` makes them, and is counted as one call. `policy` is one of `POLICIES`.
    Raises ValueError for an unknown policy, an id outside 0..num_experts-1, or a capacity below 1.

    ``belady`` has the fewest misses of all policies that evict only what a call does not need, if every call
    fits; on calls that do not fit it is only a good policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    _check_sizes(num_experts, capacity)
    calls = _check_trace(trace, num_experts)
    optimum = _Belady(calls, num_experts) if policy == "belady" else None
    residents = optimum or _RESIDENTS[policy](num_experts)
    uses = [0] * num_experts
    resident: set[int] = set()
    clock = 0

    # Who leaves does not depend on slots, so none are kept here. `wrong` is checked all the same, against the
    # residents that the policy's own decisions leave.
    def step(part: Sequence[int]) -> int:
        nonlocal clock
        if not part:
            return 0  # not a call for the policy, as in `SlotTable`
        clock += 1
        missing, victims = residents.step(part, uses, clock, capacity - len(resident))
        if missing:
            resident.difference_update(victims)
            resident.update(missing)
        return len(missing)

    def holds(part: Sequence[int]) -> bool:
        return len(resident) <= capacity and resident.issuperset(part)

    def split(needed: Sequence[int]) -> list[list[int]]:
        return _split_into_parts(needed, resident, uses, capacity)

    return _count(optimum or calls, capacity, split, step, holds)


def replay(trace: Sequence[Sequence[int]], table: CacheTable) -> CacheStats:
    """Drive `table` through `trace` and count; `wrong` is checked call by call, never assumed."""
    slot_of, expert_of = table.slot_of, table.expert_of

    def holds(part: Sequence[int]) -> bool:
        return all(slot_of[expert] >= 0 and expert_of[slot_of[expert]] == expert for expert in part)

    return _count(_check_trace(trace, len(slot_of)), table.capacity, table.split, table.step, holds)


def _count(
    calls: Iterable[Sequence[int]],
    capacity: int,
    split: Callable[[Sequence[int]], list[list[int]]],
    step: Callable[[Sequence[int]], int],
    holds: Callable[[Sequence[int]], bool],
) -> CacheStats:
    """Run `calls` in parts that fit. `step` returns the misses of a part, `holds` checks it afterwards."""
    number = accesses = misses = wrong = 0
    for needed in calls:
        number += 1
        right = True
        for part in (needed,) if len(needed) <= capacity else split(needed):
            accesses += len(part)
            misses += step(part)
            right = holds(part) and right
        wrong += not right
    return CacheStats(number, accesses - misses, misses, wrong)


class _Belady:
    """Evicts the expert whose next use is furthest away (Belady, 1966)."""

    def __init__(self, calls: Sequence[Sequence[int]], num_experts: int) -> None:
        following = [len(calls)] * num_experts
        self._later: list[tuple[Sequence[int], list[int]]] = []
        """The calls, the last one first, each with the next calls that need its experts."""
        for number in range(len(calls) - 1, -1, -1):
            self._later.append((calls[number], [following[expert] for expert in calls[number]]))
            for expert in calls[number]:
                following[expert] = number
        self._due = [len(calls)] * num_experts
        """[E]: when a resident expert is needed next."""
        self._resident: set[int] = set()

    def __iter__(self) -> Iterator[Sequence[int]]:
        """Give the calls; `step` knows the future from the call on that was given last."""
        for needed, later in reversed(self._later):
            for expert, number in zip(needed, later, strict=True):
                self._due[expert] = number
            yield needed

    def step(self, experts: Sequence[int], uses: list[int], now: int, free: int) -> Change:
        missing = [expert for expert in experts if expert not in self._resident]
        victims: list[int] = []
        if len(missing) > free:
            others = sorted(self._resident.difference(experts), key=self._due.__getitem__, reverse=True)
            victims = others[: len(missing) - free]
            self._resident.difference_update(victims)
        self._resident.update(missing)
        return missing, victims


def _split_into_parts(
    needed: Iterable[int], resident: set[int], uses: Sequence[int], capacity: int
) -> list[list[int]]:
    """Return distinct `needed` as `SlotTable.split` does. Experts with as many uses are in order of ids."""
    missing = sorted((uses[expert], expert) for expert in needed if expert not in resident)
    ordered = [*sorted(resident.intersection(needed)), *(expert for _, expert in missing)]
    return [sorted(ordered[start : start + capacity]) for start in range(0, len(ordered), capacity)]


def _check_sizes(num_experts: int, capacity: int) -> None:
    if num_experts < 1 or capacity < 1:
        raise ValueError(f"num_experts and capacity must be at least 1, got {num_experts} and {capacity}")


def _check_trace(trace: Sequence[Sequence[int]], num_experts: int) -> list[Sequence[int]]:
    """Return each call's distinct ids, ascending."""
    rows = trace.tolist() if hasattr(trace, "tolist") else trace  # an array's own integers are slow
    calls: list[Sequence[int]] = [  # most traces are sorted already, and checking that is faster than sorting
        row if all(map(lt, row, row[1:])) else sorted(set(row)) for row in map(tuple, rows)
    ]
    for index, needed in enumerate(calls):
        if needed and needed[0] < -1:
            raise ValueError(f"trace: call {index} holds expert {needed[0]}; ids start at 0, -1 is none")
        if needed and needed[-1] >= num_experts:
            raise ValueError(
                f"trace: call {index} needs expert {needed[-1]}, but there are {num_experts} experts"
            )
        if needed and needed[0] < 0:
            calls[index] = needed[1:]
    return calls
