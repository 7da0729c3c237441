"""Which expert leaves a full cache: `lru`, `lfu`, `lfru`, `aging`, and `belady`, which knows the future.

The rule that keeps a cache right is the same for all of them: a call is one event. Its hits are taken
first, then its misses get the free slots and the slots of experts that this call does not need. Walking
through a call's experts one by one, as vllm-project/vllm#37190 does, can evict an expert that the same
call has already placed; its tokens are then computed with another expert's weights.

The policies order the resident experts that a call does not need; the lowest leaves first, ties by lower
id. Clock and frequency count calls, not tokens; but for ``aging``, frequency starts anew when an expert is
loaded:

- ``lru``: the call of the last use.
- ``lfu``: frequency, the calls that used it since it was loaded; then the last use.
- ``lfru``: frequency over age, ``uses / (now - last + 1)``; then frequency. This is the score of the PR
  (`expert_weight_provider.py` at 6d0ac79f), whose clock counts single accesses. "Decayed" in its
  discussion means this division: that code holds no other decay. It is not the LFRU of the caching
  literature, which parts a cache into a privileged and an unprivileged half.
- ``aging``: frequency that outlives the expert's stay and is halved every 48 calls; then the last use. An
  expert that was unlucky once returns with what it is known for. (Frequency that fades by age is the LRFU of
  Lee et al., IEEE Trans. Comput. 50, 2001; halving the counts is how LFU is aged.)
- ``belady``: the next use, furthest first: the optimum. Only a replay knows it.

Pure Python, no torch. `simulate` is meant to replay a million expert accesses a second on one core;
``moedoctor bench --cache --speed`` measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import lt
from typing import Protocol

from moedoctor.fixes.cache.belady import parts_of, replay_belady
from moedoctor.fixes.cache.policies import POLICIES as RESIDENTS
from moedoctor.fixes.cache.slot_table import ONLINE_POLICIES, CacheOverflow, Load, Plan, SlotTable

__all__ = [
    "ONLINE_POLICIES",
    "POLICIES",
    "CacheOverflow",
    "CacheStats",
    "CacheTable",
    "Load",
    "Plan",
    "SlotTable",
    "replay",
    "simulate",
]

POLICIES = (*ONLINE_POLICIES, "belady")
"""What `simulate` takes; a running cache takes `ONLINE_POLICIES`."""


@dataclass(frozen=True)
class CacheStats:
    """What a cache did over a number of calls."""

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
        """Hits over accesses, 0 to 1; 1 where nothing was needed."""
        return self.hits / self.accesses if self.accesses else 1.0


class CacheTable(Protocol):
    """Bookkeeping that `replay` can drive: `SlotTable`, or a restatement of somebody else's rule."""

    capacity: int
    slot_of: list[int]
    """[E]: where each expert is believed to be, -1 for nowhere."""
    expert_of: list[int]
    """[capacity]: what each slot really holds, -1 for nothing."""

    def split(self, experts: Iterable[int]) -> list[list[int]]:
        """The distinct experts of a call in parts of at most `capacity`."""

    def step(self, experts: Sequence[int]) -> int:
        """Make distinct `experts` resident and give the number of misses."""


def simulate(
    trace: Sequence[Sequence[int]], *, num_experts: int, capacity: int, policy: str = "lfru"
) -> CacheStats:
    """Replay `trace`, the expert ids that each call needs, through an empty cache of `capacity` slots.

    Ids may repeat within a call, and -1 stands for none. A call that needs more experts than there are slots
    runs in groups, resident ones first, and counts as one call. `policy` is one of `POLICIES`. Raises
    ValueError for an unknown policy, an id outside 0..num_experts-1, or a capacity below 1.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if policy == "belady":
        return CacheStats(*replay_belady(_checked(trace, num_experts), num_experts, capacity))
    if num_experts < 1 or capacity < 1:
        raise ValueError(f"num_experts and capacity must be at least 1, got {num_experts} and {capacity}")
    return _replay_online(_checked(trace, num_experts), num_experts, capacity, policy)


def _replay_online(
    calls: Sequence[Sequence[int]], num_experts: int, capacity: int, policy: str
) -> CacheStats:
    """As `replay` with a `SlotTable`, without its slots: who leaves does not depend on them.

    `wrong` is checked here too, against the residents that the policy's own decisions leave.
    """
    step = RESIDENTS[policy](num_experts).step
    uses = [0] * num_experts
    resident: set[int] = set()
    misses = wrong = clock = 0
    free = capacity
    for needed in calls:
        stale = False
        for part in (needed,) if len(needed) <= capacity else parts_of(needed, resident, capacity):
            if not part:
                continue  # not a call for the policy, as in `SlotTable`
            clock += 1
            missing, victims = step(part, uses, clock, free)
            if missing:
                misses += len(missing)
                resident.difference_update(victims)
                resident.update(missing)
                free = capacity - len(resident)
            if free < 0 or not resident.issuperset(part):
                stale = True
        wrong += stale
    return CacheStats(len(calls), sum(map(len, calls)) - misses, misses, wrong)


def replay(trace: Sequence[Sequence[int]], table: CacheTable) -> CacheStats:
    """Drive `table` through `trace` and count; `wrong` is checked call by call, never assumed."""
    slot_of, expert_of, capacity, step = table.slot_of, table.expert_of, table.capacity, table.step
    hits = misses = wrong = 0
    calls = _checked(trace, len(slot_of))
    for needed in calls:
        parts = (needed,) if len(needed) <= capacity else table.split(needed)
        stale = False
        for part in parts:
            missed = step(part)
            misses += missed
            hits += len(part) - missed
            for expert in part:
                slot = slot_of[expert]
                if slot < 0 or expert_of[slot] != expert:
                    stale = True
        wrong += stale
    return CacheStats(len(calls), hits, misses, wrong)


def _checked(trace: Sequence[Sequence[int]], num_experts: int) -> list[Sequence[int]]:
    """Each call's distinct ids, ascending."""
    rows = trace.tolist() if hasattr(trace, "tolist") else trace  # an array's own integers are slow
    calls: list[Sequence[int]] = [  # most traces hold them so already, and to see that is faster than to sort
        row if all(map(lt, row, row[1:])) else sorted(set(row)) for row in map(tuple, rows)
    ]
    unusual = [index for index, call in enumerate(calls) if call and (call[0] < 0 or call[-1] >= num_experts)]
    for index in unusual:
        needed = calls[index]
        if needed[0] < -1:
            raise ValueError(f"trace: call {index} holds expert {needed[0]}; ids start at 0, -1 is none")
        if needed[-1] >= num_experts:
            raise ValueError(
                f"trace: call {index} needs expert {needed[-1]}, but there are {num_experts} experts"
            )
        if needed[0] == -1:
            calls[index] = needed[1:]
    return calls
