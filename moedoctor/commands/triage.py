"""`moedoctor triage FILE|-`."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.diagnose.triage.triage import Finding, Triage, triage
from moedoctor.entries import entries
from moedoctor.redaction import Redactor
from moedoctor.reporters.output import OutputError, check_writable, write
from moedoctor.text import escape, shorten

FORMATS = ("table", "json", "markdown")
MOST_BYTES = 200 * 2**20


def triage_command(path: str, format: str, output: Path | None) -> int:
    """Print the known failures in the file `path`, or in stdin where it is `-`; 1 where there is one."""
    if format not in FORMATS:
        raise InputError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    with as_input_error(OutputError):
        check_writable(output)
    redactor = Redactor.of_this_process()
    if path == "-":
        if sys.stdin is None:
            raise InputError("stdin is closed, expected a log or report")
        result = _read(sys.stdin.buffer, "stdin", redactor)
    else:
        if output is not None and output.exists() and os.path.exists(path) and os.path.samefile(path, output):
            raise InputError(f"{_shown(path)}: is also the output, expected another file with -o")
        with _opened(path) as file:
            result = _read(file, _shown(path), redactor)
    text = _render(result, format)
    if output is None:
        print(text)
    else:
        with as_input_error(OutputError):
            write(output, text + "\n")
        print(f"moedoctor: {_count(result.findings)}; written to {output}", file=sys.stderr)
    return 1 if result.findings else 0


class _Bounded(io.RawIOBase):
    """A stream that refuses to give more than 200 MB."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._left = MOST_BYTES

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        block = self._stream.read(size)
        self._left -= len(block)
        if self._left < 0:
            raise InputError(_too_large(self._name))
        return block


def _read(stream: BinaryIO, name: str, redactor: Redactor) -> Triage:
    try:
        return triage(_Bounded(stream, name), redactor)  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({_reason(error)}), expected a text file") from None


def _opened(path: str) -> BinaryIO:
    shown = _shown(path)
    try:
        info = os.stat(path)
        if stat.S_ISDIR(info.st_mode):
            raise InputError(f"{shown}: is a folder, expected a log or report, or - for stdin")
        if not stat.S_ISREG(info.st_mode):
            raise InputError(f"{shown}: is no regular file, expected a log or report; a pipe is read with -")
        if info.st_size > MOST_BYTES:
            raise InputError(_too_large(shown))
        return open(path, "rb")
    except OSError as error:
        raise InputError(
            f"{shown}: cannot be read ({_reason(error)}), expected a log or report, or - for stdin"
        ) from None
    except ValueError:
        raise InputError(f"{shown}: is no file name, expected a log or report, or - for stdin") from None


def _shown(path: str) -> str:
    return escape(shorten(path, 200))


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _too_large(name: str) -> str:
    return f"{name}: is too large, expected at most {MOST_BYTES // 2**20} MB; cut it with `tail -c 100M`"


def _render(result: Triage, format: str) -> str:
    if format == "json":
        return json.dumps({"schema_version": 1, "findings": [vars(one) for one in result.findings]}, indent=1)
    about = f"The text names {result.releases}." if result.releases else "The text names no release."
    if format == "markdown":
        return "\n".join(_markdown(result, about))
    lines = []
    for one in result.findings:
        lines.append(f"{one.id}  {entries()[one.id].name}  confidence {one.confidence:.2f}  line {one.line}")
        lines += [f"    {one.excerpt}", f"    next: {one.next_step}", ""]
    if not result.findings:
        lines.append(
            "No known failure in this text. That is no proof of health: `moedoctor list` shows what is known."
        )
    return "\n".join([*lines, f"{about} {_count(result.findings)}"])


def _markdown(result: Triage, about: str) -> list[str]:
    if not result.findings:
        return ["No known failure in this text.", "", about]
    rows = [
        f"| {one.id} {entries()[one.id].name} | {one.confidence:.2f} | {one.line} | {_cell(one.excerpt)} "
        f"| {_cell(one.next_step)} |"
        for one in result.findings
    ]
    return ["| failure | confidence | line | excerpt | next |", "|---|---|---|---|---|", *rows, "", about]


def _cell(text: str) -> str:
    """Text that cannot leave its table cell or become a link, an image or a tag."""
    for character in "\\|<>[]*_~@#":
        text = text.replace(character, f"\\{character}")
    return text


def _count(findings: tuple[Finding, ...]) -> str:
    return f"{len(findings)} known {'failure' if len(findings) == 1 else 'failures'} found"
