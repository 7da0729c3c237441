"""Problems that are not in the catalogue: packages that do not go together, tools that fail.

The pins of vLLM 0.17.1 to 0.33.0 are known. For other releases the metadata of the installed vLLM is read.
pip installs what is pinned, so a difference is a choice or an accident: it is reported, not forbidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from moedoctor.diagnose.check.machine import Machine, is_within
from moedoctor.diagnose.check.pinning import Pinning
from moedoctor.diagnose.check.records import Problem
from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.processes.cuda_tools import Tool

SKIP_VERSION_CHECK = "FLASHINFER_DISABLE_VERSION_CHECK"
_KERNELS = ("flashinfer-cubin", "flashinfer-jit-cache")
_REFUSES = "<0.7.0"
"""FlashInfer releases whose import fails with kernels of another release; later ones ignore those."""


@dataclass(frozen=True)
class Fit:
    """One package, against what another expects of it."""

    package: str
    installed: str
    expected: str
    by: str
    """The package that expects it: ``vllm 0.33.0``."""
    ok: bool


_NAMES = ("torch", "flashinfer-python", "flashinfer-cubin")
_LOCAL_CUDA = re.compile(r"cu(\d+)(\d)")


def compare_packages(machine: Machine) -> tuple[Fit, ...]:
    """Return every pair of packages that can be compared, fitting or not."""
    return (*_compare_with_vllm(machine), *_compare_kernel_packages(machine), *_compare_cuda(machine))


def _compare_with_vllm(machine: Machine) -> Iterator[Fit]:
    vllm = machine.find_version("vllm")
    if vllm is None:
        return
    for name, expected in _list_required(vllm, machine).items():
        installed = machine.find_version(name)
        if installed is not None or name != "flashinfer-cubin":
            ok = installed is not None and _strip_local(installed) == _strip_local(expected)
            yield Fit(name, installed or "not installed", expected, f"vllm {vllm}", ok)


def _list_required(vllm: str, machine: Machine) -> dict[str, str]:
    """Return distribution -> the release that this vLLM requires."""
    pins = load_releases().get(_strip_local(vllm))
    if pins is not None:
        cubin = {"flashinfer-cubin": pins.flashinfer_cubin} if pins.flashinfer_cubin else {}
        return {"torch": pins.torch, "flashinfer-python": pins.flashinfer, **cubin}
    required = {}
    for line in machine.list_requirements("vllm"):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        exact = [clause.version for clause in requirement.specifier if clause.operator == "=="]
        if requirement.name.lower() in _NAMES and exact and requirement.marker is None:
            required[requirement.name.lower()] = exact[0]
    return required


def _compare_kernel_packages(machine: Machine) -> Iterator[Fit]:
    flashinfer = machine.find_version("flashinfer-python")
    if flashinfer is None:
        return
    for name in _KERNELS:
        installed = machine.find_version(name)
        if installed is not None:
            # FlashInfer's own rule: kernels of its release, at most with a suffix for CUDA.
            ok = _strip_local(installed) == _strip_local(flashinfer)
            yield Fit(name, installed, flashinfer, f"flashinfer-python {flashinfer}", ok)


def _compare_cuda(machine: Machine) -> Iterator[Fit]:
    vllm, torch = machine.find_version("vllm"), machine.find_version("torch")
    torch_cuda, driver_cuda = machine.facts.get("torch_cuda"), machine.facts.get("cuda_driver")
    built = _find_built_cuda(vllm) if vllm else None
    if built and torch_cuda:
        # A library of another major release has another file name; within one, the newer runtime serves both.
        ok = _cut_to_major(built) == _cut_to_major(torch_cuda)
        yield Fit("torch's CUDA", torch_cuda, f"{_cut_to_major(built)}.x", f"vllm {vllm}", ok)
    if torch_cuda and driver_cuda:
        ok = int(_cut_to_major(driver_cuda)) >= int(_cut_to_major(torch_cuda))
        yield Fit(
            "the driver's CUDA", driver_cuda, f"{_cut_to_major(torch_cuda)}.0 or later", f"torch {torch}", ok
        )


def _find_built_cuda(vllm: str) -> str | None:
    """Return the CUDA release of a vLLM build: its local version, ``0.18.0+cu130``, else the index's."""
    try:
        local = _LOCAL_CUDA.fullmatch(Version(vllm).local or "")
    except InvalidVersion:
        return None
    if local is not None:
        return f"{local[1]}.{local[2]}"
    pins = load_releases().get(_strip_local(vllm))
    return pins.cuda if pins else None


