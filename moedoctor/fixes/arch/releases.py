"""What each FlashInfer release makes of a GPU or of FLASHINFER_CUDA_ARCH_LIST, restated from its sources.

Read in `flashinfer/compilation_context.py` of the wheels 0.5.0, 0.5.3, 0.6.0, 0.6.6, 0.6.7, 0.6.7.post3,
0.6.8, 0.6.13, 0.6.16, 0.6.17, 0.6.18, 0.6.18.post1, 0.7.0, 0.7.0.post1, 0.7.1, 0.7.2 and 0.7.2.post1, and
compared with what that code answers (`tests/upstream/test_flashinfer_context.py`, given the wheels).
Changes between them:

| first release | change | where |
|---|---|---|
| 0.6.7 | bare list entries get a suffix; 12.x: ``120f`` from CUDA 12.9 on, else an error | #2725, #2839 |
| 0.6.8 | 12.1 gets ``121a`` | #2927, #2994 |
| 0.7.1 | CUDA 12.8 allowed again for 12.0, with ``120a`` | seen in the wheel |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import Version

from moedoctor.fixes.arch.targets import Capability, CudaVersion

RELEASES = (
    *("0.5.0", "0.5.1", "0.5.2", "0.5.3", "0.6.0", "0.6.1", "0.6.2", "0.6.3", "0.6.4", "0.6.5", "0.6.6"),
    *("0.6.7", "0.6.7.post1", "0.6.7.post2", "0.6.7.post3", "0.6.8", "0.6.8.post1", "0.6.9", "0.6.10"),
    *("0.6.10.post1", "0.6.11", "0.6.11.post1", "0.6.11.post2", "0.6.11.post3", "0.6.12", "0.6.13"),
    *("0.6.14", "0.6.15", "0.6.15.post1", "0.6.16", "0.6.16.post1", "0.6.16.post2", "0.6.16.post3"),
    *("0.6.16.post4", "0.6.17", "0.6.18", "0.6.18.post1", "0.7.0", "0.7.0.post1", "0.7.1", "0.7.2"),
    *("0.7.2.post1",),
)
"""Every release on the package index from 0.5.0 to 0.7.2.post1."""


@dataclass(frozen=True)
class ArchReading:
    """The targets that a build would be given, or the error that ends it."""

    targets: tuple[str, ...]
    """Such as ``("120f",)``, sorted; empty where there is an error."""
    error: str | None = None


class _RefusedError(Exception):
    """What a release answers with an error; the text says which."""


@dataclass(frozen=True)
class Generation:
    """Releases that choose targets in the same way."""

    first: str
    last: str
    suffixed: Callable[[Capability, CudaVersion], str]
    """The target for a capability, e.g. ``120f``; raises _RefusedError."""
    suffixes_bare_entries: bool
    """Whether an entry such as ``12.0`` of the list gets its suffix; before, it went to nvcc as it was."""

    @property
    def name(self) -> str:
        """``0.5.0 to 0.6.6``."""
        return f"{self.first} to {self.last}"


def _always_a(capability: Capability, cuda: CudaVersion) -> str:
    major, minor = capability
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def _needs(cuda: CudaVersion, least: CudaVersion, what: str) -> None:
    if cuda < least:
        raise _RefusedError(f"RuntimeError: {what} requires CUDA >= {least[0]}.{least[1]}")


def _one_family_target(capability: Capability, cuda: CudaVersion) -> str:
    if capability[0] != 12:
        return _always_a(capability, cuda)
    _needs(cuda, (12, 9), "SM 12.x")
    return "120f"


def _own_target_for_121(capability: Capability, cuda: CudaVersion) -> str:
    if capability[0] != 12:
        return _always_a(capability, cuda)
    _needs(cuda, (12, 9), "SM 12.x")
    return "120f" if capability[1] == 0 else _always_a(capability, cuda)


def _cuda_128_again(capability: Capability, cuda: CudaVersion) -> str:
    if capability[0] != 12:
        return _always_a(capability, cuda)
    if capability[1] == 0:
        _needs(cuda, (12, 8), "SM 120")
        return "120f" if cuda >= (12, 9) else "120a"
    _needs(cuda, (12, 9), "SM 12.1+")
    return _always_a(capability, cuda)


GENERATIONS = (
    Generation("0.5.0", "0.6.6", _always_a, suffixes_bare_entries=False),
    Generation("0.6.7", "0.6.7.post3", _one_family_target, suffixes_bare_entries=True),
    Generation("0.6.8", "0.7.0.post1", _own_target_for_121, suffixes_bare_entries=True),
    Generation("0.7.1", "0.7.2.post1", _cuda_128_again, suffixes_bare_entries=True),
)


_FIXED_MOE_TARGETS: dict[Capability, str] = {(8, 9): "89", (9, 0): "90a"}


def generation(release: str) -> Generation:
    """The generation that `release` belongs to; a later release counts to the last one.

    Raises ValueError (packaging's InvalidVersion) for text that is no version, and for releases before 0.5.0.
    """
    version = Version(release)
    fitting = [one for one in GENERATIONS if Version(one.first) <= version]
    if not fitting:
        known = f"{RELEASES[0]} to {RELEASES[-1]}"
        raise ValueError(f"release: FlashInfer {release} is older than what is known here; expected {known}")
    return fitting[-1]


def flashinfer_targets(
    release: str, *, capability: Capability, cuda: CudaVersion, arch_list: str | None = None
) -> ArchReading:
    """What FlashInfer `release` builds for on a machine with one GPU of `capability` and CUDA release `cuda`.

    `arch_list` is the value of FLASHINFER_CUDA_ARCH_LIST; None where it is not set. Where it is set, the
    GPU plays no part, and what cannot be read ends ``import flashinfer``.
    """
    return _answer(release, capability, cuda, arch_list, None)


def moe_targets(
    release: str, *, capability: Capability, cuda: CudaVersion, arch_list: str | None = None
) -> ArchReading:
    """What FlashInfer `release` builds its CUTLASS MoE module for; arguments as for `flashinfer_targets`.

    The module for a GPU takes only the targets of some major versions. For 9.0 it takes ``90a`` and for
    8.9 ``89``, in every release and whatever the list says.
    """
    if capability in _FIXED_MOE_TARGETS:
        return ArchReading((_FIXED_MOE_TARGETS[capability],))
    return _answer(release, capability, cuda, arch_list, moe_majors(capability))


def moe_majors(capability: Capability) -> tuple[int, ...]:
    """The major versions that the MoE module for this GPU takes (``flashinfer/jit/fused_moe.py``)."""
    return (10, 11) if capability in ((10, 0), (11, 0)) else (capability[0],)


def _answer(
    release: str, gpu: Capability, cuda: CudaVersion, arch_list: str | None, majors: tuple[int, ...] | None
) -> ArchReading:
    rules = generation(release)
    try:
        if arch_list is None:
            found = {(gpu[0], rules.suffixed(gpu, cuda))}
        else:
            found = {_entry(entry, rules, cuda) for entry in arch_list.split(" ")}
        kept = sorted(one for one in found if majors is None or one[0] in majors)
        if not kept:
            raise _RefusedError(f"RuntimeError: no target of the major versions {majors}")
    except _RefusedError as refused:
        return ArchReading((), str(refused))
    return ArchReading(tuple(target for _, target in kept))


def _entry(entry: str, rules: Generation, cuda: CudaVersion) -> tuple[int, str]:
    """(major, target) of one entry of the list, which must be MAJOR.MINOR with anything behind it."""
    parts = entry.split(".")
    if len(parts) != 2:
        raise _RefusedError(
            f"ValueError: {entry!r} is not MAJOR.MINOR (entries are split at single spaces only)"
        )
    try:
        major = int(parts[0])
        if not rules.suffixes_bare_entries or parts[1][-1].isalpha():
            return major, f"{major}{parts[1]}"
        return major, rules.suffixed((major, int(parts[1])), cuda)
    except (ValueError, IndexError) as error:
        raise _RefusedError(f"{type(error).__name__}: {entry!r} is not MAJOR.MINOR") from error
