"""Runs scripts in Triton's interpreter: ``python tests/interpret.py '[["SCRIPT", "ARGUMENT", …], …]'``.

The interpreter replaces the functions of Triton's language anew for each call of a device function, which
takes five sixths of the time of our kernels. Here a launch replaces them once. Of the rest a third went into
checks of integers for an overflow, which compiled kernels lack too, and into a table of types for each value.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton decides at import whether it interprets

import json
import runpy
import sys
from types import SimpleNamespace
from typing import Any

from triton import language
from triton.runtime import interpreter


def patch_language_once_a_launch() -> None:
    """Let a launch patch both modules of the language, and a call of a device function none."""
    patch = interpreter._patch_lang
    holder = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    interpreter._patch_lang = lambda kernel: patch(holder)
    interpreter.InterpretedFunction.__call__ = lambda function, *args, **options: function.rewrite()(
        *args, **options
    )


def leave_out_checks_of_integers() -> None:
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def remember_types() -> None:
    """Look each type of Triton's up once for each name; types of blocks and pointers cannot be hashed."""
    look_up, types = interpreter._get_np_dtype, {}

    def remember(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in types:
            types[name] = look_up(dtype)
        return types[name]

    interpreter._get_np_dtype = remember


if __name__ == "__main__":
    leave_out_checks_of_integers()
    remember_types()
    patch_language_once_a_launch()
    for check in json.loads(sys.argv[1]):
        sys.argv[:] = check
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
