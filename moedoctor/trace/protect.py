"""Keeps errors of a recorder out of the forward that it runs in. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def protect(method: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Let an error in a recorder's method stop the recording, and return None.

    The recorder has `stopped`, after which the method does nothing, and `stop`, which takes one line.
    """

    @functools.wraps(method)
    def run(*arguments: _P.args, **options: _P.kwargs) -> _R | None:
        recorder: Any = arguments[0]
        if recorder.stopped:
            return None
        try:
            return method(*arguments, **options)
        except Exception as error:
            recorder.stop(format_error(error))
            return None

    return run


def format_error(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
