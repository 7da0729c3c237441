"""The offline optimum: evict the expert whose next use is furthest away (Belady, 1966)."""

from __future__ import annotations

from collections.abc import Sequence


def replay_belady(
    calls: Sequence[Sequence[int]], num_experts: int, capacity: int
) -> tuple[int, int, int, int]:
    """(calls, hits, misses, wrong) of the optimum over `calls`, each of distinct ids, from an empty cache.

    No policy that evicts only what a call does not need has fewer misses where every call fits. A call that
    does not is replayed in groups like those of a cache; there it is no more than a good policy.
    """
    if num_experts < 1 or capacity < 1:
        raise ValueError(f"num_experts and capacity must be at least 1, got {num_experts} and {capacity}")
    never = len(calls)
    next_use = _next_uses(calls, num_experts)
    due = [never] * num_experts
    """When a resident expert is needed next."""
    resident: set[int] = set()
    hits = misses = wrong = 0
    for call, needed in enumerate(calls):
        for expert, later in zip(needed, next_use[call], strict=True):
            due[expert] = later
        for part in parts_of(needed, resident, capacity):
            held = resident.intersection(part)
            hits += len(held)
            misses += len(part) - len(held)
            surplus = len(resident) + len(part) - len(held) - capacity
            if surplus > 0:
                victims = sorted(resident.difference(part), key=due.__getitem__, reverse=True)
                resident.difference_update(victims[:surplus])
            resident.update(part)
            wrong += not resident.issuperset(part)
    return len(calls), hits, misses, wrong


def _next_uses(calls: Sequence[Sequence[int]], num_experts: int) -> list[list[int]]:
    """For each expert of each call, the next call that needs it, ``len(calls)`` for none."""
    seen = [len(calls)] * num_experts
    later: list[list[int]] = []
    for call in range(len(calls) - 1, -1, -1):
        later.append([seen[expert] for expert in calls[call]])
        for expert in calls[call]:
            seen[expert] = call
    later.reverse()
    return later


def parts_of(needed: Sequence[int], resident: set[int], capacity: int) -> list[Sequence[int]]:
    """Distinct `needed` in parts of at most `capacity`, resident ones first, each part ascending."""
    if len(needed) <= capacity:
        return [needed]
    ordered = sorted(needed, key=lambda expert: (expert not in resident, expert))
    return [sorted(ordered[start : start + capacity]) for start in range(0, len(ordered), capacity)]
