"""MD004 by observation: the targets that FlashInfer builds for here, and what its JIT cache holds.

The cache is judged by the names of its folders and files; nothing in it is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from moedoctor.diagnose.check.machine import Machine
from moedoctor.diagnose.check.records import Finding
from moedoctor.diagnose.cuda.jit_cache import CachedModule, cached_module
from moedoctor.entries.entry import Entry
from moedoctor.fixes.arch import FLASHINFER_LIST, resolve_arch_list
from moedoctor.fixes.arch.flashinfer import ArchReading, flashinfer_targets
from moedoctor.fixes.arch.targets import Target, parse_capability, parse_cuda, sass_loads
from moedoctor.redaction import Redactor

BASE = "FLASHINFER_WORKSPACE_BASE"
MAX_MODULES = 2_000
_SUFFIX_SINCE = (9, 0)
"""GPUs from here on have instructions that need a suffix."""


@dataclass(frozen=True)
class JitFolder:
    """What was compiled by one release for one set of targets."""

    release: str
    targets: tuple[str, ...]
    """``("120f",)``; empty if FlashInfer did not find a target."""
    modules: int
    """Modules with a compiled library."""
    lacking: tuple[str, ...]
    """Modules with tensor-core kernels compiled for a target of 9.0 or later without its suffix."""


@dataclass(frozen=True)
class JitCache:
    """The cache of this user."""

    path: str
    """Where FlashInfer looks; not redacted."""
    folders: tuple[JitFolder, ...]


def read_jit_cache(environ: Mapping[str, str]) -> JitCache:
    """Return the cache that FlashInfer uses under `environ`. An absent one is empty. Raises OSError."""
    base = environ.get(BASE) or environ.get("HOME") or os.path.expanduser("~")
    root = Path(base) / ".cache" / "flashinfer"
    libraries = islice(root.glob("*/*/cached_ops/*/*.so"), MAX_MODULES) if root.is_dir() else ()
    groups: dict[tuple[str, tuple[str, ...]], list[CachedModule]] = {}
    for module in filter(None, map(cached_module, libraries)):
        groups.setdefault((module.release, tuple(map(str, module.targets))), []).append(module)
    folders = []
    for (release, targets), modules in sorted(groups.items()):
        lacking = {module.module for module in modules if _lacks_suffix(module)}
        folders.append(JitFolder(release, targets, len(modules), tuple(sorted(lacking))))
    return JitCache(str(root), tuple(folders))


def _lacks_suffix(module: CachedModule) -> bool:
    plain = any(target.capability >= _SUFFIX_SINCE and not target.suffix for target in module.targets)
    return plain and module.needs_suffix


def arch_findings(entry: Entry, machine: Machine, cache: JitCache, redactor: Redactor) -> Iterator[Finding]:
    """Yield a finding for each GPU that FlashInfer builds wrongly for, and one for wrong folders."""
    release = machine.version("flashinfer-python")
    if release is None:
        return
    for capability in machine.capabilities:
        yield from _build(entry, machine, release, capability, redactor)
    wrong = {
        f"{folder.release}/{'_'.join(folder.targets)}": list(folder.lacking)
        for folder in cache.folders
        if folder.release == release and folder.lacking
    }
    if wrong:
        why = "FlashInfer's JIT cache holds MoE or GEMM kernels compiled for a target without its suffix"
        remedy = (
            f"remove these folders of the cache, and look at {FLASHINFER_LIST} where FlashInfer is started"
        )
        yield _finding(entry, "warning", 0.6, why, {"flashinfer": release, "jit_cache": wrong}, remedy)


def _build(
    entry: Entry, machine: Machine, release: str, capability: str, redactor: Redactor
) -> Iterator[Finding]:
    setting = machine.variables.get(FLASHINFER_LIST)
    try:
        gpu, cuda = parse_capability(capability), parse_cuda(machine.cuda or "")
        reading = flashinfer_targets(release, capability=gpu, cuda=cuda, arch_list=setting)
    except ValueError:
        return  # a GPU, toolkit or release that the tables do not know
    why = _why_wrong(reading, gpu, setting)
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


def _why_wrong(reading: ArchReading, gpu: tuple[int, int], setting: str | None) -> str | None:
    """Return why a build does not serve `gpu`, or None if it does."""
    source = "the GPU" if setting is None else FLASHINFER_LIST
    if reading.error:
        if setting is not None:
            return f"FlashInfer cannot read {FLASHINFER_LIST}, which ends its import"
        return "FlashInfer finds no architecture to build for"
    loading = [target for target in map(Target.parse, reading.targets) if sass_loads(target, gpu)]
    built = ", ".join(reading.targets)
    if not loading:
        return f"FlashInfer builds for {built} by {source}, and that does not run on this GPU"
    if gpu >= _SUFFIX_SINCE and not any(target.suffix for target in loading):
        return (
            f"FlashInfer builds for plain {built} by {source}, without the instructions that MoE kernels need"
        )
    return None


def _remedy(setting: str | None, capability: str, cuda: str | None) -> str:
    try:
        decisions = resolve_arch_list(setting, capability, cuda or "")
    except ValueError as error:
        return f"{error}; see `moedoctor explain MD004`"
    value = " ".join(decision.list_entry for decision in decisions)
    return f"set {FLASHINFER_LIST}='{value}'" + (", or unset it" if setting else "")


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
