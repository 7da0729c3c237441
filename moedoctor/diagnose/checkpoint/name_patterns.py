"""Patterns of module names that a stranger may have written.

compressed-tensors writes regular expressions, and one of them may take forever on a name. So none is run:
those made of literals, dots, ``.*`` and alternatives are translated to wildcards; others are not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate
from itertools import product

_MOST_ALTERNATIVES = 512
_MOST_CHARACTERS = 1_000
_MOST_WILDCARDS = 10_000
"""Each takes 0.2 ms to prepare."""
_TOKEN = re.compile(r"\.\*\??|\.\+\??|\\d\+?|\\\W|\[0-9\]\+?|\((?:\?:)?[\w.\\|-]{1,400}\)|[\w./:-]|\$|\^")


class Patterns:
    """A list of patterns of module names, and the patterns that were not understood."""

    def __init__(self, patterns: Sequence[str], substrings: bool) -> None:
        """With `substrings`, a plain name also matches all modules that contain it."""
        wildcards: list[str] = []
        self.not_read: list[str] = []
        self._plain: list[str] = []
        self._substrings = substrings
        for pattern in patterns:
            special = pattern.startswith("re:") or "*" in pattern or "?" in pattern
            if special and (len(pattern) > _MOST_CHARACTERS or len(wildcards) >= _MOST_WILDCARDS):
                self.not_read.append(pattern)
            elif pattern.startswith("re:"):
                translated = _translate(pattern[3:])
                if translated is None:
                    self.not_read.append(pattern)
                else:
                    wildcards += translated
            elif special:
                wildcards.append(pattern)
            elif pattern:
                self._plain.append(pattern)
        self._exact = frozenset(self._plain)
        self._compiled = [re.compile(translate(wildcard)) for wildcard in dict.fromkeys(wildcards)]

    def match(self, module: str) -> bool:
        """Return True if a pattern names `module` or a module that contains it."""
        if module in self._exact:
            return True
        if self._substrings:
            if any(name in module for name in self._plain):
                return True
        else:
            parts = module.split(".")
            if any(".".join(parts[:size]) in self._exact for size in range(1, len(parts))):
                return True
        return any(pattern.match(module) for pattern in self._compiled)


def _translate(expression: str) -> list[str] | None:
    """Translate a simple regular expression to wildcard patterns; return None for others."""
    choices: list[list[str]] = []
    at, open_end, count = 0, True, 1
    while at < len(expression):
        token = _TOKEN.match(expression, at)
        if token is None:
            return None
        text, at = token[0], token.end()
        if text == "$":
            if at != len(expression):
                return None
            open_end = False
        elif text == "^":
            if at != 1:
                return None
        elif text[0] == "(":
            inner = text.removeprefix("(").removeprefix("?:")[:-1]
            choices.append([choice.replace("\\", "") for choice in inner.split("|")])
        elif text.startswith((".*", ".+")):
            choices.append(["*" if text[1] == "*" else "?*"])
        elif text.startswith(("\\d", "[0-9]")):
            choices.append(["[0-9]*" if text.endswith("+") else "[0-9]"])
        elif text == ".":
            choices.append(["?"])
        else:
            choices.append([text.removeprefix("\\")])
        count *= len(choices[-1]) if choices else 1
        if count > _MOST_ALTERNATIVES:
            return None
    end = "*" if open_end else ""  # a regular expression need not match to the end
    return ["".join(choice) + end for choice in product(*choices)]
