"""Strict JSON text: parsing that refuses what JSON does not allow, and the line of every value.

The standard parser takes `NaN`, keeps the last of two equal keys in silence and turns `1e999` into
infinity. A report is evidence, so each of these is refused here, with its line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

JsonPath = tuple[str | int, ...]
"""Keys and indices from the root of a document to a value."""

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_MAX_DIGITS = 4000  # Python itself refuses to read integers of more than 4300 digits


class JsonError(ValueError):
    """Text that is not strict JSON: `line` counts from 1, the message is one line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class _RefusedError(Exception):
    """Raised inside the parser's hooks, which know the token but not its line."""

    def __init__(self, token: str, message: str) -> None:
        super().__init__(message)
        self.token = token


class _RepeatedKeyError(Exception):
    """Raised inside the parser's hook for an object that has a key twice."""


def parse(text: str) -> Any:
    """The value that `text` holds. Raises `JsonError` for anything that strict JSON does not allow."""
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_short_int,
        )
    except json.JSONDecodeError as error:
        raise JsonError(error.lineno, f"not JSON: {error.msg} (column {error.colno})") from error
    except _RefusedError as error:
        offset = next((match.start() for match in _TOKEN.finditer(text) if match.group() == error.token), 0)
        raise JsonError(_line_at(text, offset), str(error)) from error
    except _RepeatedKeyError as error:
        key, line = _first_repeated_key(text)
        raise JsonError(line, f"the key {short_repr(key)} occurs twice in one object") from error
    except RecursionError as error:
        raise JsonError(1, "nested too deeply to be a report") from error


def line_of(text: str, path: JsonPath) -> int:
    """The line, from 1, on which the value at `path` starts; `text` must have passed `parse`."""
    places = (offset for place, offset, _ in _places(text) if place == path)
    return _line_at(text, next(places, 0)) if path else 1


def format_path(path: JsonPath) -> str:
    """`scenarios[0].cases[2].verdict`; the root is `report`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{_printable(step)}" for step in path)
    return text.lstrip(".") or "report"


def short_repr(value: Any) -> str:
    """A JSON value in a few characters, on one line, for error messages."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:39] + "…")
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _places(text: str) -> Iterator[tuple[JsonPath, int, bool]]:
    """Every key and array element in order: its path, its offset, and whether the key was there before."""
    path: list[str | int] = []
    seen: list[set[str]] = []
    previous = ""
    for match in _TOKEN.finditer(text):
        token = match.group()
        starts = previous in ("{", "[", ",") and token not in ("}", "]")
        if starts and isinstance(path[-1], int):
            path[-1] += 1
            yield tuple(path), match.start(), False
        elif starts:
            key = json.loads(token)
            path[-1] = key
            yield tuple(path), match.start(), key in seen[-1]
            seen[-1].add(key)
        if token in ("{", "["):
            path.append("" if token == "{" else -1)
            seen.append(set())
        elif token in ("}", "]"):
            path.pop()
            seen.pop()
        previous = token


def _first_repeated_key(text: str) -> tuple[str, int]:
    place, offset = next((place, offset) for place, offset, repeated in _places(text) if repeated)
    return str(place[-1]), _line_at(text, offset)


def _line_at(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _printable(key: str) -> str:
    return key if key.isprintable() and len(key) <= 60 else short_repr(key)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _RepeatedKeyError
    return result


def _refuse_constant(token: str) -> NoReturn:
    raise _RefusedError(
        token, f'the number {token} is not JSON; moedoctor writes "nan", "inf" and "-inf" as text'
    )


def _finite_float(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise _RefusedError(token, f"the number {token[:20]} is out of range")
    return value


def _short_int(token: str) -> int:
    if len(token) > _MAX_DIGITS:
        raise _RefusedError(token, f"a number of {len(token)} digits is out of range")
    return int(token)
