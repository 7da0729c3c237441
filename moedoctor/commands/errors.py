"""The one error that every command raises for bad input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class InputError(Exception):
    """Wrong usage or bad input: exit code 2 and one line."""


@contextlib.contextmanager
def as_input_error(*kinds: type[Exception]) -> Iterator[None]:
    """Turn the errors of loaders and parsers into InputError, keeping their line."""
    try:
        yield
    except kinds as error:
        raise InputError(str(error)) from error
