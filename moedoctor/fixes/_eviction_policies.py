"""Who leaves first: each policy keeps the residents in the orders that it picks victims from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

HALVED_EVERY = 48
"""Calls after which `aging` halves what it has counted."""
_LEVELS = (1, 2, 8, 64)
"""Most residents lie in the last two, and nearly nobody there is old enough to be looked at."""


class Lru:
    """The residents that a call does not need: it takes out those it needs, and puts them in when placed."""

    def __init__(self, num_experts: int) -> None:
        self.last: dict[int, int] = {}
        """Expert -> the call of its last use; by last use, those of one call by id."""

    def take(self, experts: Sequence[int]) -> list[int]:
        """Take out the residents among `experts`; gives the others."""
        last = self.last
        missing = []
        for expert in experts:
            if expert in last:
                del last[expert]
            else:
                missing.append(expert)
        return missing

    def put(self, experts: Sequence[int], uses: list[int], now: int) -> None:
        """Put `experts` in as used once more."""
        last = self.last
        for expert in experts:
            uses[expert] += 1
            last[expert] = now

    def victims(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        """Take out those who leave."""
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
    """By frequency, then by last use. Frequencies may change between calls."""

    def victims(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        return self._leave(sorted(self.last, key=uses.__getitem__)[:count])  # stable: ties by last use


class Lfu(Lru):
    """By frequency, then by last use. Residents lie in levels of frequency, so that few must be looked at."""

    def __init__(self, num_experts: int) -> None:
        self._levels: dict[int, dict[int, int]] = {least: {} for least in _LEVELS}
        """Uses from which on a resident belongs there -> `last` of those who do."""
        self._older = [(least, level) for least, level in self._levels.items() if least > 1]
        self._level_of: list[dict[int, int] | None] = [None] * num_experts

    def take(self, experts: Sequence[int]) -> list[int]:
        level_of = self._level_of
        missing = []
        for expert in experts:
            level = level_of[expert]
            if level is None:
                missing.append(expert)
            else:
                del level[expert]
        return missing

    def put(self, experts: Sequence[int], uses: list[int], now: int) -> None:
        level_of, levels = self._level_of, self._levels
        for expert in experts:
            many = uses[expert] = uses[expert] + 1
            if many in levels:
                level_of[expert] = levels[many]
            level_of[expert][expert] = now  # type: ignore[index]

    def victims(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        lowest: list[int] = []
        for least, level in self._levels.items():
            missing = count - len(lowest)
            if not missing:
                break
            lowest += islice(level, missing) if least == 1 else sorted(level, key=uses.__getitem__)[:missing]
        return self._leave(lowest)

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
    """By frequency over age, then by frequency.

    Most victims are the oldest who were used once. In a level of at least `least` uses only who is more than
    `least` times as old scores lower, and those come first.
    """

    def victims(self, uses: Sequence[int], now: int, count: int) -> list[int]:
        beyond = now + 1
        once = list(islice(self._levels[1].items(), count))
        if len(once) < count:
            every = chain.from_iterable(level.items() for level in self._levels.values())
            return self._leave(_lowest(every, uses, beyond, count))
        age = beyond - once[-1][1]
        others = []
        for least, level in self._older:
            youngest = beyond - least * age
            for expert, used in level.items():
                if used >= youngest:
                    break
                if uses[expert] * age < beyond - used:
                    others.append((expert, used))
        if others:
            return self._leave(_lowest(chain(once, others), uses, beyond, count))
        return self._leave([expert for expert, _ in once])


def _lowest(candidates: Iterable[tuple[int, int]], uses: Sequence[int], beyond: int, count: int) -> list[int]:
    scores = sorted((uses[expert] / (beyond - used), uses[expert], expert) for expert, used in candidates)
    return [expert for _, _, expert in scores[:count]]


POLICIES: Mapping[str, type[Lru]] = {"lru": Lru, "lfu": Lfu, "lfru": Lfru, "aging": Aging}
