"""The plug-in that applies moedoctor's fixes inside vLLM, if the person who starts vLLM asks for them.

vLLM calls `register` in every process that it starts (entry-point group ``vllm.general_plugins``), sometimes
more than once. It does nothing unless ``MOEDOCTOR_FIXES`` names fixes (``backend``, several with commas,
``all``) or ``MOEDOCTOR_TRACE`` names something to trace. `extensions` lists both.

What was asked for by name and cannot be applied stops the engine, unless ``MOEDOCTOR_FIXES_OPTIONAL=1``: then
it is a warning. ``all`` leaves out what cannot be applied.

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
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.plugin.extensions import ALL, FIXES, TRACES, Extension, Need, read_choice
from moedoctor.plugin.known_code import Read, find_difference
from moedoctor.text import format_message, print_message

VARIABLE = "MOEDOCTOR_FIXES"
OPTIONAL = "MOEDOCTOR_FIXES_OPTIONAL"
"""If it is 1, the engine starts without what cannot be applied."""
STATUS_VARIABLE = "MOEDOCTOR_STATUS"
"""A file for what is active, a JSON list. Set for the engines that moedoctor starts itself."""
RECORD = "MOEDOCTOR_RECORD"
"""A folder for recordings, which asks for the trace `record` by itself."""
TABLES = ((VARIABLE, "fix", FIXES), ("MOEDOCTOR_TRACE", "trace", TRACES))
"""Variable, what it names, and what there is of it."""
_BY = "__moedoctor_by__"
_HINT = f"set {OPTIONAL}=1 to start vLLM without it"


def _make_printable(record: logging.LogRecord) -> bool:
    """Escape a message: it may hold the value of a variable or a name from a checkpoint."""
    record.msg, record.args = format_message(record.getMessage()), None
    return True


logger = logging.getLogger("vllm.moedoctor")  # below vLLM's own logger, so that its settings apply
logger.addFilter(_make_printable)


class FixError(Exception):
    """Something in vLLM is not as the fix expects it; one line says what. Nothing was changed."""


class OptionError(FixError):
    """A variable of ours has a bad value. It stops the engine even if only ``all`` was asked for."""


def stop_engine(reason: str) -> NoReturn:
    """Print `reason` as one line and raise SystemExit with the code 1.

    No release of vLLM catches SystemExit, neither in its engine core nor in its workers. The first process of
    an engine loads plug-ins before it starts the others, so it is the first to stop.
    """
    print_message(reason, os.environ.values())
    if plugins := sys.modules.get("vllm.plugins"):
        # vLLM notes that plug-ins are loaded before it calls them. A caller that catches this and tries
        # again must not get an engine without the fix.
        setattr(plugins, "plugins_loaded", False)  # noqa: B010
    stopped = SystemExit(reason)
    stopped.code = 1  # else Python would print the reason a second time
    raise stopped


def register() -> None:
    """Apply what ``MOEDOCTOR_FIXES`` and ``MOEDOCTOR_TRACE`` name. vLLM calls this.

    Raises SystemExit if something that was asked for by name cannot be applied.
    """
    values = [os.environ.get(variable, "") for variable, _, _ in TABLES]
    if os.environ.get(RECORD, "").strip():  # a folder asks for the recording by itself
        values[1] = f"{values[1]},record"
    _register(os.getpid(), tuple(values))


@functools.cache
def _register(process: int, values: tuple[str, ...]) -> None:
    """Apply once a process: what is applied stays, and need not be logged again."""
    active: list[str] = []
    problems: list[str] = []
    for value, (variable, kind, table) in zip(values, TABLES, strict=True):
        asked = read_choice(value, table)
        for name in asked.unknown:
            known = ", ".join((*table, ALL))
            problems.append(f"{variable} names no {kind} called {name}; expected {known}")
        for name in asked.names:
            try:
                active += _apply_extension(kind, name, table[name])
            except FixError as error:
                if name in asked.required or isinstance(error, OptionError):
                    problems.append(str(error))
                else:
                    logger.warning("moedoctor: left out: %s", error)
    if problems and not _is_optional():
        stop_engine(f"vLLM is stopped: {'; '.join(problems)} ({_HINT})")
    for problem in problems:
        logger.warning("moedoctor: %s", problem)
    if active:
        log("moedoctor: active in vLLM %s: %s", read_vllm_version(), "; ".join(active))
        if status := os.environ.get(STATUS_VARIABLE):
            Path(status).write_text(json.dumps(active), encoding="utf-8")


def refuse(name: str, reason: str) -> None:
    """Stop the engine: the fix `name` is active, and a model or setting that vLLM met later rules it out.

    If the fix is optional, log the reason once and return: the caller then leaves vLLM as it is. Raises
    SystemExit.
    """
    if name in read_choice(os.environ.get(VARIABLE, "")).required and not _is_optional():
        stop_engine(f"vLLM is stopped: {name} is refused: {reason} ({_HINT})")
    _warn_left_out(name, reason)


@functools.cache
def _warn_left_out(name: str, reason: str) -> None:  # every layer of a model has the same reason
    logger.warning("moedoctor: left out: %s: %s", name, reason)


def _is_optional() -> bool:
    value = os.environ.get(OPTIONAL, "").strip()
    if value not in ("", "0", "1"):
        stop_engine(f"vLLM is stopped: {OPTIONAL} is {value!r}; expected 1, 0 or nothing")
    return value == "1"


def log(message: str, *values: object) -> None:
    """Log at INFO, or at WARNING if INFO would not be shown."""
    # Newer releases set up their logging after plug-ins are loaded; until then Python prints warnings only.
    shown = logger.hasHandlers() and logger.isEnabledFor(logging.INFO)
    logger.log(logging.INFO if shown else logging.WARNING, message, *values)


def read_vllm_version() -> str:
    """Return the release of this process's vLLM, without a local part such as ``+cu130``."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = str(importlib.import_module("vllm").__version__)
    return version.partition("+")[0]


