"""How much of a long log is looked at closely: what each telling word may cost, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST = 1_000
"""Patterns tried on account of an anchor before the log must be long enough for more."""
FIRST_RARE = 2_000
"""The same for a rare anchor, which names a failure."""
_BYTES_EACH = 80_000
_BYTES_EACH_RARE = 40_000
_AWAKE = 0.25
_HITS_EACH = 32


@dataclass
class Account:
    """What may be spent on the lines that hold one word: so much at first, then more with the bytes read.

    An empty account sleeps until a quarter of the first sum is there again: a log that says "expert" in every
    line is not searched for it block by block, and what it says about other things is found all the same.
    """

    anchor: bytes
    first: int
    bytes_each: int
    spent: float = 0.0
    asleep: bool = False

    def awake(self, bytes_read: int) -> bool:
        """Whether the word is worth a search after so many bytes."""
        left = self.first + bytes_read / self.bytes_each - self.spent
        if left <= 0:
            self.asleep = True
        elif left >= _AWAKE * self.first:
            self.asleep = False
        return not self.asleep

    def spend(self, patterns: float) -> None:
        """Charge so many patterns tried."""
        self.spent += patterns


def accounts(anchors: Sequence[bytes], rare: Sequence[bytes]) -> tuple[Account, ...]:
    """One for each word, those of the rare anchors first."""
    others = (one for one in anchors if one not in rare)
    return (
        *(Account(one, FIRST_RARE, _BYTES_EACH_RARE) for one in rare),
        *(Account(one, FIRST, _BYTES_EACH) for one in others),
    )


def lines_holding(text: bytes, account: Account) -> list[int]:
    """Positions of the lines of `text`, from 0, that hold the word of `account`, in order."""
    anchor, found = account.anchor, list[int]()
    position, start, at = 0, 0, text.find(account.anchor)
    while at >= 0:
        position += text.count(b"\n", start, at)
        found.append(position)
        start = text.find(b"\n", at)
        at = text.find(anchor, start) if start >= 0 else -1
    account.spend(len(found) / _HITS_EACH)
    return found
