"""Who leaves first: each policy keeps the residents in the orders that it picks victims from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

HALVED_EVERY = 48
"""Calls after which `aging` halves what it has counted."""
_LEVELS = (1, 2, 8, 64)
"""Most residents lie in the last two, and nearly nobody there is old enough to be looked at."""


class Lru:
    """The residents, each with the call of its last use. Those of the present call never leave."""

    def __init__(self, num_experts: int) -> None:
        self.last: dict[int, int] = {}
        """Expert -> the call of its last use; by last use, those of one call by id."""

    def admit(self, experts: Sequence[int], uses: list[int], now: int) -> list[int]:
        """Count that call `now` uses `experts`; gives those that become residents by it."""
        last = self.last
        missing = []
        for expert in experts:
            if expert in last:
                del last[expert]
                uses[expert] += 1
            else:
                missing.append(expert)
                uses[expert] = 1
            last[expert] = now
        return missing

    def victims(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        """Take out those who leave; the caller sees to it that `count` residents are not of call `now`."""
        return self._leave(list(islice(self.last, count)))

    def _leave(self, victims: list[int]) -> list[int]:
        last = self.last
        for victim in victims:
            del last[victim]
        return victims

    def forget(self, expert: int) -> None:
        """Take out a resident."""
        self._leave([expert])

    def restore(self, expert: int, uses: int, last: int) -> None:
        """Put a resident in; they come by ascending last use, then id."""
        self.last[expert] = last

    def ages(self) -> Mapping[int, int]:
        """The call of the last use of each resident."""
        return self.last


class Aging(Lru):
    """By frequency, then by last use. Frequencies may change between calls, and outlive a stay."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self._present = 0
        """Residents of the present call, the last ones in `last`."""

    def admit(self, experts: Sequence[int], uses: list[int], now: int) -> list[int]:
        last = self.last
        missing = []
        for expert in experts:
            if expert in last:
                del last[expert]
            else:
                missing.append(expert)
            uses[expert] += 1
            last[expert] = now
        self._present = len(experts)
        return missing

    def victims(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        earlier = islice(self.last, len(self.last) - self._present)
        return self._leave(sorted(earlier, key=uses.__getitem__)[:count])  # stable: ties by last use


class Lfu(Lru):
    """By frequency, then by last use. Residents lie in levels of frequency, so that few must be looked at."""

    def __init__(self, num_experts: int) -> None:
        self._levels: dict[int, dict[int, int]] = {least: {} for least in _LEVELS}
        """Uses from which on a resident belongs there -> `last` of those who do."""
        self._once = self._levels[1]
        self._older = [(least, level) for least, level in self._levels.items() if least > 1]
        self._level_of: list[dict[int, int] | None] = [None] * num_experts

    def admit(self, experts: Sequence[int], uses: list[int], now: int) -> list[int]:
        level_of, levels, once = self._level_of, self._levels, self._once
        missing = []
        for expert in experts:
            level = level_of[expert]
            if level is None:
                missing.append(expert)
                uses[expert] = 1
                level_of[expert] = once
                once[expert] = now
            else:
                del level[expert]
                many = uses[expert] = uses[expert] + 1
                if many in levels:
                    level = level_of[expert] = levels[many]
                level[expert] = now
        return missing

    def victims(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        lowest = self._earlier(self._once, now, count)
        for _, level in self._older:
            missing = count - len(lowest)
            if not missing:
                break
            lowest += sorted(self._earlier(level, now), key=uses.__getitem__)[:missing]
        return self._leave(lowest)

    @staticmethod
    def _earlier(level: Mapping[int, int], now: int, count: int | None = None) -> list[int]:
        """The first who are not of call `now`, by last use."""
        first = list(islice(level, count))
        while first and level[first[-1]] == now:
            first.pop()
        return first

    def _leave(self, victims: list[int]) -> list[int]:
        level_of = self._level_of
        for victim in victims:
            del level_of[victim][victim]  # type: ignore[union-attr]
            level_of[victim] = None
        return victims

    def restore(self, expert: int, uses: int, last: int) -> None:
        level = self._levels[max(least for least in _LEVELS if least <= max(uses, 1))]
        level[expert] = last
        self._level_of[expert] = level

    def ages(self) -> Mapping[int, int]:
        return {expert: last for level in self._levels.values() for expert, last in level.items()}


class Lfru(Lfu):
    """By frequency over age, then by frequency, then by id.

    Most victims are the oldest who were used once. In a level of at least `least` uses only who is at least
    `least` times as old scores as low, and those come first.
    """

    def victims(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        beyond, once = now + 1, self._once
        lowest = list(islice(once, count))
        if len(lowest) < count or once[lowest[-1]] == now:
            return self._leave(self._among_all(uses, now, count))
        age = beyond - once[lowest[-1]]
        others = []
        for least, level in self._older:
            youngest = beyond - least * age
            for expert, used in level.items():
                if used >= youngest:
                    break
                if uses[expert] * age < beyond - used:
                    others.append((uses[expert] / (beyond - used), uses[expert], expert))
        if others:
            others += [(1 / (beyond - once[expert]), 1, expert) for expert in lowest]
            others.sort()
            return self._leave([expert for _, _, expert in others[:count]])
        level_of = self._level_of
        for victim in lowest:  # as `_leave`, which is slower
            del once[victim]
            level_of[victim] = None
        return lowest

    def _among_all(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        """As `victims`, where too few were used once."""
        beyond = now + 1
        scores: list[tuple[float, int, int]] = []
        for least, level in self._levels.items():
            highest = math.inf
            if len(scores) >= count:
                scores.sort()
                highest = scores[count - 1][0]
            for expert, used in level.items():
                age = beyond - used
                if used == now or least / age >= highest:
                    break
                scores.append((uses[expert] / age, uses[expert], expert))
        scores.sort()
        return [expert for _, _, expert in scores[:count]]


POLICIES: Mapping[str, type[Lru]] = {"lru": Lru, "lfu": Lfu, "lfru": Lfru, "aging": Aging}
