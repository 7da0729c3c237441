"""What `moedoctor backends` takes from this machine where the command line does not say: release, GPU,
libraries."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from moedoctor.commands.errors import InputError
from moedoctor.fixes.backends import is_on
from moedoctor.fixes.backends import release_tables as backend_tables

_DIGITS = re.compile(r"(?:sm[_ ]?|compute_)?(\d{2,3})[af]?", re.IGNORECASE)
_SEPARATE = ("flashinfer", "humming", "b12x", "hpc", "quark")
"""Optional libraries that are packages of their own; the others come inside vLLM."""
_NINJA_TOO = Version("0.32.0")
"""From here on, nvcc is looked for in CUDA_HOME too, and ninja must be there."""


def release_of(wanted: str | None, installed: str | None) -> tuple[str, tuple[str, ...]]:
    """(a release of the tables, notes on why it is this one). Raises InputError for one that is not known."""
    known = list(backend_tables.releases())
    if wanted is not None:
        if wanted.removeprefix("v") not in known:
            raise InputError(f"--release {wanted}: the tables know {', '.join(known)}")
        return wanted.removeprefix("v"), ()
    if installed is None:
        return known[-1], (f"vllm is not installed here: answered for {known[-1]}, the newest in the tables",)
    public = public_version(installed)
    if public in known:
        return public, ()
    older = [one for one in known if Version(one) <= _version(installed)]
    nearest = older[-1] if older else known[0]
    return nearest, (f"vllm {installed} is not in the tables: answered for {nearest}",)


def public_version(version: str) -> str:
    """The release without a local part such as ``+cu130``; a development version stays what it is."""
    return version.partition("+")[0]


def capability_of(wanted: str | None, facts: Mapping[str, Any]) -> str:
    """The compute capability, of this machine's first GPU where none is named. Raises InputError."""
    if wanted is None:
        found = facts.get("capability")
        if not found:
            raise InputError("no NVIDIA GPU is visible here; name one: --sm 12.0")
        wanted = str(found)
    digits = _DIGITS.fullmatch(wanted.strip())
    shown = f"{digits[1][:-1]}.{digits[1][-1]}" if digits else wanted.strip()
    if shown not in backend_tables.CAPABILITIES:
        raise InputError(f"--sm {wanted}: expected one of {', '.join(backend_tables.CAPABILITIES)}")
    return shown


def libraries_here(release: str, environ: Mapping[str, str]) -> dict[str, bool]:
    """The optional libraries that vLLM `release` would find in this environment.

    Only asked where vLLM itself cannot say. Nothing is imported, so a library that is there and broken counts
    as there.
    """
    there = {name: is_there(name) for name in _SEPARATE}
    # vllm/utils/flashinfer.py, has_flashinfer: it must also be able to get its kernels from somewhere.
    brought = is_there("flashinfer_cubin") or is_on(environ.get("VLLM_HAS_FLASHINFER_CUBIN", "0"))
    there["flashinfer"] = there["flashinfer"] and (brought or _compiles(release, environ))
    if is_there("deep_gemm"):  # else as the release brings it along
        there["deep_gemm"] = True
    return there


def _compiles(release: str, environ: Mapping[str, str]) -> bool:
    if Version(release) < _NINJA_TOO:
        return shutil.which("nvcc") is not None
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    on_path = None if home else shutil.which("nvcc")
    nvcc = on_path or shutil.which(os.fspath(Path(home or "/usr/local/cuda", "bin", "nvcc")))
    return nvcc is not None and shutil.which("ninja") is not None


def is_there(name: str) -> bool:
    """Whether a module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")
