"""Checks what the documents say about commands against the commands themselves.

Two blocks of README.md are written by ``--write`` and must otherwise be what it would write: the one between
``<!-- help:begin -->`` and ``<!-- help:end -->`` is the real ``moedoctor --help``, the one between the marks
``failures`` the catalogue. Every ``moedoctor …`` and ``make …`` that README.md and CONTRIBUTING.md show as
code must exist, with the options that they name.

Exit code: 0 all true, 1 something is not, 2 a document cannot be checked.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md")

_FENCE = re.compile(r"^\s*(```|~~~)")
_INLINE = re.compile(r"`([^`\n]+)`")
_TARGET = re.compile(r"^([A-Za-z][\w-]*)\s*:(?!=)", re.MULTILINE)
_COMMENT = re.compile(r"(^|\s)#.*")
_ASSIGNMENT = re.compile(r"^\w+=")
_PLACEHOLDER = re.compile(r"[A-Z_\[<|…]")


class Block(NamedTuple):
    """A part of README.md that is written by itself."""

    name: str
    """As in its marks, ``<!-- NAME:begin -->``."""
    content: str

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}:begin -->"

    @property
    def end(self) -> str:
        return f"<!-- {self.name}:end -->"

    @property
    def text(self) -> str:
        """The block with its marks, as it must be."""
        return f"{self.begin}\n{self.content}\n{self.end}"

    def marked_once(self, document: str) -> bool:
        """Whether `document` has this block, once."""
        counts = document.count(self.begin), document.count(self.end)
        return counts == (1, 1) and document.index(self.begin) < document.index(self.end)

    def standing_in(self, document: str) -> str:
        """The block with its marks, as it is."""
        return document[document.index(self.begin) : document.index(self.end) + len(self.end)]


class Shown(NamedTuple):
    """One command as a document shows it."""

    place: str
    words: tuple[str, ...]


def help_text(*words: str) -> str | None:
    """What ``moedoctor WORDS --help`` prints, 100 columns wide and without colour; None where it fails."""
    keep = {
        name: value
        for name, value in os.environ.items()
        if name not in {"GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"}
    }
    width = {
        "COLUMNS": "100",
        "TERMINAL_WIDTH": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONIOENCODING": "utf-8",
    }
    script = Path(sys.executable).with_name("moedoctor")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "moedoctor"]
    answer = subprocess.run(
        [*command, *words, "--help"],
        capture_output=True,
        encoding="utf-8",
        env={**keep, **width},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    if answer.returncode:
        return None
    return "\n".join(line.rstrip() for line in answer.stdout.strip().splitlines())


def blocks(help_now: str) -> tuple[Block, ...]:
    """Every block of README.md, as it must be."""
    return Block("help", f"```text\n$ moedoctor --help\n{help_now}\n```"), Block("failures", failures())


def failures() -> str:
    """The catalogue as a table."""
    from moedoctor.commands.list import readme_table

    return readme_table()


def shown_commands(document: Path) -> Iterator[Shown]:
    """Every ``moedoctor`` and ``make`` command in code fences and inline code.

    In a fence that has lines beginning with ``$ `` the others are output.
    """
    fence: list[tuple[int, str]] | None = None
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        if _FENCE.match(line):
            yield from _commands(document.name, _typed(fence or []))
            fence = [] if fence is None else None
        elif fence is not None:
            fence.append((number, line.strip()))
        else:
            yield from _commands(document.name, [(number, code) for code in _INLINE.findall(line)])


def _typed(fence: list[tuple[int, str]]) -> list[tuple[int, str]]:
    prompted = [(number, line[2:]) for number, line in fence if line.startswith("$ ")]
    return prompted or fence


def _commands(document: str, lines: list[tuple[int, str]]) -> Iterator[Shown]:
    for number, line in lines:
        for part in re.split(r"\|\|?|&&|;", line):
            words = _words(part)
            if words:
                yield Shown(f"{document}:{number}", words)


def _words(part: str) -> tuple[str, ...]:
    """The words of a ``moedoctor`` or ``make`` command; empty for anything else."""
    text = _COMMENT.sub("", part).strip()
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    if words[:3] in (["python", "-m", "moedoctor"], ["python3", "-m", "moedoctor"]):
        words = words[2:]
    if not words or words[0].endswith("/") or Path(words[0]).name not in ("moedoctor", "make"):
        return ()
    return (Path(words[0]).name, *words[1:])


def problem(shown: Shown, targets: set[str], helps: dict[str, str | None]) -> str | None:
    """What is untrue about a shown command; None where it stands. `helps` is filled as commands are met."""
    program, *arguments = shown.words
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]  # behind it stands another program's command line
    if program == "make":
        unknown = [
            word for word in arguments if not word.startswith("-") and "=" not in word and word not in targets
        ]
        return f"{shown.place}: the Makefile has no target '{unknown[0]}'" if unknown else None
    command = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if _PLACEHOLDER.match(command):
        command = ""
    if command not in helps:
        helps[command] = help_text(*([command] if command else []))
    known = helps[command]
    if known is None:
        return f"{shown.place}: moedoctor has no command '{command}'"
    options = [word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)]
    missing = [one for one in options if not re.search(rf"(?<![\w-]){re.escape(one)}(?![\w-])", known)]
    name = f"moedoctor {command}".strip()
    return f"{shown.place}: '{name}' has no option {missing[0]}" if missing else None


def main(arguments: list[str]) -> int:
    """Check, or with ``--write`` bring the blocks up to date first."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    help_now = help_text()
    if help_now is None:
        print("moedoctor --help fails; run it to see why", file=sys.stderr)
        return 2
    wanted = blocks(help_now)
    for block in wanted:
        if not block.marked_once(text):
            marks = f"with {block.begin} before and {block.end} after it"
            print(f"README.md: mark the {block.name} once, {marks}", file=sys.stderr)
            return 2
    if "--write" in arguments:
        written = text
        for block in wanted:
            written = written.replace(block.standing_in(written), block.text)
        if written != text:
            readme.write_text(written, encoding="utf-8")
            text = written

    problems = [
        f"README.md: the {block.name} block is not the real one: make readme"
        for block in wanted
        if block.standing_in(text) != block.text
    ]
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    helps: dict[str, str | None] = {"": help_now}
    for document in (ROOT / name for name in DOCUMENTS if (ROOT / name).exists()):
        shown = dict.fromkeys(shown_commands(document))
        problems += [wrong for one in shown if (wrong := problem(one, targets, helps))]
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
