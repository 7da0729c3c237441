"""Policies of eviction: each keeps the resident experts in the order that it picks victims from.

`moedoctor.fixes.eviction` describes the policies. The code here is written for speed: `simulate` spends most
of its time in `step`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import islice

from moedoctor.kernels.cache import HALVED_EVERY

_FEW = 8
"""`lfru` may look at this many residents without choosing another `_age`."""


Change = tuple[list[int], list[int]]
"""(who is loaded, who leaves for them)"""


class Lru:
    """By last use, then by id."""

    def __init__(self, num_experts: int) -> None:
        self._last: dict[int, int] = {}
        """Expert -> the call of its last use, in order of last use, then of id."""

    def step(self, experts: Sequence[int], uses: list[int], now: int, free: int) -> Change:
        """Call `now` uses `experts`, distinct and ascending.

        `uses`, [E], is counted up. `free` of the loaded experts get free slots; for each of the others one
        expert leaves that this call does not need. The caller makes sure that there are enough of those.
        """
        last = self._last
        missing = []
        for expert in experts:
            if expert in last:
                del last[expert]
                uses[expert] += 1
            else:
                missing.append(expert)
                uses[expert] = 1
            last[expert] = now
        return missing, self._leave(list(islice(last, max(len(missing) - free, 0))))

    def _leave(self, victims: list[int]) -> list[int]:
        for victim in victims:
            del self._last[victim]
        return victims

    def forget(self, expert: int) -> None:
        """Remove a resident."""
        del self._last[expert]

    def restore(self, expert: int, uses: int, last: int) -> None:
        """Add a resident. Residents are added by ascending last use, then by id."""
        self._last[expert] = last

    def list_ages(self) -> Mapping[int, int]:
        """Return the call of each resident's last use."""
        return self._last


class Aging(Lru):
    """By frequency, then by last use. Frequencies are halved between calls and outlive an expert's stay."""

    def step(self, experts: Sequence[int], uses: list[int], now: int, free: int) -> Change:
        if now % HALVED_EVERY == 0:
            uses[:] = [count >> 1 for count in uses]
        last = self._last
        missing = []
        for expert in experts:
            if expert in last:
                del last[expert]
            else:
                missing.append(expert)
            uses[expert] += 1
            last[expert] = now
        count = len(missing) - free
        if count <= 0:
            return missing, []
        others = islice(last, len(last) - len(experts))
        return missing, self._leave(sorted(others, key=uses.__getitem__)[:count])  # stable: ties by last use


class Lfu:
    """By frequency, then by last use, then by id.

    Most victims were used once; a list of their own holds them. The others are ordered by a bound that only
    rises while an expert stays, so a hit moves nobody: a bound is updated when it comes to the front, and
    those behind it need not be looked at.
    """

    def __init__(self, num_experts: int) -> None:
        self._last = [-1] * num_experts
        """[E]: the call of each resident's last use, -1 for experts that are not resident."""
        self._once: list[int] = []
        """Residents that were used once, by last use, then id."""
        self._often: list[tuple[int, ...]] = []
        """The other residents, ascending: `_bound` of each when it was last computed."""

    def _bound(self, expert: int, uses: int, last: int) -> tuple[int, ...]:
        """Return what orders `_often`; the expert comes last."""
        return uses, last, expert

    def step(self, experts: Sequence[int], uses: list[int], now: int, free: int) -> Change:
        last, once = self._last, self._once
        missing = []
        for expert in experts:
            if last[expert] < 0:
                missing.append(expert)
                uses[expert] = 1
            else:
                count = uses[expert] = uses[expert] + 1
                if count == 2:
                    once.remove(expert)
                    insort(self._often, self._bound(expert, 2, now))
            last[expert] = now
        surplus = len(missing) - free
        victims = self._leave(uses, now, surplus) if surplus > 0 else []
        for victim in victims:
            last[victim] = -1
        once += missing  # only now: `_leave` must not find experts of this call there
        return missing, victims

    def _leave(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        """Take the `count` lowest that call `now` does not need out of `_once` and `_often`."""
        once, often, last = self._once, self._often, self._last
        victims = once[:count]
        del once[:count]
        index = 0
        while len(victims) < count:
            bound, used, expert = often[index]
            if uses[expert] != bound:
                del often[index]
                insort(often, (uses[expert], last[expert], expert), index)
            elif used == now:
                index += 1
            else:
                del often[index]
                victims.append(expert)
        return victims

    def forget(self, expert: int) -> None:
        self._last[expert] = -1
        self._once = [other for other in self._once if other != expert]
        self._often = [bound for bound in self._often if bound[-1] != expert]

    def restore(self, expert: int, uses: int, last: int) -> None:
        self._last[expert] = last
        if uses > 1:
            insort(self._often, self._bound(expert, uses, last))
        else:
            self._once.append(expert)

    def list_ages(self) -> Mapping[int, int]:
        return {expert: last for expert, last in enumerate(self._last) if last >= 0}


class Lfru(Lfu):
    """By frequency over age, then by frequency, then by id.

    The bound is the call in which an expert's score falls to ``1 / _age`` if nobody uses it again. If the
    experts used once that would leave are at least that old, only experts whose bound has passed can have a
    lower score.
    """

    _age = 2
    """At least 2, the age of a single use in the call before. A larger age means fewer experts to look at."""
    _looked = 0
    """Experts looked at since `_age` was chosen, counting only steps that looked at more than a few."""

    def _bound(self, expert: int, uses: int, last: int) -> tuple[int, ...]:
        return last + self._age * uses, expert

    def _leave(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        beyond, last, once = now + 1, self._last, self._once
        victims = once[:count]
        if len(victims) < count:
            others = self._often
        else:
            others = self._find_below(beyond - last[victims[-1]], uses, beyond)
            if not others:
                del once[:count]
                return victims
        scores = [
            (uses[expert] / (beyond - last[expert]), uses[expert], expert, bound)
            for bound, expert in others
            if last[expert] != now
        ]
        scores += [(1 / (beyond - last[expert]), 1, expert, 0) for expert in victims]
        scores.sort()
        often = self._often
        victims = []
        for _, used, expert, bound in scores[:count]:
            victims.append(expert)
            if used > 1:
                del often[bisect_left(often, (bound, expert))]
            else:
                once.remove(expert)
        return victims

    def _find_below(self, age: int, uses: Sequence[int], beyond: int) -> list[tuple[int, ...]]:
        """Return those in `_often` whose score is below ``1 / age`` now."""
        if age < self._age or self._looked > 4 * len(self._often):
            self._choose_age(max(2, age * 3 // 4), uses)
        often, last, base = self._often, self._last, self._age
        limit = beyond - 2 * (age - base)  # each was used twice at least
        below: list[tuple[int, ...]] = []
        index = 0
        while index < len(often) and often[index][0] < limit:
            bound, expert = often[index]
            count, used = uses[expert], last[expert]
            if used + base * count != bound:
                del often[index]
                insort(often, (used + base * count, expert), index)
                continue
            if used + age * count < beyond:
                below.append((bound, expert))
            index += 1
        if index > _FEW:
            self._looked += index
        return below

    def _choose_age(self, age: int, uses: Sequence[int]) -> None:
        """Order `_often` anew. `_looked` makes sure that this is worth its cost."""
        self._age, self._looked = age, 0
        self._often = sorted(
            [self._bound(expert, uses[expert], self._last[expert]) for _, expert in self._often]
        )


POLICIES: Mapping[str, type[Lru | Lfu]] = {"lru": Lru, "lfu": Lfu, "lfru": Lfru, "aging": Aging}
