"""The lab of MD004: the choice of FlashInfer up to 0.6.6, ours, and what each is worth.

The compiler of the case's CUDA release decides whether a target is good: it is given the target itself and
each instruction that the MoE kernels of that GPU use. Without that compiler, the records in
`moedoctor.diagnose.cuda.instructions` decide, which were made with the same release of ptxas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moedoctor.diagnose.cuda.instructions import (
    Instruction,
    find_compilers,
    list_needed,
    summarize,
    takes,
    try_instruction,
    try_instructions,
    try_targets,
)
from moedoctor.faults.selection.arch_suffix import ArchSuffixParameters
from moedoctor.fixes.arch import resolve_arch_list
from moedoctor.fixes.arch.flashinfer import ArchReading, list_releases, predict_moe_targets
from moedoctor.fixes.arch.targets import (
    Capability,
    CudaVersion,
    Target,
    is_known_target,
    list_targets,
    loads_sass,
    parse_capability,
    parse_cuda,
)
from moedoctor.processes.cuda_tools import Tool
from moedoctor.results import Case, Evidence, UnavailableError
from moedoctor.upstream.flashinfer.context import FlashInferContext

FAULTY_RELEASE = "0.6.6"
"""The last release that appends ``a`` to a GPU's number and passes bare entries of the list to nvcc."""

Resolver = Callable[..., ArchReading]
"""(`capability`, `cuda`, `arch_list`) -> the targets of the MoE module, or an error."""


def model(case: Case, parameters: ArchSuffixParameters, release: None) -> Evidence:
    """Observe FlashInfer 0.5.0 to 0.6.6 as restated in `moedoctor.fixes.arch.flashinfer`, or ours."""
    return observe(parameters, faulty if case.subject == "faulty" else fixed)


def library(case: Case, parameters: ArchSuffixParameters, release: None) -> Evidence:
    """Observe the installed FlashInfer's own choice."""
    return observe(parameters, FlashInferContext.installed().resolve)


faulty = partial(predict_moe_targets, FAULTY_RELEASE)


def fixed(capability: Capability, cuda: CudaVersion, arch_list: str | None) -> ArchReading:
    try:
        decisions = resolve_arch_list(arch_list, capability, cuda)
    except ValueError as error:
        return ArchReading((), str(error))
    return ArchReading(tuple(decision.target for decision in decisions))


def observe(parameters: ArchSuffixParameters, resolve: Resolver) -> Evidence:
    """Ask `resolve` for its targets and try each of them."""
    gpu, cuda = parse_capability(parameters.capability), parse_cuda(parameters.cuda)
    compiler = _Compiler(cuda, next((tool for tool in find_compilers() if tool.cuda == cuda), None))
    reading = resolve(capability=gpu, cuda=cuda, arch_list=parameters.arch_list)
    return {
        "targets": list(reading.targets),
        "error": reading.error,
        "checked": [_check(name, gpu, compiler) for name in reading.targets],
        "would_do": [str(target) for target in _list_working_targets(gpu, compiler)] if reading.error else [],
        "decided_by": str(compiler.tool) if compiler.tool else "what such a ptxas accepted",
    }


@dataclass(frozen=True)
class _Compiler:
    """The compiler of one CUDA release, or the records about it."""

    cuda: CudaVersion
    tool: Tool | None

    def find_unknown(self, target: Target) -> str | None:
        """Return what the compiler prints if it does not know `target`, else None."""
        if self.tool is not None:
            result = try_instruction(self.tool, target, None)
            return None if result.accepted else result.line
        return None if is_known_target(target, self.cuda) else f"sm_{target} is unknown"

    def find_refusals(self, target: Target, instructions: Sequence[Instruction]) -> dict[str, str]:
        """Return the instructions that do not compile for `target`, each with what the compiler prints."""
        if self.tool is not None:
            results = try_instructions(self.tool, target, instructions)
            return {name: result.line for name, result in results.items() if not result.accepted}
        refused = [each.name for each in instructions if not takes(target, each, self.cuda)]
        return {name: f"{name} does not compile for sm_{target}" for name in refused}


