"""What is wrong here and no entry of the catalogue: packages that do not go together, tools that fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from moedoctor.diagnose.check.machine import Machine
from moedoctor.diagnose.check.matching import within
from moedoctor.diagnose.check.package_fit import Fit
from moedoctor.diagnose.check.pinning import Pinning
from moedoctor.diagnose.check.records import Problem
from moedoctor.processes.cuda_tools import Tool

SKIP_VERSION_CHECK = "FLASHINFER_DISABLE_VERSION_CHECK"
_KERNELS = ("flashinfer-cubin", "flashinfer-jit-cache")
_REFUSES = "<0.7.0"
"""FlashInfer releases whose import fails with kernels of another release; later ones ignore those."""


def find_problems(
    machine: Machine,
    fitting: Iterable[Fit],
    pinning: Pinning,
    nvcc: Tool | None,
    errors: Mapping[str, str],
) -> Iterator[Problem]:
    """The worst first."""
    found = [*_packages(machine, fitting), *_tools(machine, pinning, nvcc, errors)]
    yield from sorted(found, key=lambda one: one.severity)


def _packages(machine: Machine, fitting: Iterable[Fit]) -> Iterator[Problem]:
    for fit in fitting:
        if fit.ok:
            continue
        severity, why, next_step = _misfit(fit, machine)
        yield Problem(
            what=f"{fit.package} {fit.installed} with {fit.by}",
            severity=severity,
            why=why,
            evidence={
                "package": fit.package,
                "installed": fit.installed,
                "expected": fit.expected,
                "by": fit.by,
            },
            next_step=next_step,
        )


def _misfit(fit: Fit, machine: Machine) -> tuple[str, str, str]:
    """(severity, why, what to do)."""
    install = f"pip install '{fit.package}=={fit.expected}'"
    if fit.package in _KERNELS and fit.by.startswith("flashinfer"):
        refused = within(_REFUSES, machine.version("flashinfer-python"))
        if refused and not machine.variables.get(SKIP_VERSION_CHECK):
            return "error", "`import flashinfer` refuses kernels of another release", install
        return "warning", "kernels of another FlashInfer release are ignored, or used unchecked", install
    if fit.package == "torch's CUDA":
        why = f"vLLM's kernels need CUDA {fit.expected} and do not load beside another major release"
        return "error", why, "install torch and vLLM for the same CUDA release"
    if fit.package == "the driver's CUDA":
        return "error", f"torch needs a driver for CUDA {fit.expected}", "update the NVIDIA driver"
    return "warning", f"{fit.by} requires {fit.expected} and was tested with nothing else", install


def _tools(
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
    flashinfer = machine.version("flashinfer-python")
    ready = any(machine.version(name) for name in _KERNELS)
    if flashinfer and machine.capabilities and nvcc is None and not ready and "nvcc" not in errors:
        yield Problem(
            "FlashInfer cannot compile",
            "warning",
            "no nvcc was found and neither flashinfer-cubin nor flashinfer-jit-cache is installed: kernels "
            "that are not in the cache yet cannot be built at first use",
            {"flashinfer-python": flashinfer},
            "install a CUDA toolkit and set CUDA_HOME, or install the flashinfer-jit-cache of this release",
        )
