"""A small text file that a stranger may have written, read without blocking and without surprises."""

from __future__ import annotations

import difflib
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Not compiled here: that takes 5 ms, also of every command that reads no file.
_UNPRINTABLE = "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"


class TextFileError(Exception):
    """A file that cannot be used: on which line, and what was expected."""

    def __init__(self, line: int, message: str) -> None:
        """`line` counts from 1 and is 1 where none is known."""
        super().__init__(line, message)
        self.line = line
        self.message = message


def read_text(path: Path, limit: int) -> str:
    """The text of the regular file at `path`: UTF-8, with or without byte order mark, at most `limit` bytes.

    Raises `TextFileError` for anything else; it never waits for a pipe and never opens a device.
    """
    return _decode(_read_bytes(path, limit))


def check_printable(text: str) -> None:
    """Refuse control characters, half characters, and line ends that editors count differently."""
    if found := re.search(_UNPRINTABLE, text):
        line = text.count("\n", 0, found.start()) + 1
        raise TextFileError(
            line, f"character U+{ord(found.group()):04X} in the file, expected printable text"
        )


def _read_bytes(path: Path, limit: int) -> bytes:
    flags = (
        os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    )
    try:
        # Before the open, which can act on a device; after it again, in case the file was swapped.
        _require_small(os.stat(path), limit)
        with open(os.open(path, flags), "rb") as file:
            _require_small(os.fstat(file.fileno()), limit)
            data = file.read(limit + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise TextFileError(1, f"cannot be read ({reason}), expected a text file") from None
    except ValueError:
        raise TextFileError(1, "is no file name, expected the path of a text file") from None
    if len(data) > limit:
        raise TextFileError(1, f"is too large, expected at most {limit // 1024} KiB")
    return data


def _require_small(info: os.stat_result, limit: int) -> None:
    if stat.S_ISDIR(info.st_mode):
        raise TextFileError(1, "is a folder, expected a text file")
    if not stat.S_ISREG(info.st_mode):
        raise TextFileError(1, "is a pipe, socket or device, expected a text file")
    if info.st_size > limit:
        size = f"{info.st_size / 2**20:.1f} MiB"
        raise TextFileError(1, f"is too large ({size}), expected at most {limit // 1024} KiB")


def _decode(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TextFileError(1, "is UTF-16 or UTF-32 text, expected UTF-8")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise TextFileError(line, "is a binary file (it holds NUL bytes), expected UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `error.object` and not `data`: the decoder counts from behind the byte order mark.
        line = error.object.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{error.object[error.start]:02x}"
        raise TextFileError(line, f"is not UTF-8 text ({found}), expected UTF-8") from None


_LIMIT = 60
_LISTED = 12
_EXPECTED = {
    "model_type": "must be a mapping (key: value)",
    "dict_type": "must be a mapping (key: value)",
    "dataclass_type": "must be a mapping (key: value)",
    "list_type": "must be a list ([a, b])",
    "tuple_type": "must be a list ([a, b])",
    "string_type": "must be text (quote it)",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}
_TYPES = (
    "model_type",
    "dataclass_type",
    "dict_type",
    "list_type",
    "tuple_type",
    "string_type",
    "scalar_type",
)
"""Findings for which "not a mapping" says more than what was expected."""


def escape(text: str) -> str:
    """`text` with everything that a terminal might act on, line ends included, written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, limit: int = _LIMIT) -> str:
    """`text`, cut after about `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 20]}… ({len(text)} characters)"


def show(value: object) -> str:
    """A value from a file as its author would write it: short, escaped, never a whole list."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"'{escape(shorten(value))}'" if isinstance(value, str) else shorten(str(value))


def dotted(path: Iterable[str | int]) -> str:
    """Keys and list indices as ``claims[0].key``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{escape(shorten(step))}" for step in path)
    return "".join(steps).removeprefix(".")


def nearest(name: str, valid: Iterable[str]) -> str:
    """``did you mean X?`` where a valid name is close to `name`, else the valid names."""
    names = {one.lower(): one for one in valid}
    if close := difflib.get_close_matches(name[:_LIMIT].lower(), names, n=1):
        return f"did you mean {names[close[0]]}?"
    listed = ", ".join(list(names.values())[:_LISTED]) or "nothing here"
    return f"expected {'one of ' if len(names) > 1 else ''}{listed}{' …' if len(names) > _LISTED else ''}"


def explain(error: ErrorDetails, valid: Iterable[str] = ()) -> str:
    """One pydantic finding in a user's words; `valid` are the keys allowed beside an unknown one."""
    kind, message, value = error["type"], error["msg"], error["input"]
    if kind == "missing":
        return "is missing, expected a value"
    if kind == "extra_forbidden":
        return f"unknown key, {nearest(str(error['loc'][-1]), valid)}"
    if kind == "value_error":
        return str(error.get("ctx", {}).get("error", message))
    expected = _EXPECTED.get(kind) or re.sub(r"^\w+ should (.*?)( after validation.*)?$", r"must \1", message)
    if kind not in _TYPES and (isinstance(value, (dict, list)) or value == ""):
        return expected
    return f"{expected}, not {show(value)}"


MAX_INT = 2**63 - 1

YamlScalar = str | int | float | bool | None

_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_YES_NO = re.compile(r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt\s].*)?", re.DOTALL)
_ODD_NUMBER = re.compile(
    r"[-+]?(?:0[0-9_]+|0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0b[01_]+"  # other bases
    r"|[0-9][0-9_]*_[0-9_]*(?:\.[0-9_]*)?"  # digit groups
    r"|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)"  # base 60: 1:30 is 90
)
_CONSTANTS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class YamlScalarError(Exception):
    """A scalar that cannot be used; as text, what it is and what was expected."""


def resolve(text: str, *, plain: bool) -> YamlScalar:
    """The value of a scalar; `plain` where it stands without quotes. Raises `YamlScalarError`."""
    if _SURROGATE.search(text):
        raise YamlScalarError(f"{show(text)} holds half a character (a surrogate), expected Unicode text")
    if not plain:
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        # Digits are counted first: Python refuses to convert, or is slow on, numbers of thousands of digits.
        if len(text) > 20 or abs(int(text)) > MAX_INT:
            raise YamlScalarError(f"the number {show(text)} is too large, expected at most {MAX_INT}")
        return int(text)
    if _YES_NO.fullmatch(text):
        raise YamlScalarError(f"{show(text)} is a boolean to some readers, expected true, false or quotes")
    if _DATE.fullmatch(text):
        raise YamlScalarError(f"{show(text)} is a date to some readers, expected quoted text")
    if _ODD_NUMBER.fullmatch(text):
        raise YamlScalarError(f"{show(text)} is ambiguous, expected a decimal number or quoted text")
    if _NOT_FINITE.fullmatch(text) or (_FLOAT.fullmatch(text) and not math.isfinite(float(text))):
        raise YamlScalarError(f"{show(text)} is not finite, expected a finite number")
    return float(text) if _FLOAT.fullmatch(text) else text


# Together these bound the slowest file to about 0.3 s in the pure-Python scanner.
MAX_BYTES = 128 * 1024
MAX_NODES = 10_000
MAX_DEPTH = 16

YamlPath = tuple[str | int, ...]
"""Keys and list indices from the root to a value."""

_HINTS = {
    "mapping values are not allowed here": "quote a text that holds ': ', indent keys of one mapping alike",
    "found character '\\t' that cannot start any token": "indent with spaces instead of tabs",
}


class YamlSourceError(TextFileError):
    """Text that is no plain YAML data: where, and what was expected."""


@dataclass(frozen=True)
class YamlSource:
    """Plain data (dict with text keys, list, str, int, float, bool, None) and where it stands."""

    data: object
    lines: Mapping[YamlPath, int]
    """Path -> line, counted from 1: a scalar's own line; the line of its key for a list or mapping."""

    def known(self, path: YamlPath) -> YamlPath:
        """The longest part of `path`, from the root, that the file has."""
        return next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self.lines), ())

    def line(self, path: YamlPath) -> int:
        """The line of the value at `path`, or of the nearest value that holds it."""
        return self.lines.get(self.known(path), 1)


def read(path: Path) -> YamlSource:
    """The one YAML document in the file at `path`; `TextFileError` for anything else."""
    return parse(read_text(path, MAX_BYTES))


def parse(text: str) -> YamlSource:
    """The one YAML document in `text`; `TextFileError` for anything else."""
    check_printable(text)
    parser = _Events(text)
    try:
        return _Builder(parser).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlSourceError(mark.line + 1 if mark else 1, _syntax(error)) from None
    except (ValueError, OverflowError):
        # The scanner's own chr() and int(): an escape beyond Unicode, a %YAML version of thousands of digits.
        problem = (
            "not valid YAML: a number out of range in an escape or directive, expected a Unicode code point"
        )
        raise YamlSourceError(parser.line + 1, problem) from None


def _syntax(error: yaml.MarkedYAMLError) -> str:
    context = f" {error.context}" if error.context else ""
    expected = _HINTS.get(error.problem or "", "expected keys, values and lists indented with spaces")
    return f"not valid YAML{shorten(context, 120)}: {shorten(error.problem or '', 120)}; {expected}"


class _Events(Reader, Scanner, Parser):
    """PyYAML up to its events; no composer, no constructor."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)

    def take(self) -> yaml.Event:
        event: yaml.Event = self.get_event()  # type: ignore[no-untyped-call]
        return event

    def peek_line(self) -> int:
        """The line of the next event, counted from 1."""
        return _line(self.peek_event())  # type: ignore[no-untyped-call]


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return mark.line + 1 if mark else 1


class _Builder:
    def __init__(self, events: _Events) -> None:
        self._events = events
        self._lines: dict[YamlPath, int] = {}
        self._nodes = 0

    def document(self) -> YamlSource:
        self._events.take()
        if self._events.check_event(yaml.StreamEndEvent):
            raise YamlSourceError(1, "is empty, expected a YAML mapping")
        self._events.take()
        data = self._node(())
        self._events.take()
        if not self._events.check_event(yaml.StreamEndEvent):
            line = self._events.peek_line()
            raise YamlSourceError(line, "a second YAML document, expected one document in a file")
        return YamlSource(data, self._lines)

    def _node(self, path: YamlPath) -> object:
        event = self._events.take()
        line = self._lines[path] = _line(event)
        self._require_plain(event, path, line)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, line)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        return self._sequence(path)

    def _sequence(self, path: YamlPath) -> list[object]:
        items: list[object] = []
        while not self._events.check_event(yaml.SequenceEndEvent):
            items.append(self._node((*path, len(items))))
        self._events.take()
        return items

    def _mapping(self, path: YamlPath) -> dict[str, object]:
        entries: dict[str, object] = {}
        key_lines: dict[str, int] = {}
        while not self._events.check_event(yaml.MappingEndEvent):
            line = self._events.peek_line()
            key = self._key(path, line)
            if key in entries:
                first = key_lines[key]
                raise YamlSourceError(
                    line, f"duplicate key {show(key)}, first on line {first}; expected it once"
                )
            key_lines[key] = line
            child = (*path, key)
            entries[key] = self._node(child)
            if isinstance(entries[key], (dict, list)):
                self._lines[child] = line
        self._events.take()
        return entries

    def _key(self, path: YamlPath, line: int) -> str:
        event = self._events.take()
        self._require_plain(event, path, line)
        if not isinstance(event, yaml.ScalarEvent):
            raise YamlSourceError(line, "a list or mapping as a key, expected text")
        if event.value == "<<" and event.implicit[0]:
            raise YamlSourceError(line, "merge key '<<' is not supported, expected the values written out")
        key = self._scalar(event, line)
        if not isinstance(key, str):
            raise YamlSourceError(line, f"the key {show(key)} is not text, expected a name (quote it)")
        return key

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> YamlScalar:
        try:
            return resolve(event.value, plain=event.implicit[0])
        except YamlScalarError as error:
            raise YamlSourceError(line, str(error)) from None

    def _require_plain(self, event: yaml.Event, path: YamlPath, line: int) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise YamlSourceError(line, f"too many values, expected at most {MAX_NODES}")
        if len(path) > MAX_DEPTH:
            raise YamlSourceError(line, f"nested too deeply, expected at most {MAX_DEPTH} levels")
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor is not None:
            raise YamlSourceError(line, f"anchor or alias {show(anchor)}, expected the value written out")
        if tag is not None:
            raise YamlSourceError(line, f"tag {show(tag)} is not supported, expected the plain value")
