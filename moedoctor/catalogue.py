"""The registry: known failures, subjects and report formats, found through entry points.

Ours are registered in pyproject.toml, as another project registers its own. Nothing here imports torch. A
broken plug-in of another project is named on stderr and left out.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from moedoctor.interfaces import Fault, Reporter, SubjectProvider
from moedoctor.processes.ask import answer, make_absolute, run_module
from moedoctor.processes.deaths import find_first_line
from moedoctor.text import print_message

FAULTS = "moedoctor.faults"
SUBJECTS = "moedoctor.subjects"
REPORTERS = "moedoctor.reporters"
LEAVE_OUT = "MOEDOCTOR_LEAVE_OUT"
"""Variable: the entry points of other projects that are not loaded, as ``group:name``, with commas between.
The others are then loaded without being tried in a child first, as in the children of a run."""

_KINDS: Mapping[str, type[Any]] = {FAULTS: Fault, SUBJECTS: SubjectProvider, REPORTERS: Reporter}
_LOAD_SECONDS = 20.0


class PluginError(Exception):
    """An entry point of one of our groups that cannot be used; one line says which and why."""


@functools.cache
def load_faults() -> Mapping[str, Fault]:
    """Return the known failures by catalogue id, in the order of the ids."""
    loaded: dict[str, Fault] = {}
    for entry, fault in _load_group(FAULTS):
        if fault.id in loaded:
            raise PluginError(
                f"{FAULTS}: {entry.value} takes the id {fault.id}, which {loaded[fault.id].name} has"
            )
        loaded[fault.id] = fault
    return dict(sorted(loaded.items()))


@functools.cache
def load_subjects() -> Mapping[str, SubjectProvider]:
    """Return the providers of subjects by their kind."""
    providers = [provider for _, provider in _load_group(SUBJECTS)]
    return {provider.kind: provider for provider in sorted(providers, key=lambda provider: provider.rank)}


@functools.cache
def load_reporters() -> Mapping[str, Reporter]:
    """Return the reporters by the name of their format."""
    return {entry.name: reporter for entry, reporter in _load_group(REPORTERS)}


def is_ours(plugin: Fault | Reporter) -> bool:
    """Return True if moedoctor itself, not another project, answers for this plug-in."""
    return type(plugin).__module__.partition(".")[0] == "moedoctor"


def find_left_out() -> frozenset[str]:
    """Return the entry points of other projects that cannot be used, as ``group:name``.

    Each is loaded in a child process first, so that one which hangs or ends its process harms nothing here.
    """
    if LEAVE_OUT in os.environ:
        return frozenset(os.environ[LEAVE_OUT].split(","))
    others = [entry for group in _KINDS for entry in _list_entry_points(group) if not _is_our_entry(entry)]
    return _try_loading(tuple((entry.group, entry.name) for entry in others)) if others else frozenset()


def list_registered_names() -> frozenset[str]:
    """Return the names under which known failures are registered, ours and others'; loads none of them."""
    return frozenset(entry.name for entry in _list_entry_points(FAULTS))


def load_faults_beside(names: Collection[str]) -> tuple[Fault, ...]:
    """Return the known failures that are registered under other names than `names`; loads only these."""
    others = [fault for _, fault in _load_group(FAULTS, beside=names)]
    return tuple(sorted(others, key=lambda fault: fault.id))


def find_subject_kind(name: str) -> str | None:
    """Return the kind of the subject called `name`; None if no provider knows it."""
    return next((kind for kind, provider in load_subjects().items() if provider.owns(name)), None)


def find_fault(text: str) -> Fault | None:
    """Return the known failure with this id or name, in any case and with ``-`` for ``_``, or None."""
    key = text.strip().lower().replace("-", "_")
    return next((fault for fault in load_faults().values() if key in (fault.id.lower(), fault.name)), None)


def _list_entry_points(group: str) -> tuple[EntryPoint, ...]:
    try:
        registered = tuple(entry_points(group=group))
    except Exception as error:  # whatever a malformed entry_points.txt makes of its reader
        raise PluginError(
            f"the entry points of the installed packages cannot be read ({type(error).__name__}: {error}); "
            "expected a valid entry_points.txt in each *.dist-info"
        ) from error
    if not registered:
        raise PluginError(
            f"no entry points in the group {group}: install moedoctor (pip install -e .), do not just copy it"
        )
    return registered


def _is_our_entry(entry: EntryPoint) -> bool:
    return entry.value.startswith("moedoctor.")  # `entry.module` raises for a malformed value


def _load_group(group: str, beside: Collection[str] = ()) -> Iterator[tuple[EntryPoint, Any]]:
    """Load the plug-ins of a group, apart from those that are left out or have a name in `beside`."""
    for entry in _list_entry_points(group):
        if entry.name not in beside and (
            _is_our_entry(entry) or f"{group}:{entry.name}" not in find_left_out()
        ):
            yield entry, _load(entry)


def _load(entry: EntryPoint) -> Any:
    try:
        plugin = entry.load()()
    except Exception as error:
        raise PluginError(
            f"{entry.group}: {entry.name} = {entry.value} does not load: {type(error).__name__}: {error}"
        ) from error
    kind = _KINDS[entry.group]
    if not isinstance(plugin, kind):
        raise PluginError(
            f"{entry.group}: {entry.name} = {entry.value} is not a {kind.__module__}.{kind.__name__}"
        )
    return plugin


@functools.cache
def _try_loading(others: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """Load entry points in children; return those that failed, and name each on stderr."""
    waiting, refused = list(others), {}
    while waiting:
        request = {"path": make_absolute(sys.path), "entries": waiting}
        ended = run_module("moedoctor.catalogue", request, seconds=_LOAD_SECONDS)
        for (group, name), problem in zip(waiting, ended.answers, strict=False):
            if problem is not None:
                refused[f"{group}:{name}"] = problem
        waiting = waiting[len(ended.answers) :]
        if waiting:
            group, name = waiting.pop(0)
            refused[f"{group}:{name}"] = f"loading it ended its process: {ended.problem or 'exit status 0'}"
    for name, problem in refused.items():
        print_message(f"a plug-in of another project is left out: {name}: {problem}")
    return frozenset(refused)


def _report_problems(request: Mapping[str, Any]) -> Iterator[str | None]:
    """In a child: load each entry point and say why it cannot be used, or None."""
    sys.path[:] = request["path"]
    for group, name in request["entries"]:
        (entry,) = entry_points(group=group, name=name)
        try:
            _load(entry)
            yield None
        except PluginError as error:
            yield find_first_line(str(error))
        except BaseException as error:  # such as sys.exit()
            yield find_first_line(f"{entry.value} does not load: {type(error).__name__}: {error}")


if __name__ == "__main__":
    answer(_report_problems)
