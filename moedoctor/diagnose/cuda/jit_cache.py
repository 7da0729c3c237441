"""FlashInfer's cache of compiled kernels, read from names and build files alone.

It is at ``$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer/<release>/<targets>/cached_ops/<module>/`` (0.5.0 to
0.7.2.post1), with ``<targets>`` such as ``120f`` or ``90a_120f`` and a ``build.ninja`` for each module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from moedoctor.diagnose.cuda.device_code import Image
from moedoctor.fixes.arch.targets import Target

BASE = "FLASHINFER_WORKSPACE_BASE"
MAX_MODULES = 2_000
SUFFIX_SINCE = (9, 0)
"""GPUs from here on have instructions that need a suffix."""
_GENCODE = re.compile(r"-gencode[= ][\"']?arch=compute_([^,\s\"']{1,40}),code=\[?([^\s\"'\]$]{1,400})")
_NEEDS_SUFFIX = re.compile(r"fused_moe|gemm|fp4")


@dataclass(frozen=True)
class CachedModule:
    release: str
    targets: tuple[Target, ...]
    """The targets in the folder's name; empty if FlashInfer did not find one."""
    module: str

    @property
    def needs_suffix(self) -> bool:
        """True if the module holds tensor-core kernels, which need architecture-specific instructions."""
        return _NEEDS_SUFFIX.search(self.module) is not None


def find_cached_module(path: Path) -> CachedModule | None:
    """Return the module that `path` belongs to, or None for a path outside a FlashInfer cache."""
    parts = path.parts
    if "cached_ops" not in parts:
        return None
    place = len(parts) - 1 - parts[::-1].index("cached_ops")
    if place < 2 or len(parts) <= place + 1:
        return None
    try:
        targets = tuple(map(Target.parse, parts[place - 1].split("_")))
    except ValueError:
        targets = ()
    release = parts[place - 2] if targets else parts[place - 1]
    return CachedModule(release, targets, parts[place + 1])


def build_images(text: str) -> tuple[tuple[Image, ...], tuple[str, ...]]:
    """Return what the flags of a ``build.ninja`` compile for, and the names in them that are not targets."""
    images: set[Image] = set()
    unreadable: dict[str, None] = {}
    for virtual, codes in _GENCODE.findall(text):
        for name in (f"compute_{virtual}", *codes.split(",")):
            try:
                target = Target.parse(name)
            except ValueError:
                unreadable[name] = None
                continue
            if name in codes.split(","):
                images.add(Image("ptx" if name.startswith("compute_") else "sass", target))
    return tuple(sorted(images)), tuple(unreadable)


@dataclass(frozen=True)
class JitFolder:
    """The modules that one release compiled for one set of targets."""

    release: str
    targets: tuple[str, ...]
    """``("120f",)``; empty if FlashInfer did not find a target."""
    modules: int
    """Modules with a compiled library."""
    lacking: tuple[str, ...]
    """Modules with tensor-core kernels compiled for a target of 9.0 or later without its suffix."""


@dataclass(frozen=True)
class JitCache:
    path: str
    """The folder in which FlashInfer looks; not redacted."""
    folders: tuple[JitFolder, ...]


def read_jit_cache(environ: Mapping[str, str]) -> JitCache:
    """Return the cache that FlashInfer uses under `environ`. An absent one is empty. Raises OSError."""
    base = environ.get(BASE) or environ.get("HOME") or os.path.expanduser("~")
    root = Path(base) / ".cache" / "flashinfer"
    libraries = islice(root.glob("*/*/cached_ops/*/*.so"), MAX_MODULES) if root.is_dir() else ()
    groups: dict[tuple[str, tuple[Target, ...]], list[CachedModule]] = {}
    for module in filter(None, map(find_cached_module, libraries)):
        groups.setdefault((module.release, module.targets), []).append(module)
    folders = []
    for (release, targets), modules in groups.items():
        plain = any(target.capability >= SUFFIX_SINCE and not target.suffix for target in targets)
        lacking = {module.module for module in modules if plain and module.needs_suffix}
        names = tuple(map(str, targets))
        folders.append(JitFolder(release, names, len(modules), tuple(sorted(lacking))))
    folders.sort(key=lambda folder: (folder.release, folder.targets))
    return JitCache(str(root), tuple(folders))
