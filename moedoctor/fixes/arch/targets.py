"""CUDA compile targets such as ``120f``: their names, which toolkit knows them, where their code runs.

Sources. Toolkits: the targets that ptxas 12.0.76, 12.4.131, 12.6.85, 12.8.93, 12.9.86, 13.0.88, 13.1.115,
13.2.86, 13.3.73, 13.4.92 and 13.5.37 list. Families and the reach of PTX: which target's PTX ptxas 13.5.37
compiles for which GPU. The reach of SASS: CUDA C++ Programming Guide, "Binary Compatibility" and
"Family-specific Features".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Capability = tuple[int, int]
"""Compute capability, (12, 0) for 12.0."""
CudaVersion = tuple[int, int]
"""CUDA release, (13, 0) for 13.0."""

OLDEST_CUDA: CudaVersion = (12, 0)
NEWEST_CUDA_MAJOR = 13
FAMILY_TARGETS_SINCE: CudaVersion = (12, 9)

_KNOWN: dict[Capability, tuple[CudaVersion, CudaVersion | None]] = {
    **dict.fromkeys(((5, 0), (5, 2), (5, 3), (6, 0), (6, 1), (6, 2), (7, 0), (7, 2)), ((12, 0), (12, 9))),
    **dict.fromkeys(((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0)), ((12, 0), None)),
    (8, 8): ((13, 0), None),
    (10, 0): ((12, 8), None),
    (10, 1): ((12, 8), (12, 9)),  # Thor, which is 11.0 since CUDA 13.0
    (10, 3): ((12, 9), None),
    (10, 7): ((13, 5), None),  # ptxas 13.4.92 knows it, 13.4.59 does not
    (11, 0): ((13, 0), None),
    (12, 0): ((12, 8), None),
    (12, 1): ((12, 9), None),
}
"""Capability -> first and last CUDA release whose ptxas compiles for it."""

_FAMILIES: tuple[frozenset[Capability], ...] = (
    frozenset({(10, 0), (10, 3), (10, 7)}),
    frozenset({(10, 1)}),
    frozenset({(11, 0)}),
    frozenset({(12, 0), (12, 1)}),
)

_NAME = re.compile(r"(?:sm_?|compute_?)?(\d{1,2})\.?(\d)([af]?)")
_VERSION = re.compile(r"(\d{1,2})\.(\d{1,2})(?:\.\d+)*")


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
            raise ValueError(f"{text!r} is no CUDA target; expected one such as 120f, 12.0f or sm_120f")
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
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,2})\.(\d)", value.strip())
        if match:
            return int(match[1]), int(match[2])
    elif (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(type(one) is int and one >= 0 for one in value)
    ):
        return value[0], value[1]
    raise ValueError(f"capability: {value!r} is none; expected a pair such as (12, 0) or text such as '12.0'")


def parse_cuda(value: tuple[int, ...] | str) -> CudaVersion:
    """(13, 0) from ``(13, 0)``, ``(13, 0, 88)``, ``"13.0"``, ``"13.0.88"``; raises ValueError for others."""
    if isinstance(value, str):
        match = _VERSION.fullmatch(value.strip())
        if match:
            return int(match[1]), int(match[2])
    elif (
        isinstance(value, (tuple, list))
        and len(value) >= 2
        and all(type(one) is int and one >= 0 for one in value)
    ):
        return value[0], value[1]
    raise ValueError(f"cuda: {value!r} is no release; expected a pair such as (13, 0) or text such as '13.0'")


def show(version: tuple[int, int]) -> str:
    """``12.0`` for (12, 0)."""
    return f"{version[0]}.{version[1]}"


def capabilities() -> tuple[Capability, ...]:
    """Every capability from 7.5 on that a toolkit of this table compiles for."""
    return tuple(sorted(one for one in _KNOWN if one >= (7, 5)))


def first_cuda(target: Target) -> CudaVersion | None:
    """The first CUDA release, from 12.0 on, that compiles for `target`; None where none does."""
    if target.capability not in _KNOWN or (target.suffix and target.major < 9):
        return None
    first = _KNOWN[target.capability][0]
    if target.suffix != "f":
        return first
    return max(first, FAMILY_TARGETS_SINCE) if family(target.capability) else None


def last_cuda(target: Target) -> CudaVersion | None:
    """The last CUDA release that compiles for `target`; None where it still does."""
    return _KNOWN[target.capability][1] if target.capability in _KNOWN else None


def toolkit_knows(target: Target, cuda: CudaVersion) -> bool:
    """Whether the compiler of this CUDA release takes `target` at all."""
    first, last = first_cuda(target), last_cuda(target)
    return first is not None and first <= cuda and (last is None or cuda <= last)


def toolkit_targets(cuda: CudaVersion) -> tuple[Target, ...]:
    """Every target that this CUDA release compiles for."""
    every = (Target(*capability, suffix) for capability in _KNOWN for suffix in ("", "a", "f"))
    return tuple(sorted(one for one in every if toolkit_knows(one, cuda)))


def family(capability: Capability) -> frozenset[Capability]:
    """The capabilities that share family-specific (``f``) code with this one; empty before 10.0."""
    return next((one for one in _FAMILIES if capability in one), frozenset())


def sass_loads(target: Target, capability: Capability) -> bool:
    """Whether a GPU of this capability runs machine code compiled for `target`.

    Plain code runs on the same major version from its own minor version on (NVIDIA promises it for
    desktop and server GPUs, not between them and Jetson), ``a`` code on its own capability alone, and
    ``f`` code within its family from its own minor version on.
    """
    if target.suffix == "a":
        return target.capability == capability
    if target.suffix == "f":
        return capability in family(target.capability) and capability >= target.capability
    return target.major == capability[0] and target.minor <= capability[1]


def ptx_compiles(target: Target, capability: Capability) -> bool:
    """Whether the driver can compile PTX for `target` on a GPU of this capability.

    Plain PTX goes forward to every later GPU; ``a`` and ``f`` PTX reach no further than their machine code.
    """
    return capability >= target.capability if not target.suffix else sass_loads(target, capability)
