"""Module names against the patterns of a checkpoint's config, which nobody vouches for.

compressed-tensors writes regular expressions. One of them may take for ever on a name, so none is run: those
made of literals, dots, ``.*`` and alternatives are translated to wildcards, others are reported as not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate
from itertools import product

_MOST_ALTERNATIVES = 512
_TOKEN = re.compile(r"\.\*\??|\.\+\??|\\d\+?|\\\W|\[0-9\]\+?|\((?:\?:)?[\w.\\|-]{1,400}\)|[\w./:-]|\$|\^")


class Patterns:
    """Whether a module is named by a list of patterns, and the patterns that were not understood."""

    def __init__(self, patterns: Sequence[str], substrings: bool) -> None:
        """`substrings`: vLLM takes a plain name of ModelOpt's list for all modules that contain it."""
        wildcards: list[str] = []
        self.not_read: list[str] = []
        self._plain: list[str] = []
        self._substrings = substrings
        for pattern in patterns:
            if pattern.startswith("re:"):
                found = _wildcards(pattern[3:])
                if found is None:
                    self.not_read.append(pattern)
                else:
                    wildcards += found
            elif "*" in pattern or "?" in pattern:
                wildcards.append(pattern)
            elif pattern:
                self._plain.append(pattern)
        self._exact = frozenset(self._plain)
        self._compiled = [re.compile(translate(one)) for one in dict.fromkeys(wildcards)]

    def match(self, module: str) -> bool:
        """Whether `module` or what contains it is named."""
        if module in self._exact:
            return True
        if self._substrings:
            if any(one in module for one in self._plain):
                return True
        elif any(parent in self._exact for parent in _parents(module)):
            return True
        return any(one.match(module) for one in self._compiled)


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:size]) for size in range(1, len(parts))]


def _wildcards(expression: str) -> list[str] | None:
    """Wildcard patterns that mean the same as a simple regular expression; None for others."""
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
            choices.append([one.replace("\\", "") for one in inner.split("|")])
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
    return ["".join(one) + end for one in product(*choices)]
