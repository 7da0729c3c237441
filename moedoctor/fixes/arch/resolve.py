"""The target for one GPU and toolkit; public as `moedoctor.fixes.arch.resolve_arch`."""

from __future__ import annotations

from dataclasses import dataclass

from moedoctor.fixes.arch.targets import (
    FAMILY_TARGETS_SINCE,
    NEWEST_CUDA_MAJOR,
    OLDEST_CUDA,
    Capability,
    CudaVersion,
    Target,
    find_first_cuda,
    find_last_cuda,
    is_known_target,
    list_capabilities,
    parse_capability,
    parse_cuda,
    show,
)

_COVERED = f"{show(OLDEST_CUDA)} to {NEWEST_CUDA_MAJOR}.x"
_SM12X = "block-scaled FP4 MMA, FP4 conversion, setmaxnreg and tensormap.replace"


@dataclass(frozen=True)
class ArchDecision:
    """A compile target, and why this one."""

    target: str
    """``120f``, as in ``-gencode=arch=compute_120f,code=sm_120f``."""
    reason: str

    @property
    def gencode(self) -> str:
        """The flag for nvcc."""
        return f"-gencode=arch=compute_{self.target},code=sm_{self.target}"

    @property
    def list_entry(self) -> str:
        """``12.0f``, the entry for FLASHINFER_CUDA_ARCH_LIST."""
        return Target.parse(self.target).dotted


def resolve_arch(capability: Capability | str, cuda: tuple[int, ...] | str) -> ArchDecision:
    """The target for MoE kernels on a GPU of `capability`, built with CUDA release `cuda`.

    `capability` is a pair or text, 7.5 to 12.1; `cuda` a pair or text, 12.0 to 13.x. Raises ValueError
    if that capability is unknown, or if that CUDA release cannot build for it.
    """
    gpu, toolkit = parse_capability(capability), check_cuda(parse_cuda(cuda))
    if gpu not in list_capabilities():
        known = ", ".join(map(show, list_capabilities()))
        raise ValueError(f"capability: {show(gpu)} is unknown here; expected one of {known}")
    if gpu == (10, 7) and FAMILY_TARGETS_SINCE <= toolkit < (13, 5):
        why = f"CUDA {show(toolkit)} does not know 10.7 yet, which runs code of the 10.0 family"
        return ArchDecision("100f", why)
    of_family = gpu == (12, 0) and toolkit >= FAMILY_TARGETS_SINCE
    target = Target(*gpu, "" if gpu < (9, 0) else "f" if of_family else "a")
    if not is_known_target(target, toolkit):
        raise ValueError(_explain_refusal(target, toolkit))
    return ArchDecision(str(target), _explain(target, toolkit))


def check_cuda(cuda: CudaVersion) -> CudaVersion:
    """`cuda` itself; raises ValueError if it is outside of 12.0 to 13.x."""
    if cuda < OLDEST_CUDA:
        raise ValueError(f"cuda: {show(cuda)} is too old; expected {_COVERED}")
    if cuda[0] > NEWEST_CUDA_MAJOR:
        raise ValueError(f"cuda: {show(cuda)} is newer than what is known here; expected {_COVERED}")
    return cuda


def _explain_refusal(target: Target, cuda: CudaVersion) -> str:
    gpu, first, last = show(target.capability), find_first_cuda(target), find_last_cuda(target)
    if last is not None and cuda > last:
        gone = f"sm_{target} went after CUDA {show(last)}, and Thor is 11.0 since"
        return f"cuda: {show(cuda)} cannot build for a GPU of {gpu}: {gone}"
    needed = f"sm_{target} needs CUDA {show(first) if first else '?'} or later"
    if target.capability == (12, 0):
        needed += f", sm_120f {show(FAMILY_TARGETS_SINCE)}"
    return f"cuda: {show(cuda)} is too old for a GPU of {gpu}: {needed}"


def _explain(target: Target, cuda: CudaVersion) -> str:
    alone = f"the binary loads on {show(target.capability)} alone"
    if target.major < 9:
        return f"GPUs before 9.0 have no architecture-specific instructions, so {target} needs no suffix"
    if target.major == 9:
        return f"wgmma, setmaxnreg and tensormap.replace compile for 90a, not for 90; {alone}"
    if target.major < 12:
        return (
            f"tcgen05, FP4 conversion, setmaxnreg and tensormap.replace compile for {target}, not without "
            f"its suffix, which FlashInfer gives it in every release; {alone}"
        )
    if target.suffix == "f":
        return (
            f"{_SM12X} compile for 120f, not for 120; 120a takes the same ones but its binary loads on 12.0 "
            "alone; FlashInfer builds 120f since 0.6.7"
        )
    if target.minor == 0:
        family = f"CUDA {show(cuda)} has no family targets (120f needs {show(FAMILY_TARGETS_SINCE)})"
        return f"{family}, and 120a takes the same {_SM12X}; {alone}"
    return (
        f"{_SM12X} compile for {target}; FlashInfer gives 12.1 a binary of its own since 0.6.8, because "
        "code for 12.0 was reported to end in illegal instructions on it"
    )
