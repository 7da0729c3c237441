"""The state of FlashInfer's JIT cache on this machine, read off names alone: nothing in it is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from moedoctor.diagnose.cuda.jit_cache import CachedModule, cached_module

BASE = "FLASHINFER_WORKSPACE_BASE"
MAX_MODULES = 2_000


@dataclass(frozen=True)
class JitFolder:
    """What was compiled by one release for one set of targets."""

    release: str
    targets: tuple[str, ...]
    """``("120f",)``; empty where FlashInfer found none."""
    modules: int
    """Modules with a compiled library."""
    lacking: tuple[str, ...]
    """Those with tensor-core kernels that were compiled for a target of 9.0 or later without its suffix."""


@dataclass(frozen=True)
class JitCache:
    """The cache of this user."""

    path: str
    """Where FlashInfer looks; not redacted."""
    folders: tuple[JitFolder, ...]


def read_jit_cache(environ: Mapping[str, str]) -> JitCache:
    """The cache that FlashInfer uses under `environ`; an absent one is empty. Raises OSError."""
    base = environ.get(BASE) or environ.get("HOME") or os.path.expanduser("~")
    root = Path(base) / ".cache" / "flashinfer"
    libraries = islice(root.glob("*/*/cached_ops/*/*.so"), MAX_MODULES) if root.is_dir() else ()
    groups: dict[tuple[str, tuple[str, ...]], list[CachedModule]] = {}
    for module in filter(None, map(cached_module, libraries)):
        groups.setdefault((module.release, tuple(map(str, module.targets))), []).append(module)
    folders = (
        JitFolder(
            release, targets, len(modules), tuple(sorted({one.module for one in modules if _lacks(one)}))
        )
        for (release, targets), modules in sorted(groups.items())
    )
    return JitCache(str(root), tuple(folders))


def _lacks(module: CachedModule) -> bool:
    plain = any(one.capability >= (9, 0) and not one.suffix for one in module.targets)
    return plain and module.needs_suffix
