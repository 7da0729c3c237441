"""The fields of a ``config.json``, each asked for with the type that it must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MOST = (1 << 31) - 1
"""No size of a model is greater; it keeps products of sizes within what a float holds."""


class ConfigError(ValueError):
    """A config.json that no shape can be read from; one line says which field and what was expected."""


class Fields:
    """The fields of a config, asked for by any of their names. A field that is null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """A whole number from `least` to `most`; raises ConfigError where it is not, or is missing."""
        name, found = self._found(names, default)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            wide = f"at least {least}" if isinstance(found, int) and found < least else f"{least} to {most}"
            raise self.error(name, found, f"a whole number, {wide}")
        return found

    def optional(self, name: str) -> int | None:
        """A whole number of at least 1, or None where it is missing. Raises ConfigError."""
        return self.integer(name) if name in self else None

    def flag(self, name: str, *, default: bool = False) -> bool:
        """true or false. Raises ConfigError."""
        _, found = self._found((name,), default)
        if not isinstance(found, bool):
            raise self.error(name, found, "true or false")
        return found

    def text(self, *names: str, default: str) -> str:
        """A text that is not empty. Raises ConfigError."""
        name, found = self._found(names, default)
        if not isinstance(found, str) or not found:
            raise self.error(name, found, "a name")
        return found

    def texts(self, name: str) -> Sequence[str]:
        """A list of texts with at least one. Raises ConfigError."""
        found = self.values.get(name)
        if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
            raise self.error(name, found, "a list with a name for every layer")
        return found

    def indices(self, name: str) -> Sequence[int]:
        """A list of layers, counted from 0; empty where it is missing. Raises ConfigError."""
        _, found = self._found((name,), [])
        if not isinstance(found, list) or not all(type(one) is int and one >= 0 for one in found):
            raise self.error(name, found, "a list of layer numbers, counted from 0")
        return found

    def error(self, name: str, found: Any, expected: str) -> ConfigError:
        """What to raise for the field `name` that holds `found`."""
        said = "is missing" if found is None else f"is {short(found)}"
        return ConfigError(f"{self.where}: {name} {said}, expected {expected}")

    def _found(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        """The first of `names` that is there with its value, else all of them with the default."""
        name = next((one for one in names if one in self), None)
        return (" or ".join(names), default) if name is None else (name, self.values[name])


def short(value: Any) -> str:
    """The value as ASCII in one line of at most 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
