"""The owner of a kernel, by its name and the file of its source."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from moedoctor.text import load_yaml

_LONGEST = 4096
_PART = re.compile(r"\d{1,4}")
_SHIP_KERNELS = {
    "vllm": "vLLM",
    "torch": "PyTorch",
    "flashinfer-python": "FlashInfer",
    "flashinfer-jit-cache": "FlashInfer",
    "deep-gemm": "DeepGEMM",
}
"""The owner by distribution, of those that ship libraries with kernels."""
_RULES: list[dict[str, Any]] = load_yaml("moedoctor.diagnose.autopsy", "owners.yaml")


@dataclass(frozen=True)
class Owner:
    """The project that wrote a kernel."""

    name: str
    what: str
    installed: str | None
    """The release of its package in this environment, which need not be that of the dump."""
    moe: bool
    """True if the kernel computes a part of a MoE layer."""
    mended: str | None = None
    """The release of its package that mended a fault of such kernels, and the entry about it."""


def find_owner(symbol: str, source: str | None) -> Owner | None:
    """Return whose kernel a symbol is; None if no rule fits and not exactly one installed package has it."""
    texts = {"name": demangle(symbol), "symbol": symbol[:_LONGEST], "source": (source or "")[:_LONGEST]}
    for rule in _RULES:
        if all(re.search(rule[key], text) for key, text in texts.items() if key in rule):
            release = _find_release(rule["package"])
            return Owner(rule["owner"], rule["what"], release, rule.get("moe", False), rule.get("mended"))
    # Several packages compile templates such as cutlass::device_kernel, each with arguments of its own.
    found = _find_libraries(symbol) if symbol.startswith("_Z") and len(symbol) <= _LONGEST else {}
    if len(found) != 1:
        return None
    [(package, library)] = found.items()
    name, of_experts = _SHIP_KERNELS[package], package == "vllm" and "group_gemm" in symbol
    what = f"{name}'s {'product of experts' if of_experts else 'kernel'}, in {library}"
    return Owner(name, what, _find_release(package), of_experts)


def demangle(symbol: str) -> str:
    """Return the qualified name of a C++ function, without its parameters and arguments of templates.

    ``_ZN4vllm3moe10topkGatingILi4E…`` is ``vllm::moe::topkGating``; a name that is not mangled stays.
    """
    inner = symbol.rpartition("$")[2] if symbol.startswith("$") else symbol
    rest = inner[:_LONGEST]
    if not rest.startswith("_Z"):
        return inner
    rest = rest[2:].removeprefix("N").removeprefix("K")
    parts = []
    while match := _PART.match(rest):
        begin, size = match.end(), int(match[0])
        parts.append(rest[begin : begin + size])
        rest = rest[begin + size :]
    names = ["(anonymous)" if part.startswith("_GLOBAL__N_") else part for part in parts]
    return "::".join(names) or inner


@cache
def _find_libraries(symbol: str) -> dict[str, str]:
    """Return the library of each installed package that registers a kernel of this mangled name."""
    name = b"\0" + symbol.encode() + b"\0"
    found = {}
    for package in _SHIP_KERNELS:
        for path in _list_libraries(package):
            try:
                with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    if content.find(name) >= 0:
                        found[package] = path.name
            except (OSError, ValueError):
                continue  # an empty file, or one that may not be read
    return found


def _list_libraries(package: str) -> Iterator[Path]:
    with suppress(metadata.PackageNotFoundError):
        files = metadata.files(package) or []
        yield from (Path(str(file.locate())) for file in files if ".so" in file.suffixes)


@cache
def _find_release(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
