"""Threads upstream that a text is like: rows of `threads.yaml` by the words that both have.

The words of a row are those of its patterns, of what it says and of its example texts (`like`). A word counts
by how rare it is among all rows (inverse document frequency), and less in a row of many words.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from moedoctor.diagnose.triage.signatures import load_data

_WORD = re.compile(r"[a-z][a-z\d_.]{2,60}|\d{3,5}\b")
_NO_WORDS = re.compile(r"\\[a-z]|\(\?[:=!<]{1,2}|\{\d{1,4},\d{0,4}\}")
"""Parts of a pattern beside its words."""
_ENDING = re.compile(r"(?<=[a-z]{4})(?:ing|e[sd]|s)\Z")
_TITLE, _KIND, _SHORT = 1.5, 1.25, 6.0
LEAST = 6.5
"""The least score of a row that is named, chosen with reports whose threads are known."""


def find_alike(words: str, kind: str, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the row that `words`, whose first line is a title, are most like; None if it is like none.

    `kind` is the class of the text's error: examples of the same one count for more.
    """
    title, text = _list_words(words.partition("\n")[0]), _list_words(words)

    def weigh(row: Mapping[str, Any]) -> float:
        weights, size = _weigh_rows()[id(row)]
        shared = sum(weights[word] * (_TITLE if word in title else 1) for word in weights.keys() & text)
        return shared / size * (_KIND if any(each["kind"] == kind for each in row.get("like", ())) else 1)

    return max((row for row in rows if weigh(row) >= LEAST), key=weigh, default=None)


@cache
def _weigh_rows() -> Mapping[int, tuple[Mapping[str, float], float]]:
    """Return row -> the weight of each of its words, and the size that their sum is divided by."""
    known = {id(row): _list_words(_join(row)) for row in load_data("threads.yaml")["threads"]}
    counts = Counter(word for words in known.values() for word in words)
    weights = {word: math.log(len(known) / count) ** 2 for word, count in counts.items()}
    own = {name: {word: weights[word] for word in words} for name, words in known.items()}
    return {name: (words, _SHORT + math.sqrt(sum(words.values()))) for name, words in own.items()}


def _join(row: Mapping[str, Any]) -> str:
    patterns = _NO_WORDS.sub(" ", " ".join(row.get("all") or [row["match"]]))
    examples = (each["text"] for each in row.get("like", ()))
    return " ".join((patterns, row.get("try") or row["mends"], *examples))


def _list_words(text: str) -> set[str]:
    found = (part for word in _WORD.findall(text.lower()) for part in {word, *word.split("_")})
    return {word for part in found if len(word := _ENDING.sub("", part.strip("._"))) > 2}
