"""The plug-in that applies moedoctor's fixes inside vLLM, if the person who starts vLLM asks for them.

vLLM calls `register` in every process that it starts (entry-point group ``vllm.general_plugins``), sometimes
more than once. It does nothing unless ``MOEDOCTOR_FIXES`` names fixes (``backend``, several with commas,
``all``) or ``MOEDOCTOR_TRACE`` names something to trace. No failure here stops vLLM.

A fix or a trace is a module with ``apply(version: str) -> str``, which returns one line that says what is
active. It describes what it changes as a table of `Patch`, each with the releases that need it and the source
that it expects, and gives the table to `apply_patches`. If anything is not as expected it raises `FixError`
and has changed nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import json
import logging
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.text import message_line

VARIABLE = "MOEDOCTOR_FIXES"
ALL = "all"
FIXES: Mapping[str, str] = {
    "backend": "moedoctor.upstream.plugin.backend_fix",
    "expert_cache": "moedoctor.upstream.plugin.expert_cache_fix",
    "offload": "moedoctor.upstream.plugin.offload_fix",
    "routing": "moedoctor.upstream.plugin.routing_fix",
}
"""Name of a fix -> its module."""
TRACES: Mapping[str, str] = {
    "nan": "moedoctor.upstream.plugin.nan_trace",
}
"""Name of a trace -> its module."""
STATUS_VARIABLE = "MOEDOCTOR_STATUS"
"""A file for what is active, a JSON list. Set for the engines that moedoctor starts itself."""
_TABLES = ((VARIABLE, "fix", FIXES), ("MOEDOCTOR_TRACE", "trace", TRACES))
_BY = "__moedoctor_by__"


def _make_printable(record: logging.LogRecord) -> bool:
    """Escape a message: it may hold the value of a variable or a name from a checkpoint."""
    record.msg, record.args = message_line(record.getMessage()), None
    return True


logger = logging.getLogger("vllm.moedoctor")  # below vLLM's own logger, so that its settings apply
logger.addFilter(_make_printable)


def register() -> None:
    """Apply what ``MOEDOCTOR_FIXES`` and ``MOEDOCTOR_TRACE`` name. vLLM calls this; it never raises."""
    try:
        _register(os.getpid(), tuple(os.environ.get(variable, "") for variable, _, _ in _TABLES))
    except Exception as error:
        logger.warning("moedoctor: no fix is active: %s: %s", type(error).__name__, error)


@functools.cache
def _register(process: int, values: tuple[str, ...]) -> None:
    """Apply once a process: what is applied stays, and need not be logged again."""
    modules = []
    for value, (variable, kind, table) in zip(values, _TABLES, strict=True):
        names, unknown = chosen(value, table)
        for name in unknown:
            known = ", ".join((*table, ALL))
            logger.warning("moedoctor: %s names no %s called %s; expected %s", variable, kind, name, known)
        modules += [(kind, name, table[name]) for name in names]
    if not modules:
        return
    version, known_to_us = installed_version(), known_releases()
    if version not in known_to_us:
        logger.warning(
            "moedoctor: vLLM %s is none of the releases that the fixes know (%s to %s); nothing is changed",
            version,
            known_to_us[0],
            known_to_us[-1],
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


def chosen(value: str, table: Mapping[str, str] = FIXES) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of `table` that a variable's `value` asks for, and the names that are not in it."""
    names = list(dict.fromkeys(part.strip().lower() for part in value.split(",") if part.strip()))
    unknown = tuple(name for name in names if name not in (*table, ALL))
    return tuple(table) if ALL in names else tuple(name for name in names if name in table), unknown


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


class FixError(Exception):
    """Something in vLLM is not as the fix expects it; one line says what. Nothing was changed."""


@dataclass(frozen=True)
class Patch:
    """A function of vLLM that a fix wraps, and what the function must be like."""

    owner: str
    """The module that has it, or ``module:Class``."""
    name: str
    wrap: Callable[[Any], Any] | None
    """Returns what takes the function's place; None if the fix only depends on the function."""
    parameters: str = ""
    """Names of parameters that it must take, with spaces between."""
    source: Sequence[str] = ()
    """Texts that its source must contain."""
    once: str = ""
    """A text that its source must contain exactly once, if it is not empty."""
    releases: str = ""
    """The releases that need the patch, such as ``<0.20.0``; empty for all."""

    def check(self) -> None:
        """Raise FixError if vLLM's own function is not as expected; `inspect` looks under patches."""
        owner = self._owner()
        where = f"{getattr(owner, '__name__', owner)}.{self.name}"
        function = getattr(owner, self.name, None)
        if function is None:
            raise FixError(f"there is no {where}")
        existing = list(inspect.signature(function).parameters)
        missing = [parameter for parameter in self.parameters.split() if parameter not in existing]
        if missing:
            raise FixError(f"{where} takes no {', '.join(missing)}; it takes {', '.join(existing)}")
        try:
            text = inspect.getsource(function)
        except (OSError, TypeError):
            raise FixError(f"the source of {where} cannot be read, so it cannot be checked") from None
        for line in self.source:
            if line not in text:
                raise FixError(f"{where} does not hold `{line}`")
        if self.once and text.count(self.once) != 1:
            raise FixError(f"{where} holds `{self.once}` {text.count(self.once)} times; expected it once")

    def apply(self, by: str) -> None:
        """Replace the function, unless the fix `by` did so before."""
        owner = self._owner()
        original = layer = getattr(owner, self.name)
        while layer is not None:
            if getattr(layer, _BY, None) == by:
                return
            layer = getattr(layer, "__wrapped__", None)
        if self.wrap is not None:
            replacement = functools.update_wrapper(self.wrap(original), original)
            setattr(replacement, _BY, by)
            setattr(owner, self.name, replacement)

    def _owner(self) -> Any:
        try:
            return pkgutil.resolve_name(self.owner)
        except (ImportError, AttributeError) as error:
            raise FixError(f"there is no {self.owner}: {error}") from None


def apply_patches(by: str, version: str, patches: Sequence[Patch]) -> None:
    """Check the patches that release `version` needs, then apply them all for the fix `by`.

    Raises FixError if a check fails: then this vLLM is not what its version says, and is left alone.
    """
    needed = [patch for patch in patches if version in SpecifierSet(patch.releases, prereleases=True)]
    for patch in needed:
        patch.check()
    for patch in needed:
        patch.apply(by)
