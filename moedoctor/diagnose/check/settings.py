"""Variables of this machine without effect: those about backends are MD010, the others plain problems."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moedoctor.diagnose.check.machine import Machine, match_condition
from moedoctor.diagnose.check.records import Finding, Problem
from moedoctor.diagnose.settings.settings import check_flashinfer, check_settings, correct_variables
from moedoctor.diagnose.settings.tables import SettingFinding, load_flashinfer_variables, load_vllm_variables
from moedoctor.entries.entry import Entry

_BACKEND = re.compile(r"FLASHINFER|MOE|BACKEND|MARLIN|GEMM|FP[48]|CUTLASS|TRTLLM|CUTEDSL|B12X", re.IGNORECASE)
"""Parts of the names of variables that choose kernels."""
_READ_BY_NO_RELEASE = ("unknown", "misspelt", "wrong_case")
"""Problems that a variable has whatever release is installed, or none."""
_CONFIDENCE = 0.9
_BETWEEN = 0.5
"""The confidence for a vLLM that is not in the tables: the release before it is used."""


def find_setting_failures(entry: Entry, machine: Machine) -> Iterator[Finding]:
    """Yield one finding for all variables about backends without effect that no rule of the entry names."""
    named = next((rule.when.any_set for rule in entry.affects if match_condition(rule.when, machine)), [])
    dead = [each for each in _find_dead(machine) if _BACKEND.search(each.name) and each.name not in named]
    if not dead:
        return
    packages = {name: machine.find_version(name) for name in ("vllm", "flashinfer-python")}
    vllm = packages["vllm"]
    is_known = vllm is None or vllm.partition("+")[0] in load_vllm_variables().releases
    settings = {finding.name: machine.show_setting(finding.name) for finding in dead}
    yield Finding.from_entry(
        entry,
        severity="error" if any(finding.stops for finding in dead) else "warning",
        confidence=_CONFIDENCE if is_known else _BETWEEN,
        why="; ".join(f"{finding.name}: {finding.message}" for finding in dead),
        evidence={**{name: version for name, version in packages.items() if version}, "settings": settings},
        next_step="; ".join(map(_suggest_remedy, dead)),
    )


def find_setting_problems(machine: Machine) -> Iterator[Problem]:
    """Yield the other variables that have no effect, or stop the engine."""
    for finding in _find_dead(machine):
        if not _BACKEND.search(finding.name):
            yield Problem(
                what=f"{finding.name}: {finding.problem.replace('_', ' ')}",
                severity="error" if finding.stops else "warning",
                why=finding.message,
                evidence={"variables": {finding.name: machine.show_setting(finding.name)}},
                next_step=_suggest_remedy(finding),
            )


def _find_dead(machine: Machine) -> tuple[SettingFinding, ...]:
    vllm, flashinfer = machine.find_version("vllm"), machine.find_version("flashinfer-python")
    declared = machine.build.variables
    tables = {"vllm": load_vllm_variables(), "flashinfer": load_flashinfer_variables()}
    releases = {
        "vllm": tables["vllm"].find_release(vllm or ""),
        "flashinfer": tables["flashinfer"].find_release(flashinfer or ""),
    }
    if (
        releases["vllm"] is None and vllm is not None and declared.get("vllm") is None
    ):  # older than the tables
        findings = check_flashinfer(flashinfer or "", machine.variables)
    else:
        release = releases["vllm"] = releases["vllm"] or tables["vllm"].releases[-1]
        findings = check_settings(release, machine.variables, flashinfer=flashinfer)
    for package, names in declared.items():
        version = releases[package]
        if version is not None:
            findings = correct_variables(findings, machine.variables, tables[package], version, names)
    asked = {"VLLM": vllm, "FLASHINFER": vllm or flashinfer}
    return tuple(
        finding
        for finding in findings
        if not finding.takes_effect
        and (asked[finding.name.upper().partition("_")[0]] or finding.problem in _READ_BY_NO_RELEASE)
    )


def _suggest_remedy(finding: SettingFinding) -> str:
    return f"in place of {finding.name} use {finding.instead}" if finding.instead else f"unset {finding.name}"
