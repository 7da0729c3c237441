"""The plug-in that applies moedoctor's fixes inside vLLM, if the person who starts vLLM asks for them.

vLLM calls `register` in every process that it starts (entry-point group ``vllm.general_plugins``), sometimes
more than once. It does nothing unless ``MOEDOCTOR_FIXES`` names fixes (``backend``, several with commas,
``all``) or ``MOEDOCTOR_TRACE`` names something to trace. A fix or a trace is a module with ``apply(version:
str) -> str``. It first checks that everything it will change is as it expects, changes it once, and returns
one line that says what is active. If anything is not as expected it raises `FixError` and has changed
nothing. No failure here stops vLLM.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moedoctor.fixes.backends import release_tables as backend_tables

VARIABLE = "MOEDOCTOR_FIXES"
ALL = "all"
FIXES: Mapping[str, str] = {
    "backend": "moedoctor.upstream.plugin.backend_fix",
    "expert_cache": "moedoctor.upstream.plugin.expert_cache_fix",
    "offload": "moedoctor.upstream.plugin.offload_fix",
    "routing": "moedoctor.upstream.plugin.routing_fix",
}
"""Name of a fix -> its module."""
TRACE_VARIABLE = "MOEDOCTOR_TRACE"
TRACES: Mapping[str, str] = {
    "nan": "moedoctor.upstream.plugin.nan_trace",
}
"""Name of a trace -> its module."""
STATUS_VARIABLE = "MOEDOCTOR_STATUS"
"""A file for what is active, a JSON list. Set for the engines that moedoctor starts itself."""
_TABLES = ((VARIABLE, "fix", FIXES), (TRACE_VARIABLE, "trace", TRACES))
_MARK = "__moedoctor_fix__"
_BY = "__moedoctor_by__"

logger = logging.getLogger("vllm.moedoctor")  # below vLLM's own logger, so that its settings apply


def register() -> None:
    """Apply what ``MOEDOCTOR_FIXES`` and ``MOEDOCTOR_TRACE`` name. vLLM calls this; it never raises."""
    try:
        values = tuple(os.environ.get(variable, "") for variable, _, _ in _TABLES)
        if any(value.strip() for value in values):
            _register(os.getpid(), values)
    except Exception as error:
        logger.warning("moedoctor: no fix is active: %s: %s", type(error).__name__, error)


@functools.cache
def _register(process: int, values: tuple[str, ...]) -> None:
    """Apply once a process: what is applied stays, and need not be logged again."""
    modules = [
        (kind, name, table[name])
        for value, (variable, kind, table) in zip(values, _TABLES, strict=True)
        for name in chosen(value, variable, kind, table)
    ]
    if not modules:
        return
    version, known = installed_version(), known_releases()
    if version not in known:
        logger.warning(
            "moedoctor: vLLM %s is none of the releases that the fixes know (%s to %s); nothing is changed",
            version,
            known[0],
            known[-1],
        )
        return
    active = [line for module in modules if (line := _applied(*module, version)) is not None]
    if active:
        # Newer releases set up their logging after plug-ins are loaded; until then Python prints warnings
        # only.
        shown = logger.hasHandlers() and logger.isEnabledFor(logging.INFO)
        level = logging.INFO if shown else logging.WARNING
        logger.log(level, "moedoctor: active in vLLM %s: %s", version, "; ".join(active))
        if status := os.environ.get(STATUS_VARIABLE):
            Path(status).write_text(json.dumps(active), encoding="utf-8")


def chosen(
    value: str, variable: str = VARIABLE, kind: str = "fix", table: Mapping[str, str] = FIXES
) -> Sequence[str]:
    """Return the names in `value` that are in `table`, each once; warn of unknown names."""
    names = [part.strip().lower() for part in value.split(",") if part.strip()]
    if ALL in names:
        return tuple(table)
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in table:
            known = ", ".join((*table, ALL))
            logger.warning("moedoctor: %s names no %s called %s; expected %s", variable, kind, name, known)
    return tuple(name for name in names if name in table)


def installed_version() -> str:
    """Return the release of this process's vLLM, without a local part such as ``+cu130``."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = str(importlib.import_module("vllm").__version__)
    return version.partition("+")[0]


def known_releases() -> Sequence[str]:
    """Return the vLLM releases that the fixes were made for, oldest first."""
    return tuple(backend_tables.releases())


def _applied(kind: str, name: str, module: str, version: str) -> str | None:
    """Apply a fix and return the line that says what is active; warn and return None if it fails."""
    try:
        return f"{name} ({importlib.import_module(module).apply(version)})"
    except FixError as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    logger.warning("moedoctor: the %s %s is not applied to vLLM %s: %s", kind, name, version, reason)
    return None


# --- What the fixes use: check before changing, and change once. ------------------------------------------


class FixError(Exception):
    """Something in vLLM is not as the fix expects it; one line says what. Nothing was changed."""


def expect(owner: Any, name: str, parameters: Sequence[str], source: Sequence[str]) -> Any:
    """Return the function `name` of `owner` if it takes `parameters` and its source contains all of `source`.

    Raises FixError if not: then this vLLM is not what its version says, and is left alone.
    """
    function = getattr(owner, name, None)
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    if function is None:
        raise FixError(f"there is no {where}")
    original = function
    while hasattr(original, _MARK):
        original = getattr(original, _MARK)
    existing = list(inspect.signature(original).parameters)
    missing = [parameter for parameter in parameters if parameter not in existing]
    if missing:
        raise FixError(f"{where} takes no {', '.join(missing)}; it takes {', '.join(existing)}")
    try:
        text = inspect.getsource(original)
    except (OSError, TypeError):
        raise FixError(f"the source of {where} cannot be read, so it cannot be checked") from None
    absent = [line for line in source if line not in text]
    if absent:
        raise FixError(f"{where} does not hold `{absent[0]}`")
    return function


def replace_once(owner: Any, name: str, make: Callable[[Any], Any], *, by: str = "") -> bool:
    """Replace the function `name` of `owner` by `make(function)`; return False if the fix `by` did before."""
    original = layer = getattr(owner, name)
    while hasattr(layer, _MARK):
        if getattr(layer, _BY) == by:
            return False
        layer = getattr(layer, _MARK)
    replacement = make(original)
    setattr(replacement, _MARK, original)
    setattr(replacement, _BY, by)
    setattr(owner, name, replacement)
    return True
