"""FlashInfer's cache of compiled kernels, read from names and build files alone.

It is at ``$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer/<release>/<targets>/cached_ops/<module>/`` (0.5.0 to
0.7.2.post1), with ``<targets>`` such as ``120f`` or ``90a_120f`` and a ``build.ninja`` for each module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moedoctor.diagnose.cuda.device_code import Image
from moedoctor.fixes.arch.targets import Target

_GENCODE = re.compile(r"-gencode[= ][\"']?arch=compute_([^,\s\"']+),code=\[?([^\s\"'\]$]+)")
_NEEDS_SUFFIX = re.compile(r"fused_moe|gemm|fp4")


@dataclass(frozen=True)
class CachedModule:
    """A module in the cache."""

    release: str
    targets: tuple[Target, ...]
    """The targets in the folder's name; empty if FlashInfer did not find one."""
    module: str

    @property
    def needs_suffix(self) -> bool:
        """Whether the module holds tensor-core kernels, which need architecture-specific instructions."""
        return _NEEDS_SUFFIX.search(self.module) is not None


def cached_module(path: Path) -> CachedModule | None:
    """Return the module that `path` belongs to, or None for a path outside a FlashInfer cache."""
    parts = path.parts
    if "cached_ops" not in parts:
        return None
    place = len(parts) - 1 - parts[::-1].index("cached_ops")
    if place < 2 or len(parts) <= place + 1:
        return None
    targets = _targets(parts[place - 1])
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


def _targets(folder: str) -> tuple[Target, ...]:
    try:
        return tuple(Target.parse(name) for name in folder.split("_"))
    except ValueError:
        return ()
