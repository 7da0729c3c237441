"""JSON values: made from Python ones, and read as one type or refused with their path."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from moedoctor.json_text import JsonPath, format_path, short_repr
from moedoctor.results import Scalar

_MAX_DEPTH = 64
_SURROGATE = re.compile("[\ud800-\udfff]")

_E = TypeVar("_E", bound=enum.Enum)


class ShapeError(ValueError):
    """A value that is not what a report has at `path`."""

    def __init__(self, path: JsonPath, message: str) -> None:
        super().__init__(f"{format_path(path)}: {message}")
        self.path = path


def plain(value: Any, path: JsonPath = ()) -> Any:
    """`value` in the types of JSON: non-finite floats as text, tuples as lists, enums as their value."""
    if len(path) > _MAX_DEPTH:
        raise ShapeError(path[:8], f"nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, enum.Enum):
        return plain(value.value, path)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # A child's stderr may hold bytes that are no UTF-8; lone surrogates cannot be written to a file.
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        result = {_key(key, path): plain(one, (*path, str(key))) for key, one in value.items()}
        if len(result) != len(value):
            raise ShapeError(path, "two of its keys are the same text")
        return result
    if isinstance(value, (list, tuple)):
        return [plain(one, (*path, index)) for index, one in enumerate(value)]
    raise ShapeError(
        path, f"a {type(value).__name__} cannot be written to JSON, only numbers, text, lists and mappings"
    )


@dataclass(frozen=True)
class Node:
    """A value of a document with its path, read as one type or refused."""

    value: Any
    path: JsonPath

    def __getitem__(self, key: str) -> Node:
        if key not in self._object():
            raise ShapeError(self.path, f"the key '{key}' is missing")
        return Node(self.value[key], (*self.path, key))

    def get(self, key: str, default: Any = None) -> Node:
        return Node(self._object().get(key, default), (*self.path, key))

    def wrong(self, expected: str) -> ShapeError:
        return ShapeError(self.path, f"{short_repr(self.value)}: {expected}")

    def _object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong("expected an object")
        return self.value

    def mapping(self) -> dict[str, Any]:
        result: dict[str, Any] = plain(self._object(), self.path)
        return result

    def elements(self) -> list[Node]:
        if not isinstance(self.value, list):
            raise self.wrong("expected an array")
        return [Node(one, (*self.path, index)) for index, one in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("expected text")
        return str(plain(self.value))

    def text_or_none(self) -> str | None:
        return None if self.value is None else self.text()

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("expected true or false")
        return self.value

    def integer(self, minimum: int = 0) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < minimum:
            raise self.wrong(f"expected an integer, {minimum} or more")
        return self.value

    def number(self, minimum: float = 0) -> float:
        try:
            number = math.nan if isinstance(self.value, (bool, str)) else float(self.value)
        except (TypeError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or number < minimum:
            raise self.wrong(f"expected a finite number, {minimum:g} or more")
        return number

    def scalar(self) -> Scalar:
        if self.value is not None and not isinstance(self.value, (str, int, float)):
            raise self.wrong("expected text, a number, true, false or null")
        result: Scalar = plain(self.value)
        return result

    def member(self, kind: type[_E]) -> _E:
        for one in kind:
            if one.value == self.value:
                return one
        raise self.wrong("expected one of " + ", ".join(str(one.value) for one in kind))


def _key(key: Any, path: JsonPath) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise ShapeError(path, f"the key {key!r} is a {type(key).__name__}, expected text")
    return str(plain(str(key)))
