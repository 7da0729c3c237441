"""MD004 by observation: the targets that FlashInfer builds for here, and what its JIT cache holds.

The cache is judged by the names of its folders and files; nothing in it is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moedoctor.diagnose.check.machine import Machine
from moedoctor.diagnose.check.records import Finding
from moedoctor.diagnose.cuda.jit_cache import SUFFIX_SINCE
from moedoctor.entries.entry import Entry
from moedoctor.fixes.arch import FLASHINFER_LIST, resolve_arch_list
from moedoctor.fixes.arch.flashinfer import ArchReading, predict_targets
from moedoctor.fixes.arch.targets import Target, loads_sass, parse_capability, parse_cuda

_NEEDS = "FlashInfer's fused MoE (FLASHINFER_CUTLASS)"


def find_arch_failures(entry: Entry, machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each GPU that FlashInfer builds wrongly for, and one for wrong folders."""
    release = machine.find_version("flashinfer-python")
    if release is None:
        return
    like = machine.build.find_release(entry.id) or ("flashinfer" in machine.build.known and release)
    for capability in machine.capabilities if like else ():
        yield from _build(entry, machine, str(like), capability)
    wrong = {
        f"{folder.release}/{'_'.join(folder.targets)}": list(folder.lacking)
        for folder in machine.jit_cache.folders
        if folder.release == release and folder.lacking
    }
    if wrong:
        why = "FlashInfer's JIT cache holds MoE or GEMM kernels compiled for a target without its suffix"
        remedy = (
            f"remove these folders of the cache, and look at {FLASHINFER_LIST} where FlashInfer is started"
        )
        evidence = {"flashinfer": release, "jit_cache": wrong}
        yield Finding.from_entry(entry, "warning", 0.6, why, evidence, remedy, needs=_NEEDS)


def _build(entry: Entry, machine: Machine, release: str, capability: str) -> Iterator[Finding]:
    """Yield a finding if a FlashInfer that chooses targets as `release` builds wrongly for a GPU."""
    setting = machine.variables.get(FLASHINFER_LIST)
    try:
        gpu, cuda = parse_capability(capability), parse_cuda(machine.cuda or "")
        reading = predict_targets(release, capability=gpu, cuda=cuda, arch_list=setting)
    except ValueError:
        return  # a GPU, toolkit or release that the tables do not know
    why = _explain_wrong(reading, gpu, setting)
    if why is None:
        return
    evidence: dict[str, Any] = {
        "flashinfer": machine.find_version("flashinfer-python"),
        "capability": capability,
        "cuda": machine.cuda,
        "builds_for": list(reading.targets),
    }
    if setting is not None:
        evidence["variables"] = {FLASHINFER_LIST: machine.show_setting(FLASHINFER_LIST)}
    if reading.error:
        evidence["error"] = reading.error
    remedy = _suggest_remedy(setting, capability, machine.cuda)
    yield Finding.from_entry(entry, "error", 0.9, why, evidence, remedy, needs=_NEEDS)


def _explain_wrong(reading: ArchReading, gpu: tuple[int, int], setting: str | None) -> str | None:
    """Return why a build does not serve `gpu`, or None if it does."""
    source = "the GPU" if setting is None else FLASHINFER_LIST
    if reading.error:
        if setting is not None:
            return f"FlashInfer cannot read {FLASHINFER_LIST}, which ends its import"
        return "FlashInfer finds no architecture to build for"
    loading = [target for target in map(Target.parse, reading.targets) if loads_sass(target, gpu)]
    built = ", ".join(reading.targets)
    if not loading:
        return f"FlashInfer builds for {built} by {source}, and that does not run on this GPU"
    if gpu >= SUFFIX_SINCE and not any(target.suffix for target in loading):
        return (
            f"FlashInfer builds for plain {built} by {source}, without the instructions that MoE kernels need"
        )
    return None


def _suggest_remedy(setting: str | None, capability: str, cuda: str | None) -> str:
    try:
        decisions = resolve_arch_list(setting, capability, cuda or "")
    except ValueError as error:
        return f"{error}; see `moedoctor explain MD004`"
    value = " ".join(decision.list_entry for decision in decisions)
    return f"set {FLASHINFER_LIST}='{value}'" + (", or unset it" if setting else "")
