"""The fields of a ``config.json``, each read with the type that it must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Fields of a multimodal config that may hold the language model's config."""
_MOST = (1 << 31) - 1
"""The largest size of a model; it keeps products of sizes within what a float holds."""


class ConfigError(ValueError):
    """A config.json without a readable shape; one line says which field and what was expected."""


def find_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a multimodal config, or the whole config."""
    parts = (config.get(name) for name in TEXT_CONFIGS)
    return next((part for part in parts if isinstance(part, Mapping) and part), config)


class Fields:
    """The fields of a config, read by any of their names. A field that is null is missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def read_integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """Return a whole number from `least` to `most`. Raises ConfigError."""
        name, value = self._find_first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            span = f"at least {least}" if isinstance(value, int) and value < least else f"{least} to {most}"
            raise self.make_error(name, value, f"a whole number, {span}")
        return value

    def read_optional(self, name: str) -> int | None:
        """Return a whole number of at least 1, or None if it is missing. Raises ConfigError."""
        return self.read_integer(name) if name in self else None

    def read_flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false. Raises ConfigError."""
        _, value = self._find_first((name,), default)
        if not isinstance(value, bool):
            raise self.make_error(name, value, "true or false")
        return value

    def read_text(self, *names: str, default: str) -> str:
        """Return a text that is not empty. Raises ConfigError."""
        name, value = self._find_first(names, default)
        if not isinstance(value, str) or not value:
            raise self.make_error(name, value, "a name")
        return value

    def read_texts(self, name: str) -> Sequence[str]:
        """Return a list of at least one text. Raises ConfigError."""
        value = self.values.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.make_error(name, value, "a list with a name for every layer")
        return value

    def read_indices(self, name: str) -> Sequence[int]:
        """Return a list of layers, counted from 0; empty if it is missing. Raises ConfigError."""
        _, value = self._find_first((name,), [])
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.make_error(name, value, "a list of layer numbers, counted from 0")
        return value

    def make_error(self, name: str, value: Any, expected: str) -> ConfigError:
        actual = "is missing" if value is None else f"is {shorten_value(value)}"
        return ConfigError(f"{self.where}: {name} {actual}, expected {expected}")

    def _find_first(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        """Return the first of `names` that is there and its value, else all names and the default."""
        name = next((name for name in names if name in self), None)
        return (" or ".join(names), default) if name is None else (name, self.values[name])


def shorten_value(value: Any) -> str:
    """Return the value as ASCII in one line of at most 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
