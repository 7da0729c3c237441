"""Text that a stranger may have written, secrets in it, and what no output may hold."""

import os
import re
import socket
from pathlib import Path

TEXTS = (
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x1b]8;;https://example.org\x1b\\link", "\x9b2J",
    "\x9d0;title\x9c", "::error file=x::planted", "\n::set-output name=x::y", "\r\n \t::add-mask::e",
    "##[error]planted", "##vso[task.setvariable variable=x]y", "\u202egnirts\u202c",
    "\u2067gnirts\u2069", "\u2028::warning::x\x85", "\x00", "\x7f", "a\rb", "|cell|<script>alert(1)</script>",
    "<img src=x onerror=alert(1)> ![x](https://example.org/x.png) [y](javascript:x) @somebody `@else",
    "--> ]]> &amp; <!-- ", "`${jndi:ldap://x}`", "\ud800", "é中🙂", "9" * 5000, "x" * 100_000,
    "many words " * 500, "../" * 50 + "etc/passwd", "[" * 3000, "[red]x[/] [/]", "{{7*7}}", "$x$ $\\frac{$",
    "%s%n" * 50, "-", "",
)  # fmt: skip
OF_NAMES, OF_KEYS = (
    Path(__file__).with_name(f"secret_{kind}.txt").read_text("utf-8").splitlines()
    for kind in ("names", "keys")
)
"""Texts that hold a secret word, or a secret key of 36 letters and digits, at {}."""
ACTED_ON = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal acts on. Only line ends are ours."""
COMMAND = re.compile(r"^[^\S\n]*::|##\w*\[", re.MULTILINE)
"""A command to a CI server that reads a log: GitHub's runner drops the spaces before ``::``."""
_MOST_ECHOED = 200


def problem(text: str) -> str | None:
    """Return what a terminal or CI server would act on in `text`, with the text around it."""
    match = ACTED_ON.search(text) or COMMAND.search(text)
    return match and f"{match.group()!r} in {text[max(0, match.start() - 40) : match.end() + 20]!r}"


def echoes_too_much(message: str, given: str) -> bool:
    """Return whether a message holds more than 200 characters of an input in one piece."""
    starts = range(0, len(given) - _MOST_ECHOED, 50)
    return any(given[start : start + _MOST_ECHOED + 1] in message for start in starts)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # a name of at most 107 bytes
