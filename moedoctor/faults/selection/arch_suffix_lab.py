"""What runs in the child for MD004: the choice of FlashInfer up to 0.6.6, ours, and what each is worth.

Nobody's word decides whether a target is good. Where the compiler of the case's CUDA release is at hand it is
asked, for the target itself and for each instruction that the MoE kernels of that GPU use; elsewhere what the
same release of ptxas accepted when `moedoctor.diagnose.cuda.instructions` was written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moedoctor.diagnose.cuda.instructions import Instruction, needed, takes
from moedoctor.diagnose.cuda.toolchain import attempt, attempts, compiler_for, find_compilers
from moedoctor.fixes.arch import resolve_arch_list
from moedoctor.fixes.arch.releases import ArchReading, moe_targets
from moedoctor.fixes.arch.targets import (
    Capability,
    CudaVersion,
    Target,
    parse_capability,
    parse_cuda,
    sass_loads,
    toolkit_knows,
    toolkit_targets,
)
from moedoctor.processes.cuda_tools import Tool
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.selection.arch_suffix import ArchSuffixParameters

FAULTY_RELEASE = "0.6.6"
"""The last release that appends ``a`` to a GPU's number and passes bare entries of the list to nvcc."""


class ArchResolver(Protocol):
    """What is put to the test."""

    def resolve(self, capability: Capability, cuda: CudaVersion, arch_list: str | None) -> ArchReading:
        """The targets of the MoE module, or the error in their place."""


class FaultyArch:
    """FlashInfer 0.5.0 to 0.6.6, restated in `moedoctor.fixes.arch.releases`."""

    def resolve(self, capability: Capability, cuda: CudaVersion, arch_list: str | None) -> ArchReading:
        return moe_targets(FAULTY_RELEASE, capability=capability, cuda=cuda, arch_list=arch_list)


class FixedArch:
    """Ours."""

    def resolve(self, capability: Capability, cuda: CudaVersion, arch_list: str | None) -> ArchReading:
        try:
            decisions = resolve_arch_list(arch_list, capability, cuda)
        except ValueError as error:
            return ArchReading((), str(error))
        return ArchReading(tuple(one.target for one in decisions))


@dataclass(frozen=True)
class _Judge:
    """The compiler of one CUDA release, or what is known of it."""

    cuda: CudaVersion
    compiler: Tool | None

    def unknown(self, target: Target) -> str | None:
        """None where the compiler knows `target`, else what it says."""
        if self.compiler is not None:
            said = attempt(self.compiler, target, None)
            return None if said.accepted else said.line
        return None if toolkit_knows(target, self.cuda) else f"sm_{target} is unknown"

    def refusals(self, target: Target, instructions: Sequence[Instruction]) -> dict[str, str]:
        """The names of those of `instructions` that do not compile for `target`, each with what is said."""
        if self.compiler is not None:
            tried = attempts(self.compiler, target, instructions)
            return {name: one.line for name, one in tried.items() if not one.accepted}
        refused = [one.name for one in instructions if not takes(target, one, self.cuda)]
        return {name: f"{name} does not compile for sm_{target}" for name in refused}


def observe(parameters: ArchSuffixParameters, implementation: ArchResolver) -> Observation:
    """Ask `implementation` for its targets and try each of them."""
    gpu, cuda = parse_capability(parameters.capability), parse_cuda(parameters.cuda)
    judge = _Judge(cuda, compiler_for(cuda, find_compilers()))
    reading = implementation.resolve(gpu, cuda, parameters.arch_list)
    return Observation(
        {
            "targets": list(reading.targets),
            "error": reading.error,
            "checked": [_check(name, gpu, judge) for name in reading.targets],
            "would_do": [str(one) for one in _would_do(gpu, judge)] if reading.error else [],
            "decided_by": str(judge.compiler) if judge.compiler else "what such a ptxas accepted",
        }
    )


def _check(name: str, gpu: Capability, judge: _Judge) -> dict[str, Any]:
    """Whether the compiler knows the target, whether its code loads on the GPU, and what it lacks."""
    outside: dict[str, Any] = {"target": name, "known": False, "loads": False, "lacks": []}
    try:
        target = Target.parse(name)
    except ValueError as error:
        return {**outside, "said": str(error)}
    unknown = judge.unknown(target)
    if unknown is not None:
        return {**outside, "said": unknown}
    loads = sass_loads(target, gpu)
    refused = judge.refusals(target, needed(gpu)) if loads else {}
    said = next(iter(refused.values()), None)
    return {"target": name, "known": True, "loads": loads, "lacks": list(refused), "said": said}


def _would_do(gpu: Capability, judge: _Judge) -> list[Target]:
    """The targets of this toolkit that load on the GPU and take everything that its MoE kernels use."""
    loading = (one for one in toolkit_targets(judge.cuda) if sass_loads(one, gpu))
    return [one for one in loading if not judge.unknown(one) and not judge.refusals(one, needed(gpu))]
