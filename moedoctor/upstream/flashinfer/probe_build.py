"""Compiles the FlashInfer probe: one translation unit that includes a release's own headers.

A result is kept under release and architecture and reused while the probe, the release's header, the flags
and the CUDA release are the same. A build takes about a minute on one core and 1.2 GB of memory.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from moedoctor.processes.cuda_tools import Tool, find_tools, run_tool
from moedoctor.upstream.flashinfer.source import FlashInferSource
from moedoctor.upstream.releases.wheel import KernelError, cache_folder, find_package_folders

_SECONDS = 900.0
_OPTIONS = (
    "-std=c++17",
    "-O3",
    "-use_fast_math",
    "--expt-relaxed-constexpr",
    "-static-global-template-stub=false",
    "-Xcompiler=-fPIC",
    "-Xfatbin=-compress-all",
)
"""The options of FlashInfer's own build."""
_CAUSES = ("undefined reference|cannot find -l", r"(?i)\b(error|fatal)( #[\w-]+)?\s*:")
"""Patterns of the line that explains why a build failed, the most specific first.

The word "error" alone can be part of a path."""


@dataclass(frozen=True)
class BuildPlan:
    """Everything that decides the result, and the file that it is kept in."""

    source: FlashInferSource
    arch: str
    """As nvcc names it, ``90a``."""
    nvcc: Tool
    defines: tuple[str, ...]

    @property
    def target(self) -> Path:
        """The file of the shared object, which may not exist yet."""
        parts = [probe_text(), self.arch, *_OPTIONS, *self.defines, str(self.nvcc.cuda)]
        digest = hashlib.sha256("\0".join(parts).encode())
        digest.update(self.source.kernels.read_bytes())
        name = f"{self.source.release}-sm_{self.arch}-{digest.hexdigest()[:16]}"
        return cache_folder("flashinfer_probe") / name / "probe.so"


def probe_text() -> str:
    """Return the source of the probe, which ships with the package."""
    file = resources.files("moedoctor.upstream.flashinfer") / "probe_data" / "probe.cu"
    return file.read_text(encoding="utf-8")


def name_arch(capability: tuple[int, int]) -> str:
    """Return the target for `capability`: with the suffix ``a`` from 9.0 on, as FlashInfer's own build."""
    major, minor = capability
    return f"{major}{minor}a" if major >= 9 else f"{major}{minor}"


def plan_build(source: FlashInferSource, arch: str) -> BuildPlan:
    """Plan the build; raises KernelError without nvcc."""
    tools = [tool for tool in find_tools(["nvcc"]) if tool.cuda >= (12, 8)]
    if not tools:
        raise KernelError("no nvcc of CUDA 12.8 or later: set CUDA_HOME, or install nvidia-cuda-nvcc")
    return BuildPlan(source, arch, tools[-1], tuple(source.list_defines()))


def build(plan: BuildPlan) -> Path:
    """Return the compiled probe; build it if it is not kept. Raises KernelError with nvcc's first error."""
    target = plan.target
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        probe = folder / "probe.cu"
        probe.write_text(probe_text(), encoding="utf-8")
        sources = [probe, *plan.source.sources]
        with ThreadPoolExecutor(len(sources)) as pool:
            objects = list(pool.map(lambda file: _compile(plan, file, folder), sources))
        made = folder / "probe.so"
        # Undefined symbols must show here and not when it is loaded.
        link = ["-shared", *_write_gencode(plan.arch), *map(str, objects), "-Xlinker", "--no-undefined"]
        # As pip's toolkit links: libraries in ``lib``, and no device runtime.
        libraries = ["-cudadevrt", "none", f"-L{Path(plan.nvcc.path).parent.parent / 'lib'}"]
        _run_nvcc(plan, [*link, *libraries, "-o", str(made)])
        os.replace(made, target)
    return target


def _compile(plan: BuildPlan, source: Path, folder: Path) -> Path:
    made = folder / f"{source.stem}.o"
    includes = [f"-I{path}" for path in plan.source.includes]
    # cuBLAS and cuRAND are in pip's packages, for a toolkit that comes without them.
    for library in (
        folder for root in find_package_folders("nvidia") for folder in sorted(root.glob("*/include"))
    ):
        if any((library / name).is_file() for name in ("cublasLt.h", "curand.h")):
            includes += ["-isystem", str(library)]
    arguments = [*_OPTIONS, *_write_gencode(plan.arch), *plan.defines, *includes]
    _run_nvcc(plan, [*arguments, "-c", str(source), "-o", str(made)])
    return made


def _write_gencode(arch: str) -> list[str]:
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}"]


def _run_nvcc(plan: BuildPlan, arguments: Sequence[str]) -> None:
    try:
        done = run_tool(plan.nvcc.path, arguments, seconds=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"{plan.nvcc} does not run: {error}") from error
    if done.code == 0:
        return
    lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]
    # The linker names what is missing in lines without "error"; only the compiler's last line has that word.
    causes = (re.search(pattern, line) and line for pattern in _CAUSES for line in lines)
    cause = next(filter(None, causes), done.first_line)
    raise KernelError(f"{plan.nvcc} does not compile the probe for FlashInfer {plan.source.release}: {cause}")