def _check(name: str, gpu: Capability, compiler: _Compiler) -> dict[str, Any]:
    """Return whether the compiler knows the target, whether its code loads on the GPU, and what it lacks."""
    try:
        target = Target.parse(name)
        unknown = compiler.find_unknown(target)
    except ValueError as error:
        unknown = str(error)
    if unknown is not None:
        return {"target": name, "known": False, "loads": False, "lacks": [], "said": unknown}
    loads = loads_sass(target, gpu)
    refused = compiler.find_refusals(target, list_needed(gpu)) if loads else {}
    refusal = next(iter(refused.values()), None)
    return {"target": name, "known": True, "loads": loads, "lacks": list(refused), "said": refusal}


def _list_working_targets(gpu: Capability, compiler: _Compiler) -> list[Target]:
    """The targets of this toolkit that load on the GPU and take everything that its MoE kernels use."""
    return [
        target
        for target in list_targets(compiler.cuda)
        if loads_sass(target, gpu)
        and not compiler.find_unknown(target)
        and not compiler.find_refusals(target, list_needed(gpu))
    ]


# --- Measurements of the claims -------------------------------------------------------------------------

_GPU = (12, 0)
_WORKAROUND = "12.0f"


def _need_compilers() -> Sequence[Tool]:
    """The compilers of this machine. Raises UnavailableError if there is none."""
    compilers = find_compilers()
    if not compilers:
        raise UnavailableError("needs ptxas or nvcc: install triton or the CUDA toolkit")
    return compilers


def measure_acceptance() -> dict[str, Any]:
    """Every deciding instruction for 120, 120a, 120f, 121a and 90a, in each compiler at hand."""
    names = [instruction.name for instruction in list_needed(_GPU)]
    refused, tables = {}, {}
    for compiler in _need_compilers():
        table = try_targets(compiler)
        tables[str(compiler)] = summarize(table)
        refused[str(compiler)] = {
            target: [name for name in names if not table[target][name].accepted]
            for target in ("120", "120a", "120f")
            if all(result.knows_target for result in table[target].values())
        }
    return {"needed": names, "refused": refused, "compilers": tables}


def measure_family_target() -> list[dict[str, Any]]:
    """Compile an empty kernel for 120f with each compiler at hand."""
    rows = []
    for compiler in _need_compilers():
        result = try_instruction(compiler, Target(12, 0, "f"), None)
        tool = {"compiler": str(compiler), "cuda": list(compiler.cuda)}
        rows.append({**tool, "accepted": result.accepted, "said": result.line})
    return rows


def measure_workaround() -> dict[str, Any]:
    """List the targets of each FlashInfer release, and of the installed one, with the list ``12.0f``."""
    rows = measure_family_target()
    accepting = [row["compiler"] for row in rows if row["accepted"]]
    if not accepting:
        raise UnavailableError("needs a compiler that knows sm_120f (CUDA 12.9 or later)")
    readings: dict[str, list[str]] = {}
    for release in list_releases():
        without, with_list = (
            predict_moe_targets(release, capability=_GPU, cuda=(13, 0), arch_list=arch_list).targets
            for arch_list in (None, _WORKAROUND)
        )
        readings.setdefault(f"{' '.join(without)} -> {' '.join(with_list)}", []).append(release)
    installed = None
    try:
        context = FlashInferContext.installed()
        targets = context.resolve(_GPU, (13, 0), _WORKAROUND).targets
        installed = {"release": context.release, "targets": list(targets)}
    except UnavailableError:
        pass  # the table alone decides then, and the evidence shows it
    return {
        "readings": readings,
        "installed": installed,
        "accepting": accepting,
        "refusing": {row["compiler"]: row["said"] for row in rows if not row["accepted"]},
    }
