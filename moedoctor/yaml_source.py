"""YAML text as plain data, with the line of every value. For files that a stranger may have written.

Only PyYAML's scanner and parser are used, in pure Python: the same marks and messages on every machine,
and nothing is ever constructed from a tag. What makes YAML dangerous or reads differently in YAML 1.1 and 1.2
(anchors, tags, merge keys, ``yes``, octal numbers, dates) is refused with its line instead of being guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner

from moedoctor.text_file import TextFileError, check_printable, read_text
from moedoctor.wording import shorten, show
from moedoctor.yaml_scalars import YamlScalar, YamlScalarError, resolve

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
