"""Who leaves first: each policy keeps the residents in the orders that it picks victims from."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

HALVED_EVERY = 48
"""Calls after which `aging` halves what it has counted."""
_FEW = 8
"""Residents that `lfru` may look at without another `_age`."""


class Residents(Protocol):
    """The residents under one policy."""

    def step(
        self, experts: Sequence[int], uses: list[int], now: int, free: int
    ) -> tuple[list[int], list[int]]:
        """Call `now` uses `experts`, distinct and ascending: (who becomes a resident, who leaves for them).

        `uses`, [E], is counted up. Of those who become residents, `free` get the slots that are free; for
        each of the others one leaves that is not of this call. The caller sees to it that there are so many.
        """

    def forget(self, expert: int) -> None:
        """Take out a resident."""

    def restore(self, expert: int, uses: int, last: int) -> None:
        """Put a resident in; they come by ascending last use, then id."""

    def ages(self) -> Mapping[int, int]:
        """The call of the last use of each resident."""


class Lru:
    """By last use, then by id."""

    def __init__(self, num_experts: int) -> None:
        self._last: dict[int, int] = {}
        """Expert -> the call of its last use; by last use, those of one call by id."""

    def step(
        self, experts: Sequence[int], uses: list[int], now: int, free: int
    ) -> tuple[list[int], list[int]]:
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
        last = self._last
        for victim in victims:
            del last[victim]
        return victims

    def forget(self, expert: int) -> None:
        del self._last[expert]

    def restore(self, expert: int, uses: int, last: int) -> None:
        self._last[expert] = last

    def ages(self) -> Mapping[int, int]:
        return self._last


class Aging(Lru):
    """By frequency, then by last use. Frequencies are halved between calls, and outlive a stay."""

    def step(
        self, experts: Sequence[int], uses: list[int], now: int, free: int
    ) -> tuple[list[int], list[int]]:
        if now % HALVED_EVERY == 0:
            uses[:] = [one >> 1 for one in uses]
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
        earlier = islice(last, len(last) - len(experts))
        return missing, self._leave(sorted(earlier, key=uses.__getitem__)[:count])  # stable: ties by last use


class Lfu:
    """By frequency, then by last use, then by id.

    Most victims were used once, and lie in a queue of their own. The others are ordered by a bound that only
    rises while an expert stays. So a hit moves nobody: a bound is brought up to date when it comes to the
    front, and those behind it need not be looked at.
    """

    def __init__(self, num_experts: int) -> None:
        self._last = [-1] * num_experts
        """[E]: the call of each resident's last use, -1 for others."""
        self._once: list[int] = []
        """Residents that were used once, by last use, then id."""
        self._often: list[tuple[int, ...]] = []
        """The other residents, ascending: what `_bound` was for each when it was last looked at."""

    def _bound(self, expert: int, uses: int, last: int) -> tuple[int, ...]:
        """What orders `_often`; the expert comes last."""
        return uses, last, expert

    def step(
        self, experts: Sequence[int], uses: list[int], now: int, free: int
    ) -> tuple[list[int], list[int]]:
        last, once = self._last, self._once
        missing = []
        for expert in experts:
            if last[expert] < 0:
                missing.append(expert)
                uses[expert] = 1
            else:
                many = uses[expert] = uses[expert] + 1
                if many == 2:
                    once.remove(expert)
                    insort(self._often, self._bound(expert, 2, now))
            last[expert] = now
        count = len(missing) - free
        victims = self._leave(uses, now, count) if count > 0 else []
        for victim in victims:
            last[victim] = -1
        once += missing  # only now: `_leave` finds nobody of this call there
        return missing, victims

    def _leave(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        """Take the `count` lowest that are not of call `now` out of `_once` and `_often`."""
        once, often, last = self._once, self._often, self._last
        victims = once[:count]
        del once[:count]
        index = 0
        while len(victims) < count:
            many, used, expert = often[index]
            if uses[expert] != many:
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
        self._once = [one for one in self._once if one != expert]
        self._often = [bound for bound in self._often if bound[-1] != expert]

    def restore(self, expert: int, uses: int, last: int) -> None:
        self._last[expert] = last
        if uses > 1:
            insort(self._often, self._bound(expert, uses, last))
        else:
            self._once.append(expert)

    def ages(self) -> Mapping[int, int]:
        return {expert: last for expert, last in enumerate(self._last) if last >= 0}


class Lfru(Lfu):
    """By frequency over age, then by frequency, then by id.

    The bound is the call in which an expert is down to ``1 / _age`` if nobody uses it again. Where those used
    once that would leave are at least that old, only experts whose bound has passed can be lower than they.
    """

    _age = 2
    """At least 2, the age of a single use in the call before. The larger, the fewer must be looked at."""
    _looked = 0
    """At how many since `_age` was chosen, where it was more than a few."""

    def _bound(self, expert: int, uses: int, last: int) -> tuple[int, ...]:
        return last + self._age * uses, expert

    def _leave(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        beyond, last, once = now + 1, self._last, self._once
        victims = once[:count]
        if len(victims) < count:
            others = self._often
        else:
            others = self._below(beyond - last[victims[-1]], uses, beyond)
            if not others:
                del once[:count]
                return victims
        scores = [
            (uses[one] / (beyond - last[one]), uses[one], one, bound)
            for bound, one in others
            if last[one] != now
        ]
        scores += [(1 / (beyond - last[one]), 1, one, 0) for one in victims]
        scores.sort()
        often = self._often
        victims = []
        for _, many, expert, bound in scores[:count]:
            victims.append(expert)
            if many > 1:
                del often[bisect_left(often, (bound, expert))]
            else:
                once.remove(expert)
        return victims

    def _below(self, age: int, uses: Sequence[int], beyond: int) -> list[tuple[int, ...]]:
        """Those in `_often` that are worth less than ``1 / age`` now."""
        if age < self._age or self._looked > 4 * len(self._often):
            self._choose_age(max(2, age * 3 // 4), uses)
        often, last, base = self._often, self._last, self._age
        limit = beyond - 2 * (age - base)  # each was used twice at least
        found: list[tuple[int, ...]] = []
        index = 0
        while index < len(often) and often[index][0] < limit:
            bound, expert = often[index]
            many, used = uses[expert], last[expert]
            if used + base * many != bound:
                del often[index]
                insort(often, (used + base * many, expert), index)
                continue
            if used + age * many < beyond:
                found.append((bound, expert))
            index += 1
        if index > _FEW:
            self._looked += index
        return found

    def _choose_age(self, age: int, uses: Sequence[int]) -> None:
        """Order `_often` anew; paid for by what `_looked` counts."""
        self._age, self._looked = age, 0
        last = self._last
        self._often = sorted([(last[one] + age * uses[one], one) for _, one in self._often])


POLICIES: Mapping[str, Callable[[int], Residents]] = {"lru": Lru, "lfu": Lfu, "lfru": Lfru, "aging": Aging}
