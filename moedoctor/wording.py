"""Words for error messages: values made safe for one line, the nearest valid name, pydantic's findings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_LIMIT = 60
_LISTED = 12
_EXPECTED = {
    "model_type": "must be a mapping (key: value)",
    "dict_type": "must be a mapping (key: value)",
    "list_type": "must be a list ([a, b])",
    "tuple_type": "must be a list ([a, b])",
    "string_type": "must be text (quote it)",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}
_TYPES = ("model_type", "dict_type", "list_type", "tuple_type", "string_type", "scalar_type")
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
