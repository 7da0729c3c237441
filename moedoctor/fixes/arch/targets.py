"""CUDA compile targets such as ``120f``: their names, which toolkit knows them, where their code runs.

`data.yaml` has the toolkits and families with their source. Where machine code runs: CUDA C++ Programming
Guide, "Binary Compatibility" and "Family-specific Features".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Capability = tuple[int, int]
"""Compute capability, (12, 0) for 12.0."""
CudaVersion = tuple[int, int]
"""CUDA release, (13, 0) for 13.0."""

OLDEST_CUDA: CudaVersion = (12, 0)
NEWEST_CUDA_MAJOR = 13
FAMILY_TARGETS_SINCE: CudaVersion = (12, 9)

_NAME = re.compile(r"(?:sm_?|compute_?)?(\d{1,2})\.?(\d)([af]?)")
_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)")
_CUDA = re.compile(r"(\d{1,2})\.(\d{1,2})(?:\.\d+)*")


@dataclass(frozen=True, order=True)
class Target:
    """One compile target: ``120`` for every GPU, ``120a`` for 12.0 alone, ``120f`` for its family."""

    major: int
    minor: int
    suffix: str = ""
    """Empty, ``a`` (architecture-specific) or ``f`` (family-specific)."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target in ``120f``, ``12.0f``, ``sm_120f``, ``compute_120f``; raises ValueError for others."""
        match = _NAME.fullmatch(text)
        if match is None or int(match[1]) == 0:
            raise ValueError(f"{text!r} is not a CUDA target; expected one such as 120f, 12.0f or sm_120f")
        return cls(int(match[1]), int(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.major}{self.minor}{self.suffix}"

    @property
    def dotted(self) -> str:
        """``12.0f``, as list variables spell it."""
        return f"{self.major}.{self.minor}{self.suffix}"

    @property
    def capability(self) -> Capability:
        """The capability that it is named after."""
        return self.major, self.minor


def parse_capability(value: Capability | str) -> Capability:
    """(12, 0) from itself or from ``"12.0"``; raises ValueError for anything of another form."""
    pair = _parse_pair(value, _CAPABILITY)
    if pair is None or (not isinstance(value, str) and len(value) != 2):
        expected = "expected a pair such as (12, 0) or text such as '12.0'"
        raise ValueError(f"capability: {value!r} is not a compute capability; {expected}")
    return pair


def parse_cuda(value: tuple[int, ...] | str) -> CudaVersion:
    """(13, 0) from ``(13, 0)``, ``(13, 0, 88)``, ``"13.0"``, ``"13.0.88"``; raises ValueError for others."""
    pair = _parse_pair(value, _CUDA)
    if pair is None:
        expected = "expected a pair such as (13, 0) or text such as '13.0'"
        raise ValueError(f"cuda: {value!r} is not a release; {expected}")
    return pair


def _parse_pair(value: object, pattern: re.Pattern[str]) -> tuple[int, int] | None:
    """The first two numbers of a text of this form, or of a tuple of whole numbers."""
    if isinstance(value, str):
        match = pattern.fullmatch(value.strip())
        return (int(match[1]), int(match[2])) if match else None
    numbers = value if isinstance(value, (tuple, list)) else ()
    if len(numbers) < 2 or not all(type(number) is int and number >= 0 for number in numbers):
        return None
    return numbers[0], numbers[1]


def show(version: tuple[int, int]) -> str:
    """``12.0`` for (12, 0)."""
    return f"{version[0]}.{version[1]}"


@functools.cache
def load_arch_data() -> Mapping[str, Any]:
    """The contents of ``data.yaml``."""
    from moedoctor.text import load_yaml

    data: Mapping[str, Any] = load_yaml("moedoctor.fixes.arch", "data.yaml")
    return data


@functools.cache
def _load_toolkits() -> Mapping[Capability, tuple[CudaVersion, CudaVersion | None]]:
    """Capability -> first and last CUDA release that compiles for it."""
    return {
        parse_capability(capability): (parse_cuda(span[0]), parse_cuda(span[1]) if len(span) > 1 else None)
        for capability, span in load_arch_data()["toolkits"].items()
    }


def list_capabilities() -> tuple[Capability, ...]:
    """Every capability from 7.5 on that a known toolkit compiles for."""
    return tuple(sorted(capability for capability in _load_toolkits() if capability >= (7, 5)))


def find_first_cuda(target: Target) -> CudaVersion | None:
    """The first CUDA release, from 12.0 on, that compiles for `target`; None if there is none."""
    if target.capability not in _load_toolkits() or (target.suffix and target.major < 9):
        return None
    first = _load_toolkits()[target.capability][0]
    if target.suffix != "f":
        return first
    return max(first, FAMILY_TARGETS_SINCE) if find_family(target.capability) else None


def find_last_cuda(target: Target) -> CudaVersion | None:
    """The last CUDA release that compiles for `target`; None if the newest still does."""
    return _load_toolkits()[target.capability][1] if target.capability in _load_toolkits() else None


def is_known_target(target: Target, cuda: CudaVersion) -> bool:
    """Return True if the compiler of this CUDA release takes `target` at all."""
    first, last = find_first_cuda(target), find_last_cuda(target)
    return first is not None and first <= cuda and (last is None or cuda <= last)


def list_targets(cuda: CudaVersion) -> tuple[Target, ...]:
    """Every target that this CUDA release compiles for."""
    targets = (Target(*capability, suffix) for capability in _load_toolkits() for suffix in ("", "a", "f"))
    return tuple(sorted(target for target in targets if is_known_target(target, cuda)))


@functools.cache
def find_family(capability: Capability) -> frozenset[Capability]:
    """The capabilities that share family-specific (``f``) code with this one; empty before 10.0."""
    families = (frozenset(map(parse_capability, names)) for names in load_arch_data()["families"])
    return next((members for members in families if capability in members), frozenset())


def loads_sass(target: Target, capability: Capability) -> bool:
    """Return True if a GPU of this capability runs machine code compiled for `target`.

    Plain code runs on the same major version from its own minor version on (NVIDIA promises it for
    desktop and server GPUs, not between them and Jetson), ``a`` code on its own capability alone, and
    ``f`` code within its family from its own minor version on.
    """
    if target.suffix == "a":
        return target.capability == capability
    if target.suffix == "f":
        return capability in find_family(target.capability) and capability >= target.capability
    return target.major == capability[0] and target.minor <= capability[1]


def compiles_ptx(target: Target, capability: Capability) -> bool:
    """Return True if the driver can compile PTX for `target` on a GPU of this capability.

    Plain PTX goes forward to every later GPU; ``a`` and ``f`` PTX reach no further than their machine code.
    """
    return capability >= target.capability if not target.suffix else loads_sass(target, capability)
