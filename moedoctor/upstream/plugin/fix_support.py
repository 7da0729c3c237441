"""What the fixes of the vLLM plug-in share: looking before changing, and changing once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from moedoctor.fixes.backends import release_tables as backend_tables

_MARK = "__moedoctor_fix__"
_BY = "__moedoctor_by__"


class FixError(Exception):
    """Something in vLLM is not as the fix expects it; one line says what. Nothing was changed."""


def known_releases() -> Sequence[str]:
    """The vLLM releases that the fixes were made for, oldest first."""
    return tuple(backend_tables.releases())


def expect(owner: Any, name: str, parameters: Sequence[str], source: Sequence[str]) -> Any:
    """The function `name` of `owner`, where it takes `parameters` and its source holds the lines of `source`.

    Raises FixError where it does not: then this vLLM is not what its version says, and is left alone.
    """
    found = getattr(owner, name, None)
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    if found is None:
        raise FixError(f"there is no {where}")
    original = found
    while hasattr(original, _MARK):
        original = getattr(original, _MARK)
    have = list(inspect.signature(original).parameters)
    missing = [one for one in parameters if one not in have]
    if missing:
        raise FixError(f"{where} takes no {', '.join(missing)}; it takes {', '.join(have)}")
    try:
        text = inspect.getsource(original)
    except (OSError, TypeError):
        raise FixError(f"the source of {where} cannot be read, so it cannot be checked") from None
    absent = [one for one in source if one not in text]
    if absent:
        raise FixError(f"{where} does not hold `{absent[0]}`")
    return found


def replace_once(owner: Any, name: str, made: Callable[[Any], Any], *, by: str = "") -> bool:
    """Put `made(original)` in place of the function `name` of `owner`; False where the fix `by` did so
    before."""
    original = one = getattr(owner, name)
    while hasattr(one, _MARK):
        if getattr(one, _BY) == by:
            return False
        one = getattr(one, _MARK)
    changed = made(original)
    setattr(changed, _MARK, original)
    setattr(changed, _BY, by)
    setattr(owner, name, changed)
    return True
