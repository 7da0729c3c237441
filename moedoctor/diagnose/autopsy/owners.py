"""Whose kernel it is, by its name and the file of its source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

_LONGEST = 4096
_PART = re.compile(r"\d{1,4}")
_OWNERS = Path(__file__).with_name("owners.yaml")


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
    """Return whose kernel a symbol is; None if no rule fits."""
    texts = {"name": demangle(symbol), "symbol": symbol[:_LONGEST], "source": (source or "")[:_LONGEST]}
    for rule in _load_rules():
        if all(re.search(rule[key], text) for key, text in texts.items() if key in rule):
            release = _find_release(rule["package"])
            return Owner(rule["owner"], rule["what"], release, rule.get("moe", False), rule.get("mended"))
    return None


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
def _load_rules() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(_OWNERS.read_text(encoding="utf-8"))
    return rules


@cache
def _find_release(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
