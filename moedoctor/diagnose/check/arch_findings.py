"""MD004 by observation: what FlashInfer makes of the GPUs and of its list variable, and has compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moedoctor.diagnose.check.jit_folders import JitCache
from moedoctor.diagnose.check.machine import Machine
from moedoctor.diagnose.check.records import Finding
from moedoctor.entries.entry import Entry
from moedoctor.fixes.arch import FLASHINFER_LIST, resolve_arch_list
from moedoctor.fixes.arch.releases import ArchReading, flashinfer_targets
from moedoctor.fixes.arch.targets import Target, parse_capability, parse_cuda, sass_loads
from moedoctor.redaction import Redactor

_SUFFIX_SINCE = (9, 0)
"""GPUs from here on have instructions that need a suffix."""


def arch_findings(entry: Entry, machine: Machine, cache: JitCache, redactor: Redactor) -> Iterator[Finding]:
    """One finding for each GPU that the installed release would build wrongly for, and for wrong folders."""
    release = machine.version("flashinfer-python")
    if release is None:
        return
    for capability in machine.capabilities:
        yield from _build(entry, machine, release, capability, redactor)
    yield from _folders(entry, release, cache)


def _build(
    entry: Entry, machine: Machine, release: str, capability: str, redactor: Redactor
) -> Iterator[Finding]:
    setting = machine.variables.get(FLASHINFER_LIST)
    try:
        gpu, cuda = parse_capability(capability), parse_cuda(machine.cuda or "")
        reading = flashinfer_targets(release, capability=gpu, cuda=cuda, arch_list=setting)
    except ValueError:
        return  # a GPU, toolkit or release that the tables do not know
    why = _wrong(reading, gpu, setting)
    if why is None:
        return
    evidence: dict[str, Any] = {
        "flashinfer": release,
        "capability": capability,
        "cuda": machine.cuda,
        "builds_for": list(reading.targets),
    }
    if setting is not None:
        evidence["variables"] = {FLASHINFER_LIST: redactor.setting(FLASHINFER_LIST, setting)}
    if reading.error:
        evidence["error"] = redactor.text(reading.error)
    remedy = redactor.text(_remedy(setting, capability, machine.cuda))
    yield _finding(entry, "error", 0.9, why, evidence, remedy)


def _wrong(reading: ArchReading, gpu: tuple[int, int], setting: str | None) -> str | None:
    """Why a build would not do for `gpu`; None where it does."""
    source = "the GPU" if setting is None else FLASHINFER_LIST
    if reading.error:
        if setting is not None:
            return f"FlashInfer cannot read {FLASHINFER_LIST}, which ends its import"
        return "FlashInfer finds no architecture to build for"
    targets = [Target.parse(one) for one in reading.targets]
    if not any(sass_loads(one, gpu) for one in targets):
        built = ", ".join(reading.targets)
        return f"FlashInfer builds for {built} by {source}, and that does not run on this GPU"
    if gpu >= _SUFFIX_SINCE and not any(one.suffix and sass_loads(one, gpu) for one in targets):
        built = ", ".join(reading.targets)
        return (
            f"FlashInfer builds for plain {built} by {source}, without the instructions that MoE kernels need"
        )
    return None


def _remedy(setting: str | None, capability: str, cuda: str | None) -> str:
    try:
        decisions = resolve_arch_list(setting, capability, cuda or "")
    except ValueError as error:
        return f"{error}; see `moedoctor explain MD004`"
    value = " ".join(one.list_entry for one in decisions)
    return f"set {FLASHINFER_LIST}='{value}', or unset it" if setting else f"set {FLASHINFER_LIST}='{value}'"


def _folders(entry: Entry, release: str, cache: JitCache) -> Iterator[Finding]:
    wrong = {
        f"{one.release}/{'_'.join(one.targets)}": list(one.lacking)
        for one in cache.folders
        if one.release == release and one.lacking
    }
    if wrong:
        why = "FlashInfer's JIT cache holds MoE or GEMM kernels compiled for a target without its suffix"
        evidence = {"flashinfer": release, "jit_cache": wrong}
        remedy = (
            f"remove these folders of the cache, and look at {FLASHINFER_LIST} where FlashInfer is started"
        )
        yield _finding(entry, "warning", 0.6, why, evidence, remedy)


def _finding(
    entry: Entry, severity: str, confidence: float, why: str, evidence: dict[str, Any], next_step: str
) -> Finding:
    return Finding(
        id=entry.id,
        name=entry.name,
        title=entry.title,
        severity=severity,
        confidence=confidence,
        why=why,
        needs="FlashInfer's fused MoE (FLASHINFER_CUTLASS)",
        evidence=evidence,
        next_step=next_step,
    )
