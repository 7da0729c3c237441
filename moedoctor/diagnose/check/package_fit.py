"""Whether the installed packages go together: vLLM's pins, FlashInfer's kernel packages, CUDA releases.

The table is read from the metadata of vLLM's wheels 0.17.1 to 0.33.0; for other releases vLLM's own metadata
on this machine says it. pip installs what is pinned, so a difference is somebody's choice or accident: that
is reported and not more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Pins:
    """What one vLLM release requires."""

    torch: str
    flashinfer: str
    cubin: bool
    """Whether it also requires flashinfer-cubin, of FlashInfer's release."""
    cuda: str
    """The CUDA release that its wheel on the package index is built with."""


@dataclass(frozen=True)
class Fit:
    """One package, against what another expects of it."""

    package: str
    installed: str
    expected: str
    by: str
    """Who expects it: ``vllm 0.33.0``."""
    ok: bool


def _pins(releases: str, torch: str, flashinfer: str, cubin: bool, cuda: str) -> dict[str, Pins]:
    return dict.fromkeys(releases.split(), Pins(torch, flashinfer, cubin, cuda))


PINS: Mapping[str, Pins] = {
    **_pins("0.17.1", "2.10.0", "0.6.4", False, "12.9"),
    **_pins("0.18.0 0.18.1", "2.10.0", "0.6.6", False, "12.9"),
    **_pins("0.19.0 0.19.1", "2.10.0", "0.6.6", True, "12.9"),
    **_pins("0.20.0 0.20.1 0.20.2 0.21.0", "2.11.0", "0.6.8.post1", True, "13.0"),
    **_pins("0.22.0 0.22.1", "2.11.0", "0.6.11.post2", True, "13.0"),
    **_pins("0.23.0 0.24.0", "2.11.0", "0.6.12", True, "13.0"),
    **_pins("0.25.0 0.25.1", "2.11.0", "0.6.13", True, "13.0"),
    **_pins("0.26.0", "2.11.0", "0.6.14", False, "13.0"),
    **_pins("0.27.0 0.27.1 0.28.0", "2.13.0", "0.6.16.post3", False, "13.0"),
    **_pins("0.29.0", "2.13.0", "0.6.18", False, "13.0"),
    **_pins("0.30.0", "2.13.0", "0.6.18.post1", False, "13.0"),
    **_pins("0.31.0 0.32.0", "2.13.0", "0.7.0.post1", False, "13.0"),
    **_pins("0.33.0", "2.14.0", "0.7.2.post1", False, "13.0"),
}
"""vLLM release -> what it requires."""

_NAMES = ("torch", "flashinfer-python", "flashinfer-cubin")
_LOCAL_CUDA = re.compile(r"cu(\d+)(\d)")


def package_fits(
    version: Callable[[str], str | None],
    requires: Callable[[str], Iterable[str]],
    *,
    torch_cuda: str | None,
    driver_cuda: str | None,
) -> tuple[Fit, ...]:
    """Every pair that can be compared, fitting or not.

    `version` gives an installed distribution's version or None, `requires` its requirements. `torch_cuda` is
    the CUDA release that torch was built for and `driver_cuda` the newest that the driver supports.
    """
    return (
        *_vllm_fits(version, requires),
        *_kernel_package_fits(version),
        *_cuda_fits(version("vllm"), version("torch"), torch_cuda, driver_cuda),
    )


def _vllm_fits(
    version: Callable[[str], str | None], requires: Callable[[str], Iterable[str]]
) -> Iterator[Fit]:
    vllm = version("vllm")
    if vllm is None:
        return
    for name, wanted in _wanted(vllm, requires).items():
        installed = version(name)
        if installed is not None or name != "flashinfer-cubin":
            ok = installed is not None and _public(installed) == _public(wanted)
            yield Fit(name, installed or "not installed", wanted, f"vllm {vllm}", ok)


def _wanted(vllm: str, requires: Callable[[str], Iterable[str]]) -> dict[str, str]:
    """Distribution -> the release that this vLLM requires."""
    pins = PINS.get(_public(vllm))
    if pins is not None:
        cubin = {"flashinfer-cubin": pins.flashinfer} if pins.cubin else {}
        return {"torch": pins.torch, "flashinfer-python": pins.flashinfer, **cubin}
    found = {}
    for line in requires("vllm"):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        exact = [one.version for one in requirement.specifier if one.operator == "=="]
        if requirement.name.lower() in _NAMES and exact and requirement.marker is None:
            found[requirement.name.lower()] = exact[0]
    return found


def _kernel_package_fits(version: Callable[[str], str | None]) -> Iterator[Fit]:
    flashinfer = version("flashinfer-python")
    if flashinfer is None:
        return
    for name in ("flashinfer-cubin", "flashinfer-jit-cache"):
        installed = version(name)
        if installed is not None:
            # Its own rule: kernels of a release, with nothing but a CUDA suffix behind it.
            ok = _public(installed) == _public(flashinfer)
            yield Fit(name, installed, flashinfer, f"flashinfer-python {flashinfer}", ok)


def _cuda_fits(
    vllm: str | None, torch: str | None, torch_cuda: str | None, driver_cuda: str | None
) -> Iterator[Fit]:
    built = _built_with(vllm) if vllm else None
    if built and torch_cuda:
        # A library of another major release has another file name; within one, the newer runtime serves both.
        ok = built.partition(".")[0] == torch_cuda.partition(".")[0]
        yield Fit("torch's CUDA", torch_cuda, f"{built.partition('.')[0]}.x", f"vllm {vllm}", ok)
    if torch_cuda and driver_cuda:
        ok = int(driver_cuda.partition(".")[0]) >= int(torch_cuda.partition(".")[0])
        least = f"{torch_cuda.partition('.')[0]}.0 or later"
        yield Fit("the driver's CUDA", driver_cuda, least, f"torch {torch}", ok)


def _built_with(vllm: str) -> str | None:
    """The CUDA release of this vLLM build: its local version, ``0.18.0+cu130``, else what the index has."""
    try:
        local = _LOCAL_CUDA.fullmatch(Version(vllm).local or "")
    except InvalidVersion:
        return None
    if local is not None:
        return f"{local[1]}.{local[2]}"
    pins = PINS.get(_public(vllm))
    return pins.cuda if pins else None


def _public(version: str) -> str:
    """Without the local part: ``2.13.0`` for ``2.13.0+cpu``."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version