def _cut_to_major(release: str) -> str:
    return release.partition(".")[0]


def _strip_local(version: str) -> str:
    """Return a version without its local part: ``2.13.0`` for ``2.13.0+cpu``."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def find_problems(
    machine: Machine,
    package_pairs: Iterable[Fit],
    pinning: Pinning,
    nvcc: Tool | None,
    errors: Mapping[str, str],
    *,
    tools: bool = True,
) -> list[Problem]:
    """Return the problems, worst first; `tools`: also those with the driver, pinned memory and compilers."""
    problems = [_explain_misfit(fit, machine) for fit in package_pairs if not fit.ok]
    if tools:
        problems += _check_tools(machine, pinning, nvcc, errors)
    return sorted(problems, key=lambda problem: problem.severity)


def _explain_misfit(fit: Fit, machine: Machine) -> Problem:
    severity, why = "warning", f"{fit.by} requires {fit.expected} and was tested with nothing else"
    next_step = f"pip install '{fit.package}=={fit.expected}'"
    if fit.package in _KERNELS and fit.by.startswith("flashinfer"):
        why = "kernels of another FlashInfer release are ignored, or used unchecked"
        refuses = is_within(_REFUSES, machine.find_version("flashinfer-python"))
        if refuses and not machine.variables.get(SKIP_VERSION_CHECK):
            severity, why = "error", "`import flashinfer` refuses kernels of another release"
    elif fit.package == "torch's CUDA":
        severity = "error"
        why = f"vLLM's kernels need CUDA {fit.expected} and do not load beside another major release"
        next_step = "install torch and vLLM for the same CUDA release"
    elif fit.package == "the driver's CUDA":
        severity, why = "error", f"torch needs a driver for CUDA {fit.expected}"
        next_step = "update the NVIDIA driver"
    evidence = {"package": fit.package, "installed": fit.installed, "expected": fit.expected, "by": fit.by}
    return Problem(f"{fit.package} {fit.installed} with {fit.by}", severity, why, evidence, next_step)


def _check_tools(
    machine: Machine, pinning: Pinning, nvcc: Tool | None, errors: Mapping[str, str]
) -> Iterator[Problem]:
    if "gpus" in errors:
        yield Problem(
            "the NVIDIA driver does not answer",
            "error",
            "NVML fails, as after an update of the driver without a reboot",
            {"error": errors["gpus"]},
            "run nvidia-smi, and reboot where it reports a version mismatch",
        )
    if pinning.tried and not pinning.works:
        yield Problem(
            "pinned memory cannot be had",
            "error",
            "vLLM pins host memory for its batches and for CPU offload without trying first",
            {"error": pinning.reason},
            "look at the limits of this container and at the driver; on WSL update the kernel (wsl --update)",
        )
    flashinfer = machine.find_version("flashinfer-python")
    ready = any(machine.find_version(name) for name in _KERNELS)
    if flashinfer and machine.capabilities and nvcc is None and not ready and "nvcc" not in errors:
        yield Problem(
            "FlashInfer cannot compile",
            "warning",
            "no nvcc was found and neither flashinfer-cubin nor flashinfer-jit-cache is installed: kernels "
            "that are not in the cache yet cannot be built at first use",
            {"flashinfer-python": flashinfer},
            "install a CUDA toolkit and set CUDA_HOME, or install the flashinfer-jit-cache of this release",
        )