def list_known_releases() -> Sequence[str]:
    """Return the vLLM releases that the fixes know, oldest first."""
    return tuple(backend_tables.load_releases())


def find_base(version: str) -> str | None:
    """Return the known release that a version is or follows, 0.33.0 for 0.33.1.dev5, or None."""
    known = list_known_releases()
    try:
        own = Version(Version(version).base_version)
    except InvalidVersion:
        return None
    return (
        version
        if version in known
        else next((each for each in reversed(known) if Version(each) <= own), None)
    )


def need(name: str, extension: Extension, version: str, read: Read | None = None) -> tuple[Need, str]:
    """Return whether a fix or trace is made for a version of vLLM, and the reason if it is not.

    For a build that is no known release it is, if all functions that it changes or relies on are those of the
    known release before it; `read` gives vLLM's files, by default those of the installed vLLM.
    """
    known, base = list_known_releases(), find_base(version)
    if base is None:
        return Need.REFUSED, f"it is none of the releases that the fixes know ({known[0]} to {known[-1]})"
    state, reason = extension.need(base)
    if state is not Need.MADE_FOR or base == version:
        return state, reason
    if different := find_difference(name, base, read):
        return Need.REFUSED, different
    return state, f"same code as {base} where this {'trace' if name in TRACES else 'fix'} changes it"


def _apply_extension(kind: str, name: str, extension: Extension) -> Sequence[str]:
    """Apply an extension and return a line that says what is active. Raises FixError."""
    version = "of unknown release"
    try:
        version = read_vllm_version()
        state, reason = need(name, extension, version)
        if state is Need.UNNEEDED:
            log("moedoctor: vLLM %s does not need the %s %s: %s", version, kind, name, reason)
            return ()
        if state is Need.REFUSED:
            raise FixError(reason)
        if reason:
            log("moedoctor: %s: %s: %s", name, version, reason)
        return (f"{name} ({importlib.import_module(extension.module).apply(find_base(version))})",)
    except Exception as error:
        reason = str(error) if isinstance(error, FixError) else f"{type(error).__name__}: {error}"
        why = type(error) if isinstance(error, FixError) else FixError
        raise why(f"the {kind} {name} is not applied to vLLM {version}: {reason}") from error


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
        owner = self._resolve_owner()
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
        owner = self._resolve_owner()
        original = layer = getattr(owner, self.name)
        while layer is not None:
            if getattr(layer, _BY, None) == by:
                return
            layer = getattr(layer, "__wrapped__", None)
        if self.wrap is not None:
            replacement = functools.update_wrapper(self.wrap(original), original)
            setattr(replacement, _BY, by)
            setattr(owner, self.name, replacement)

    def _resolve_owner(self) -> Any:
        try:
            return pkgutil.resolve_name(self.owner)
        except (ImportError, AttributeError) as error:
            raise FixError(f"there is no {self.owner}: {error}") from None


def call_after(original: Any, then: Callable[[Any], Any]) -> Any:
    """Wrap a constructor: `then` gets what was made."""

    def construct(owner: Any, *arguments: Any, **options: Any) -> None:
        original(owner, *arguments, **options)
        then(owner)

    return construct


def apply_patches(by: str, version: str, patches: Sequence[Patch]) -> None:
    """Check the patches that release `version` needs, then apply them all for the fix `by`.

    Raises FixError if a check fails: then this vLLM is not what its version says, and is left alone.
    """
    needed = [patch for patch in patches if version in SpecifierSet(patch.releases, prereleases=True)]
    for patch in needed:
        patch.check()
    for patch in needed:
        patch.apply(by)
