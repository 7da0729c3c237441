"""Checks that each fix and trace fits the Python source of the installed vLLM.

``python -m moedoctor.plugin.sources`` prints it. Every extension is applied to the real release in
this process, which needs no GPU and starts no engine. That checks each of its patches: the function, its
parameters, and the lines that its source must contain.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from moedoctor.plugin.extensions import FIXES, TRACES, Extension, Need
from moedoctor.plugin.register import FixError, Patch, find_base, need, read_vllm_version


def check_sources() -> dict[str, dict[str, Any]]:
    """Return for each extension ``{"basis", "patches"}`` or ``{"basis", "reason"}``. Raises FixError.

    An extension that was made for this release must fit, else FixError says what does not.
    """
    version = read_vllm_version()
    return {name: _check(name, extension, version) for name, extension in {**FIXES, **TRACES}.items()}


def _check(name: str, extension: Extension, version: str) -> dict[str, Any]:
    state, reason = need(name, extension, version)
    if state is not Need.MADE_FOR:
        return {"basis": state.value, "reason": reason}
    os.environ.update(extension.example)
    checked: list[str] = []
    original = Patch.check

    def check(self: Patch) -> None:
        original(self)
        checked.append(f"{self.owner}.{self.name}")

    Patch.check = check  # type: ignore[method-assign]
    try:
        importlib.import_module(extension.module).apply(find_base(version))
    except FixError as error:
        raise FixError(f"{name} was made for vLLM {version}, but: {error}") from None
    finally:
        Patch.check = original  # type: ignore[method-assign]
    return {"basis": "source checked", "patches": checked}


if __name__ == "__main__":
    print("ANSWER " + json.dumps(check_sources()))
