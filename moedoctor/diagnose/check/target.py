"""The environment that `moedoctor check` is about: this Python, another one, or one that is only described.

Another Python is asked for its metadata in a child of its own: nothing of its packages is imported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from moedoctor.diagnose.check import fix_plugin
from moedoctor.diagnose.check.pinning import Pinning, make_untried, try_pinning
from moedoctor.diagnose.cuda.jit_cache import JitCache, read_jit_cache
from moedoctor.environment import Sources
from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.processes.cuda_tools import Tool, find_tools, run_tool
from moedoctor.text import shorten
from moedoctor.upstream.releases.collectors import Collected, collect_flashinfer, collect_vllm
from moedoctor.upstream.releases.questions import ENVS, Inquiry
from moedoctor.upstream.releases.release_source import ReleaseSource, SourceError

THIS = "this Python"
_PIN = re.compile(r"(?:Requires-Dist: )?(torch|flashinfer-python|flashinfer-cubin) ?== ?([\w.+]+)\s*$")
_VERSION = re.compile(r"(?:Version: |__version__ = version = ')([\w.+]+)'?\s*$")
_CHECKOUT_PINS = "requirements/cuda.txt"
_SECONDS = 30.0
_MAX_PACKAGES = 20_000
_ASK = """
import importlib.machinery, importlib.metadata as metadata, json, os, site, sys
path = list(sys.path)
if sys.prefix == sys.base_prefix and os.path.isdir(site.getusersitepackages()):
    path.append(site.getusersitepackages())
packages, requires, plugins = {}, {}, []
for found in metadata.distributions(path=path):
    name = found.metadata["Name"]
    if name and name not in packages:
        packages[name] = found.version
        if name.lower() == "vllm":
            requires[name] = found.requires or []
        for point in found.entry_points:
            if point.group == "vllm.general_plugins":
                plugins.append([point.name, point.value])
folders = {}
for name in ("torch", "vllm", "flashinfer"):
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    for folder in (spec and spec.submodule_search_locations) or ():
        folders.setdefault(name, folder)
answer = {"python": sys.version.split()[0], "packages": packages, "requires": requires,
          "plugins": plugins, "folders": folders}
print("\\nANSWER " + json.dumps(answer))
"""
"""The program that the other Python runs, 3.8 or newer: it reads metadata alone."""


class TargetError(Exception):
    """An environment that cannot be checked; one line says why."""


def _find_nvcc(environ: Mapping[str, str]) -> Tool | None:
    """Return the nvcc that FlashInfer would call: the newest on this machine."""
    return max(find_tools(("nvcc",), environ), key=lambda tool: tool.cuda, default=None)


@dataclass(frozen=True)
class Probes:
    """The collectors beside `moedoctor.environment`. Tests replace them; each may raise anything."""

    pinning: Callable[[], Pinning] = try_pinning
    vllm: Callable[[], Collected] | None = collect_vllm
    """None: not asked, as the package would be imported."""
    flashinfer: Callable[[], Collected] | None = collect_flashinfer
    nvcc: Callable[[Mapping[str, str]], Tool | None] = _find_nvcc
    jit_cache: Callable[[Mapping[str, str]], JitCache] = read_jit_cache
    fix_plugin: Callable[..., Mapping[str, Any]] = fix_plugin.state
    """Takes variables, the version of vLLM, and `read`."""
    requires: Callable[[str], Iterable[str] | None] = importlib.metadata.requires
    """The requirements of a distribution."""


@dataclass(frozen=True)
class Target:
    """The environment to check, and the means for it."""

    name: str = THIS
    """In words, for messages: ``this Python``, a path, or ``vLLM 0.33.0 as it is released``."""
    sources: Sources = field(default_factory=Sources)
    probes: Probes = field(default_factory=Probes)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts that are given and not collected."""
    described: bool = False
    """True if nothing of it is on this machine."""
    not_looked_at: tuple[str, ...] = ()
    """The parts that cannot be looked at from here, each with the reason."""
    source: ReleaseSource | None = None
    """The source of vLLM, if it is not where its package is."""

    def find_source(self, package: str = "vllm") -> ReleaseSource | None:
        """Return the source of vLLM or FlashInfer in this environment, or None if there is none."""
        folder = self.sources.package_folder(package)
        return self.source or (None if folder is None else ReleaseSource(folder.parent))

    def read_source(self, file: str) -> str:
        """Return the text of a file of vLLM, such as ``vllm/envs.py``. Raises SourceError."""
        source = self.find_source()
        if source is None:
            raise SourceError("vLLM's source is not here")
        return source.read_text(file)


