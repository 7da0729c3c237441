"""Runs scripts in Triton's interpreter: ``python tests/interpret.py '[["SCRIPT", "ARGUMENT", …], …]'``.

The interpreter replaces the functions of Triton's language anew for each call of a device function, which
takes five sixths of the time of our kernels. Here a launch replaces them once.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton decides at import whether it interprets

import json
import runpy
import sys
from types import SimpleNamespace

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


if __name__ == "__main__":
    patch_language_once_a_launch()
    for check in json.loads(sys.argv[1]):
        sys.argv[:] = check
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
