"""The plug-in that applies moedoctor's fixes inside vLLM, where the person who starts it asks for them.

vLLM calls `register` in every process that it starts (entry-point group ``vllm.general_plugins``), sometimes
more than once. It does nothing unless ``MOEDOCTOR_FIXES`` names fixes (``backend``, several with commas,
``all``) or ``MOEDOCTOR_TRACE`` names something to trace. Either is a module with ``apply(version: str) ->
str``: it looks whether what it is about to change is what it expects, changes it once, and returns one line
that says what is active; where anything is not as expected it raises `FixError` and has changed nothing. No
failure here stops vLLM.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
from collections.abc import Mapping, Sequence

from moedoctor.upstream.plugin.fix_support import FixError, known_releases

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
_TABLES = ((VARIABLE, "fix", FIXES), (TRACE_VARIABLE, "trace", TRACES))

logger = logging.getLogger("vllm.moedoctor")  # below vLLM's own logger, so that its settings apply


def register() -> None:
    """What vLLM calls: applies what ``MOEDOCTOR_FIXES`` and ``MOEDOCTOR_TRACE`` name. Never raises."""
    try:
        wanted = tuple(os.environ.get(variable, "") for variable, _, _ in _TABLES)
        if any(one.strip() for one in wanted):
            _register(os.getpid(), wanted)
    except Exception as error:
        logger.warning("moedoctor: no fix is active: %s: %s", type(error).__name__, error)


@functools.cache
def _register(process: int, wanted: tuple[str, ...]) -> None:
    """Once a process: what was applied stays, and what was said need not be said again."""
    modules = [
        (kind, name, table[name])
        for value, (variable, kind, table) in zip(wanted, _TABLES, strict=True)
        for name in chosen(value, variable, kind, table)
    ]
    if not modules:
        return
    version = installed_version()
    if version not in known_releases():
        known = known_releases()
        logger.warning(
            "moedoctor: vLLM %s is none of the releases that the fixes know (%s to %s); nothing is changed",
            version,
            known[0],
            known[-1],
        )
        return
    active = [line for one in modules if (line := _applied(*one, version)) is not None]
    if active:
        # Newer releases set up their logging after plug-ins are loaded; Python itself prints warnings until
        # then.
        shown = logger.hasHandlers() and logger.isEnabledFor(logging.INFO)
        level = logging.INFO if shown else logging.WARNING
        logger.log(level, "moedoctor: active in vLLM %s: %s", version, "; ".join(active))


def chosen(
    wanted: str, variable: str = VARIABLE, kind: str = "fix", table: Mapping[str, str] = FIXES
) -> Sequence[str]:
    """What the value of the variable names of `table`, each once; an unknown name is warned of and left
    out."""
    names = [part.strip().lower() for part in wanted.split(",") if part.strip()]
    if ALL in names:
        return tuple(table)
    for name in dict.fromkeys(one for one in names if one not in table):
        known = ", ".join((*table, ALL))
        logger.warning("moedoctor: %s names no %s called %s; expected %s", variable, kind, name, known)
    return tuple(dict.fromkeys(one for one in names if one in table))


def installed_version() -> str:
    """The release of the vLLM of this process, without a local part such as ``+cu130``."""
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        found = str(importlib.import_module("vllm").__version__)
    return found.partition("+")[0]


def _applied(kind: str, name: str, module: str, version: str) -> str | None:
    """What the fix says is active; None where it could not be applied, which is warned of."""
    try:
        return f"{name} ({importlib.import_module(module).apply(version)})"
    except FixError as error:
        said = str(error)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    logger.warning("moedoctor: the %s %s is not applied to vLLM %s: %s", kind, name, version, said)
    return None
