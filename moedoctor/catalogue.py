"""The registry: known failures, subjects and report formats, found through entry points.

Ours are registered in pyproject.toml exactly as another project registers its own. Nothing here
imports torch, and a broken plug-in of somebody else is reported by name instead of breaking ours.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from moedoctor.interfaces import Fault, Reporter, SubjectProvider

FAULTS = "moedoctor.faults"
SUBJECTS = "moedoctor.subjects"
REPORTERS = "moedoctor.reporters"


class PluginError(Exception):
    """An entry point of one of our groups that cannot be used; one line says which and why."""


@functools.cache
def faults() -> Mapping[str, Fault]:
    """Catalogue id -> known failure, in the order of the ids."""
    found: dict[str, Fault] = {}
    for entry in _entries(FAULTS):
        fault = _load(entry, Fault)
        if fault.id in found:
            raise PluginError(
                f"{FAULTS}: {entry.value} takes the id {fault.id}, which {found[fault.id].name} has"
            )
        found[fault.id] = fault
    return dict(sorted(found.items()))


@functools.cache
def subjects() -> Mapping[str, SubjectProvider]:
    """Subject kind -> its provider."""
    providers = [_load(entry, SubjectProvider) for entry in _entries(SUBJECTS)]
    return {provider.kind: provider for provider in sorted(providers, key=lambda one: one.rank)}


@functools.cache
def reporters() -> Mapping[str, Reporter]:
    """Format name -> reporter."""
    return {entry.name: _load(entry, Reporter) for entry in _entries(REPORTERS)}


def registered_names() -> frozenset[str]:
    """The names under which known failures are registered, ours and others'; none of them is loaded."""
    return frozenset(entry.name for entry in _entries(FAULTS))


def faults_beside(names: Collection[str]) -> tuple[Fault, ...]:
    """The known failures that are registered under other names than `names`; only these are loaded."""
    others = [_load(entry, Fault) for entry in _entries(FAULTS) if entry.name not in names]
    return tuple(sorted(others, key=lambda fault: fault.id))


def subject_kind(name: str) -> str | None:
    """The kind of the subject called `name`; None where no provider knows it."""
    return next((kind for kind, provider in subjects().items() if provider.owns(name)), None)


def find_fault(text: str) -> Fault | None:
    """The known failure with this id or name, in any case and with ``-`` for ``_``."""
    wanted = text.strip().lower().replace("-", "_")
    return next((fault for fault in faults().values() if wanted in (fault.id.lower(), fault.name)), None)


def _entries(group: str) -> tuple[EntryPoint, ...]:
    found = tuple(entry_points(group=group))
    if not found:
        raise PluginError(
            f"no entry points in the group {group}: install moedoctor (pip install -e .), do not just copy it"
        )
    return found


def _load(entry: EntryPoint, kind: type[Any]) -> Any:
    try:
        plugin = entry.load()()
    except Exception as error:
        raise PluginError(
            f"{entry.group}: {entry.name} = {entry.value} does not load: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(plugin, kind):
        raise PluginError(
            f"{entry.group}: {entry.name} = {entry.value} is no {kind.__module__}.{kind.__name__}"
        )
    return plugin
