"""Whether a rule of an entry fits a machine, and which facts say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from moedoctor.diagnose.check.machine import Machine
from moedoctor.entries.rules import Condition
from moedoctor.redaction import Redactor


class _Unfit(Exception):  # noqa: N818 - no error, and it never leaves this module
    """One part of the condition does not hold."""


def fits(condition: Condition, machine: Machine, redactor: Redactor) -> dict[str, Any] | None:
    """The facts by which everything in `condition` holds on `machine`; None where one does not."""
    try:
        return dict(_facts(condition, machine, redactor))
    except _Unfit:
        return None


def within(range_: str, version: str | None) -> bool:
    """Whether `version` is in the range: development builds by their number, unreadable text never."""
    try:
        return version is not None and SpecifierSet(range_).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _facts(condition: Condition, machine: Machine, redactor: Redactor) -> Iterator[tuple[str, Any]]:
    for name, range_ in condition.packages.items():
        version = machine.version(name)
        _hold(within(range_, version))
        yield name, version
    if condition.file is not None:
        _hold(machine.has_file(condition.file))
        yield "file", condition.file
    if condition.capability is not None:
        meant = [one for one in machine.capabilities if within(condition.capability or "", one)]
        _hold(bool(meant))
        yield "capability", ", ".join(meant)
    if condition.cuda is not None:
        _hold(within(condition.cuda, machine.cuda))
        yield "cuda", machine.cuda
    if condition.wsl is not None:
        _hold(machine.facts.get("wsl") is condition.wsl)
        yield "wsl", condition.wsl
    for name, wanted in (("uva", condition.uva), ("pins", condition.pins)):
        if wanted is not None:
            answer = getattr(machine.offload, name)
            _hold(answer.value is wanted)
            yield name, f"{'yes' if wanted else 'no'}: {answer.reason}"
    yield from _settings(condition, machine, redactor)


def _settings(condition: Condition, machine: Machine, redactor: Redactor) -> Iterator[tuple[str, Any]]:
    shown = {}
    for name, value in condition.variables.items():
        _hold(machine.variables.get(name) == value)
        shown[name] = value
    for name, value in condition.variables_not.items():
        _hold(machine.variables.get(name) != value)
    if condition.any_set:
        present = [name for name in condition.any_set if name in machine.variables]
        _hold(bool(present))
        shown.update((name, redactor.setting(name, machine.variables[name])) for name in present)
    if shown:
        yield "variables", shown


def _hold(so: bool) -> None:
    if not so:
        raise _Unfit
