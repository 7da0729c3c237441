"""The registry: known failures, subjects and report formats, found through entry points.

Ours are registered in pyproject.toml, as another project registers its own. Nothing here imports torch. A
broken plug-in is reported by name.
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
    """Return the known failures by catalogue id, in the order of the ids."""
    loaded: dict[str, Fault] = {}
    for entry in _entries(FAULTS):
        fault = _load(entry, Fault)
        if fault.id in loaded:
            raise PluginError(
                f"{FAULTS}: {entry.value} takes the id {fault.id}, which {loaded[fault.id].name} has"
            )
        loaded[fault.id] = fault
    return dict(sorted(loaded.items()))


@functools.cache
def subjects() -> Mapping[str, SubjectProvider]:
    """Return the providers of subjects by their kind."""
    providers = [_load(entry, SubjectProvider) for entry in _entries(SUBJECTS)]
    return {provider.kind: provider for provider in sorted(providers, key=lambda provider: provider.rank)}


@functools.cache
def reporters() -> Mapping[str, Reporter]:
    """Return the reporters by the name of their format."""
    return {entry.name: _load(entry, Reporter) for entry in _entries(REPORTERS)}


def registered_names() -> frozenset[str]:
    """Return the names under which known failures are registered, ours and others'; loads none of them."""
    return frozenset(entry.name for entry in _entries(FAULTS))


def faults_beside(names: Collection[str]) -> tuple[Fault, ...]:
    """Return the known failures that are registered under other names than `names`; loads only these."""
    others = [_load(entry, Fault) for entry in _entries(FAULTS) if entry.name not in names]
    return tuple(sorted(others, key=lambda fault: fault.id))


def subject_kind(name: str) -> str | None:
    """Return the kind of the subject called `name`; None if no provider knows it."""
    return next((kind for kind, provider in subjects().items() if provider.owns(name)), None)


def find_fault(text: str) -> Fault | None:
    """Return the known failure with this id or name, in any case and with ``-`` for ``_``, or None."""
    key = text.strip().lower().replace("-", "_")
    return next((fault for fault in faults().values() if key in (fault.id.lower(), fault.name)), None)


def _entries(group: str) -> tuple[EntryPoint, ...]:
    registered = tuple(entry_points(group=group))
    if not registered:
        raise PluginError(
            f"no entry points in the group {group}: install moedoctor (pip install -e .), do not just copy it"
        )
    return registered


def _load(entry: EntryPoint, kind: type[Any]) -> Any:
    try:
        plugin = entry.load()()
    except Exception as error:
        raise PluginError(
            f"{entry.group}: {entry.name} = {entry.value} does not load: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(plugin, kind):
        raise PluginError(
            f"{entry.group}: {entry.name} = {entry.value} is not a {kind.__module__}.{kind.__name__}"
        )
    return plugin
