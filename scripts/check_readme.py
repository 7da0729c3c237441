"""Checks what the documents say about commands against the commands themselves.

``--write`` writes two blocks of README.md; without it they must be what it would write. The block between
``<!-- help:begin -->`` and ``<!-- help:end -->`` is the real ``moedoctor --help``, the block ``failures`` the
catalogue. Every ``moedoctor …`` and ``make …`` that the documents show as code must exist, with its options.

Exit code: 0 everything is true, 1 something is not, 2 a document cannot be checked.
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
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/design.md",
    "docs/expert-cache.md",
    "docs/fleet.md",
    "docs/plugin.md",
    "docs/wsl.md",
)

_FENCE = re.compile(r"^\s*(```|~~~)")
_INLINE = re.compile(r"`([^`\n]+)`")
_TARGET = re.compile(r"^([A-Za-z][\w-]*)\s*:(?!=)", re.MULTILINE)
_COMMENT = re.compile(r"(^|\s)#.*")
_ASSIGNMENT = re.compile(r"^\w+=")
_PLACEHOLDER = re.compile(r"[A-Z_\[<|…]")


class Shown(NamedTuple):
    """One command as a document shows it."""

    place: str
    words: tuple[str, ...]


def help_text(*words: str) -> str | None:
    """Return what ``moedoctor WORDS --help`` prints in 100 columns without colour; None if it fails."""
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


def with_block(document: str, name: str, content: str) -> str:
    """Return `document` with `content` in the block `name`. Raises ValueError if that is not marked once."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    parts = re.split(f"({begin}|{end})", document)
    if parts[1::2] != [begin, end]:
        raise ValueError(f"README.md: mark the {name} once, with {begin} before and {end} after it")
    return f"{parts[0]}{begin}\n{content}\n{end}{parts[4]}"


def failures() -> str:
    """Return the catalogue as a table."""
    from moedoctor.commands.list import readme_table

    return readme_table()


def shown_commands(document: Path) -> Iterator[Shown]:
    """Give every ``moedoctor`` and ``make`` command in code fences and inline code.

    If a fence has lines that begin with ``$ ``, the other lines are output.
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
    """Return the words of a ``moedoctor`` or ``make`` command; nothing for anything else."""
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
    """Return what is untrue about a shown command, or None. `helps` remembers the help of each command."""
    program, *arguments = shown.words
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]  # what follows is another program's command line
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
    missing = [name for name in options if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", known)]
    name = f"moedoctor {command}".strip()
    return f"{shown.place}: '{name}' has no option {missing[0]}" if missing else None


def main(arguments: list[str]) -> int:
    """Check; with ``--write`` update the blocks first."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    help_now = help_text()
    if help_now is None:
        print("moedoctor --help fails; run it to see why", file=sys.stderr)
        return 2
    blocks = {"help": f"```text\n$ moedoctor --help\n{help_now}\n```", "failures": failures()}
    written, problems = text, []
    try:
        for name, content in blocks.items():
            if with_block(text, name, content) != text:
                problems.append(f"README.md: the {name} block is not the real one: make readme")
            written = with_block(written, name, content)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if "--write" in arguments and problems:
        from moedoctor.processes.files import write

        write(readme, written)
        problems = []
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    helps: dict[str, str | None] = {"": help_now}
    for document in (ROOT / name for name in DOCUMENTS if (ROOT / name).exists()):
        shown = dict.fromkeys(shown_commands(document))
        problems += [wrong for command in shown if (wrong := problem(command, targets, helps))]
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
