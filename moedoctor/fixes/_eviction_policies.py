"""Who leaves first: each policy keeps the residents in the orders that it picks victims from."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

HALVED_EVERY = 48
"""Calls after which `aging` halves what it has counted."""


class Residents(Protocol):
    """The residents under one policy."""

    def step(
        self, experts: Sequence[int], uses: list[int], now: int, free: int
    ) -> tuple[list[int], list[int]]:
        """Call `now` uses `experts`, distinct and ascending: (who becomes a resident, who leaves for them).

        `uses`, [E], is counted up. Of those who become residents, `free` get the slots that are free; for
        each of the others one leaves who is not of this call. The caller sees to it that there are so many.
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

    Most victims were used once, and lie in a queue of their own. The others lie in the order of a bound that
    each expert's rank can only rise above: a hit need not move anyone, and a bound is brought up to date when
    it comes to the front.
    """

    def __init__(self, num_experts: int) -> None:
        self._last = [-1] * num_experts
        """[E]: the call of each resident's last use, -1 for others."""
        self._once: dict[int, None] = {}
        """Residents that were used once, by last use, then id."""
        self._often: list[tuple[int, ...]] = []
        """The other residents, ascending, each as its `_bound` was when it was last looked at."""

    @staticmethod
    def _bound(expert: int, uses: int, last: int) -> tuple[int, ...]:
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
                uses[expert] += 1
                if expert in once:
                    del once[expert]
                    insort(self._often, self._bound(expert, uses[expert], now))
            last[expert] = now
        count = len(missing) - free
        victims = []
        if count > 0:
            victims = self._lowest(uses, now, count)
            often = False
            for victim in victims:
                last[victim] = -1
                if victim in once:
                    del once[victim]
                else:
                    often = True
            if often:
                self._drop()
        for (
            expert
        ) in missing:  # only now, so that nobody in the queue is of this call when victims are picked
            once[expert] = None
        return missing, victims

    def _lowest(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        """The `count` lowest who are not of call `now`; none in `_once` is."""
        lowest = list(islice(self._once, count))
        often, last = self._often, self._last
        index = 0
        while len(lowest) < count:
            expert = often[index][-1]
            bound = self._bound(expert, uses[expert], last[expert])
            if bound != often[index]:
                del often[index]
                insort(often, bound, index)
                continue
            if last[expert] != now:
                lowest.append(expert)
            index += 1
        return lowest

    def _drop(self) -> None:
        """Take out of `_often` who is not a resident any more."""
        last = self._last
        self._often = [bound for bound in self._often if last[bound[-1]] >= 0]

    def forget(self, expert: int) -> None:
        self._last[expert] = -1
        self._once.pop(expert, None)
        self._drop()

    def restore(self, expert: int, uses: int, last: int) -> None:
        self._last[expert] = last
        if uses > 1:
            insort(self._often, self._bound(expert, uses, last))
        else:
            self._once[expert] = None

    def ages(self) -> Mapping[int, int]:
        return {expert: last for expert, last in enumerate(self._last) if last >= 0}


class Lfru(Lfu):
    """By frequency over age, then by frequency, then by id.

    The bound is the age at which an expert has sunk to 1/2, as a call: who was used once is no higher than that.
    """

    @staticmethod
    def _bound(expert: int, uses: int, last: int) -> tuple[int, ...]:
        return last + 2 * uses, expert

    def _lowest(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        beyond, last = now + 1, self._last
        lowest = list(islice(self._once, count))
        if len(lowest) == count:
            others = self._as_low_as(beyond - last[lowest[-1]], uses, beyond)
            if not others:
                return lowest
        else:
            others = [expert for _, expert in self._often if last[expert] != now]
        others += lowest
        scores = sorted([(uses[one] / (beyond - last[one]), uses[one], one) for one in others])
        return [expert for _, _, expert in scores[:count]]

    def _as_low_as(self, age: int, uses: Sequence[int], beyond: int) -> list[int]:
        """Who was used often and is lower than who was used once and is `age`, at least 2, old."""
        often, last = self._often, self._last
        limit = beyond - 2 * (age - 2)
        found = []
        index = 0
        while index < len(often) and often[index][0] < limit:
            bound, expert = often[index]
            many, used = uses[expert], last[expert]
            if used + 2 * many != bound:
                del often[index]
                insort(often, (used + 2 * many, expert), index)
                continue
            if used + many * age < beyond:
                found.append(expert)
            index += 1
        return found


POLICIES: Mapping[str, type[Lru] | type[Lfu]] = {"lru": Lru, "lfu": Lfu, "lfru": Lfru, "aging": Aging}
