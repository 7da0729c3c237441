"""Variables of this machine that do nothing: those about backends are MD010, the others plain problems."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moedoctor.diagnose.check.arch import JitCache
from moedoctor.diagnose.check.machine import Machine, fits
from moedoctor.diagnose.check.records import Finding, Problem
from moedoctor.diagnose.settings.records import SettingFinding
from moedoctor.diagnose.settings.settings import check_flashinfer, check_settings
from moedoctor.diagnose.settings.tables import vllm_variables
from moedoctor.entries.entry import Entry
from moedoctor.redaction import Redactor

_BACKEND = re.compile(r"FLASHINFER|MOE|BACKEND|MARLIN|GEMM|FP[48]|CUTLASS|TRTLLM|CUTEDSL|B12X", re.IGNORECASE)
"""What the names of variables that choose kernels have in them."""
_CONFIDENCE = 0.9
_BETWEEN = 0.5
"""For a vLLM that is not in the tables: it is judged by the release before it."""


def setting_findings(
    entry: Entry, machine: Machine, cache: JitCache, redactor: Redactor
) -> Iterator[Finding]:
    """One finding for all variables about backends that have no effect, beside those that a rule names."""
    named = next((one.when.any_set for one in entry.affects if fits(one.when, machine, redactor)), [])
    found = [
        one for one in _dead(machine) if _BACKEND.search(_name(one)) is not None and _name(one) not in named
    ]
    if not found:
        return
    packages = {name: machine.version(name) for name in ("vllm", "flashinfer-python")}
    shown = {_name(one): redactor.setting(_name(one), _value(one)) for one in found}
    yield Finding(
        id=entry.id,
        name=entry.name,
        title=entry.title,
        severity="error" if any(one.stops for one in found) else "warning",
        confidence=_CONFIDENCE if _is_known(machine) else _BETWEEN,
        why=redactor.text("; ".join(f"{_name(one)}: {one.message}" for one in found)),
        needs=None,
        evidence={**{name: one for name, one in packages.items() if one}, "settings": shown},
        next_step=redactor.text("; ".join(_remedy(one) for one in found)),
    )


def setting_problems(machine: Machine, redactor: Redactor) -> Iterator[Problem]:
    """The other variables that have no effect, or stop the engine."""
    for one in _dead(machine):
        name = _name(one)
        if _BACKEND.search(name) is None:
            yield Problem(
                what=f"{redactor.text(name)}: {one.problem.replace('_', ' ')}",
                severity="error" if one.stops else "warning",
                why=redactor.text(one.message),
                evidence={"variables": {name: redactor.setting(name, _value(one))}},
                next_step=redactor.text(_remedy(one)),
            )


def _dead(machine: Machine) -> tuple[SettingFinding, ...]:
    vllm, flashinfer = machine.version("vllm"), machine.version("flashinfer-python")
    release = vllm_variables().at_or_before(vllm or "")
    if release is not None:
        found = check_settings(release, machine.variables, flashinfer=flashinfer)
    else:
        found = check_flashinfer(flashinfer or "", machine.variables)
    return tuple(one for one in found if not one.takes_effect)


def _is_known(machine: Machine) -> bool:
    version = machine.version("vllm")
    return version is None or version.partition("+")[0] in vllm_variables().releases


def _remedy(one: SettingFinding) -> str:
    return f"in place of {_name(one)} use {one.instead}" if one.instead else f"unset {_name(one)}"


def _name(one: SettingFinding) -> str:
    return one.setting.partition("=")[0]


def _value(one: SettingFinding) -> str:
    return one.setting.partition("=")[2]