def ask_python(path: Path) -> Target:
    """Return the environment of the interpreter at `path`. Raises TargetError."""
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise TargetError(
            f"--python {path}: is not an executable file; expected a Python such as .venv/bin/python"
        )
    # A relative name without a slash would be searched for on PATH.
    answer = _ask(Path(os.path.abspath(path)))
    packages: dict[str, str] = {
        canonicalize_name(name): str(look_up) for name, look_up in answer["packages"].items()
    }
    requires: dict[str, tuple[str, ...]] = {
        canonicalize_name(name): tuple(map(str, lines)) for name, lines in answer["requires"].items()
    }
    plugins = tuple((str(name), str(value)) for name, value in answer["plugins"])
    folders = {name: Path(str(folder)) for name, folder in answer["folders"].items()}
    asked_for = f"{path} was only asked for its metadata"
    return Target(
        str(path),
        replace(Sources(), package_version=_make_lookup(packages), package_folder=folders.get),
        _limit_probes(f"{asked_for}: torch is not imported there", requires, plugins),
        {"python": str(answer["python"])},
        not_looked_at=(f"vLLM's and FlashInfer's own reports: {asked_for}",),
    )


def _ask(path: Path) -> Mapping[str, Any]:
    """Return what the interpreter at `path` answers, checked for its shape."""
    try:
        outcome = run_tool(str(path), ["-I", "-B", "-c", _ASK], seconds=_SECONDS)
    except OSError as error:
        raise TargetError(f"--python {path}: does not start ({(error.strerror or '?').lower()})") from None
    lines = [line for line in outcome.stdout.splitlines() if line.startswith("ANSWER ")]
    if outcome.code != 0 or not lines:
        words = (outcome.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        why = "" if "importlib" in words else f": {shorten(words, 200)}"  # a shell repeats the program
        raise TargetError(f"--python {path}: did not list its packages, expected Python 3.8 or newer{why}")
    try:
        answer = json.loads(lines[-1].removeprefix("ANSWER "))
        kinds = {"python": str, "packages": dict, "requires": dict, "plugins": list, "folders": dict}
        whole = all(isinstance(answer[name], kind) for name, kind in kinds.items())
        if whole and len(answer["packages"]) <= _MAX_PACKAGES:
            return {**answer, "plugins": [(name, value) for name, value in answer["plugins"]]}
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise TargetError(f"--python {path}: its answer is not a list of packages")


def describe_release(release: str, version: str | None = None) -> Target:
    """Return vLLM `release` with the packages that it requires, on Linux. Raises KeyError if unknown.

    `version` is a newer one that is not known; the packages of `release` are then assumed.
    """
    pins = load_releases()[release]
    packages = {"vllm": version or release, "torch": pins.torch, "flashinfer-python": pins.flashinfer}
    if pins.flashinfer_cubin:
        packages["flashinfer-cubin"] = pins.flashinfer_cubin
    if version is None:
        name = f"vLLM {release} as it is released"
    else:
        name = f"vLLM {version}, which is not known, with the packages of {release}"
    return _describe(name, f"vLLM {version or release} is only described", packages, pins.cuda)


def describe_source(path: Path) -> Target:
    """Return the vLLM in a wheel, or in a folder that holds ``vllm``, on Linux. Raises TargetError."""
    source = ReleaseSource(path)
    try:
        tree = Inquiry(source).parse(ENVS)
    except OSError as error:
        tree = str(error)
    if isinstance(tree, str):
        raise TargetError(f"{tree}; expected a wheel of vLLM, or a folder that holds {ENVS}")
    lines = _read_metadata(source).splitlines()
    packages = {match[1]: match[2] for match in map(_PIN.match, lines) if match}
    version = next((match[1] for match in map(_VERSION.match, lines) if match), "of unknown version")
    name = f"vLLM {version} in {path.name or path}"
    target = _describe(name, f"{name} is only read", {**packages, "vllm": version}, None)
    sources = replace(target.sources, package_folder=lambda package: Path(package), exists=source.has_file)
    unasked = "the MoE backend that it selects: `moedoctor backends` can only ask an installed vLLM"
    left_out = (*target.not_looked_at, unasked)
    return replace(target, sources=sources, source=source, not_looked_at=left_out)


def _read_metadata(source: ReleaseSource) -> str:
    """Return the metadata of a wheel or of an unpacked one, or the files of a checkout that say the same."""
    names = ["-".join(source.path.name.split("-")[:2])]
    if os.path.isdir(source.path):
        names = [folder.name.removesuffix(".dist-info") for folder in source.path.glob("vllm-*.dist-info")]
    texts = []
    for file in (*(f"{name}.dist-info/METADATA" for name in names), "vllm/_version.py", _CHECKOUT_PINS):
        with contextlib.suppress(SourceError):
            texts.append(source.read_text(file))
    return "\n".join(texts)


def _describe(name: str, only: str, packages: Mapping[str, str], cuda: str | None) -> Target:
    """Return an environment with these packages, of which nothing is installed; `only` says so."""
    nothing: dict[str, Any] = dict.fromkeys(("gpu", "capability", "driver", "cuda_driver", "kernel"))
    return Target(
        name,
        replace(Sources(), package_version=_make_lookup(packages), package_folder=lambda package: None),
        replace(
            _limit_probes(only, {}, plugins=None),
            nvcc=lambda environ: None,
            jit_cache=lambda environ: JitCache("", ()),
        ),
        {**nothing, "gpus": [], "torch_cuda": cuda, "wsl": False, "python": None},
        described=True,
        not_looked_at=(f"driver, CUDA toolkit, FlashInfer's JIT cache and installed files: {only}",),
    )


def add_gpu(target: Target, capability: str) -> Target:
    """Return the environment with one GPU of this compute capability in place of this machine's GPUs."""
    name = f"a GPU of {capability}"
    gpu = {"name": name, "capability": capability, "memory_bytes": None, "visible": True}
    facts = {**target.facts, "gpu": name, "capability": capability, "gpus": [gpu]}
    probes = replace(target.probes, pinning=lambda: make_untried(f"{name} is only described"))
    return replace(target, facts=facts, probes=probes, name=f"{target.name}, on {name}")


def put_on_wsl(target: Target) -> Target:
    facts = {**target.facts, "wsl": True, "kernel": "6.6 (assumed)"}
    note = "the WSL kernel: 4.19.121 or newer is assumed"
    return replace(
        target, facts=facts, name=f"{target.name}, on WSL", not_looked_at=(*target.not_looked_at, note)
    )


def _limit_probes(
    why: str, requires: Mapping[str, Iterable[str]], plugins: Sequence[tuple[str, str]] | None
) -> Probes:
    """Return the probes without those that import packages; `why` says so.

    `plugins`: those of the environment; None for those of this Python.
    """
    return Probes(
        pinning=lambda: make_untried(why),
        vllm=None,
        flashinfer=None,
        requires=lambda name: requires.get(canonicalize_name(name)),
        fix_plugin=lambda environ, vllm, read: fix_plugin.state(environ, vllm, read, plugins),
    )


def _make_lookup(packages: Mapping[str, str]) -> Any:
    def look_up(name: str) -> str:
        if canonicalize_name(name) not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[canonicalize_name(name)]

    return look_up
