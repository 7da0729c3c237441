"""The targets that each FlashInfer release builds for, from the GPU or from FLASHINFER_CUDA_ARCH_LIST.

Restated from the releases' own code; `data.yaml` has the rules and names the wheels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from moedoctor.fixes.arch.targets import Capability, CudaVersion, load_arch_data, parse_cuda, show

_FIXED_MOE_TARGETS: dict[Capability, str] = {(8, 9): "89", (9, 0): "90a"}


@dataclass(frozen=True)
class ArchReading:
    """The targets that a build would be given, or the error that ends it."""

    targets: tuple[str, ...]
    """Such as ``("120f",)``, sorted; empty if there is an error."""
    error: str | None = None


class _RefusedError(Exception):
    """A release answers with an error; the text is the answer."""


@dataclass(frozen=True)
class Generation:
    """Releases that choose targets in the same way. The fields are those of ``data.yaml``."""

    first: str
    last: str
    suffixes_bare_entries: bool
    sm12: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``0.5.0 to 0.6.6``."""
        return f"{self.first} to {self.last}"

    def add_suffix(self, capability: Capability, cuda: CudaVersion) -> str:
        """Return the target for a capability, such as ``120f``; raises _RefusedError."""
        major, minor = capability
        own = f"{major}{minor}{'a' if major >= 9 else ''}"
        if major != 12 or not self.sm12:
            return own
        rule = self.sm12.get(str(minor), self.sm12["other"])
        targets = {parse_cuda(least): target for least, target in rule["targets"].items()}
        fitting = [least for least in targets if least <= cuda]
        if not fitting:
            raise _RefusedError(f"RuntimeError: {rule['called']} requires CUDA >= {show(min(targets))}")
        target = str(targets[max(fitting)])
        return own if target == "own" else target


@functools.cache
def list_generations() -> tuple[Generation, ...]:
    """Every generation, oldest first."""
    return tuple(Generation(**row) for row in load_arch_data()["flashinfer"])


@functools.cache
def list_releases() -> tuple[str, ...]:
    """Every release on the package index that the rules cover, oldest first."""
    return tuple(load_arch_data()["flashinfer_releases"].split())


def find_generation(release: str) -> Generation:
    """The rules of `release`; for a newer one those of the newest. Raises ValueError for an older one."""
    fitting = [rules for rules in list_generations() if Version(release) >= Version(rules.first)]
    if not fitting:
        known = f"{list_generations()[0].first} to {list_generations()[-1].last}"
        raise ValueError(f"release: FlashInfer {release} is older than what is known here; expected {known}")
    return fitting[-1]


def predict_targets(
    release: str, *, capability: Capability, cuda: CudaVersion, arch_list: str | None = None
) -> ArchReading:
    """Return what FlashInfer `release` builds for on a machine with one GPU of `capability` and CUDA `cuda`.

    `arch_list` is the value of FLASHINFER_CUDA_ARCH_LIST, None if it is not set. If it is set, the GPU plays
    no part, and a value that cannot be read ends ``import flashinfer``.
    """
    return _answer(release, capability, cuda, arch_list, None)


def predict_moe_targets(
    release: str, *, capability: Capability, cuda: CudaVersion, arch_list: str | None = None
) -> ArchReading:
    """Return what FlashInfer `release` builds its CUTLASS MoE module for; see `predict_targets`.

    The module for a GPU takes only the targets of some major versions. For 9.0 it takes ``90a`` and for
    8.9 ``89``, in every release and whatever the list says.
    """
    if capability in _FIXED_MOE_TARGETS:
        return ArchReading((_FIXED_MOE_TARGETS[capability],))
    return _answer(release, capability, cuda, arch_list, list_moe_majors(capability))


def list_moe_majors(capability: Capability) -> tuple[int, ...]:
    """The major versions that the MoE module for this GPU takes (``flashinfer/jit/fused_moe.py``)."""
    return (10, 11) if capability in ((10, 0), (11, 0)) else (capability[0],)


def _answer(
    release: str, gpu: Capability, cuda: CudaVersion, arch_list: str | None, majors: tuple[int, ...] | None
) -> ArchReading:
    rules = find_generation(release)
    try:
        if arch_list is None:
            targets = {(gpu[0], rules.add_suffix(gpu, cuda))}
        else:
            targets = {_read_entry(entry, rules, cuda) for entry in arch_list.split(" ")}
        taken = sorted(target for target in targets if majors is None or target[0] in majors)
        if not taken:
            raise _RefusedError(f"RuntimeError: no target of the major versions {majors}")
    except _RefusedError as refused:
        return ArchReading((), str(refused))
    return ArchReading(tuple(name for _, name in taken))


def _read_entry(entry: str, rules: Generation, cuda: CudaVersion) -> tuple[int, str]:
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
        return major, rules.add_suffix((major, int(parts[1])), cuda)
    except (ValueError, IndexError) as error:
        raise _RefusedError(f"{type(error).__name__}: {entry!r} is not MAJOR.MINOR") from error
