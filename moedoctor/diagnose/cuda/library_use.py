"""The GPUs that use a library: vLLM and FlashInfer select some of their libraries only on some GPUs.

Without kernels for another GPU such a library is not broken. The tables restate the conditions in the sources
of vLLM 0.17.1 to 0.33.0 and FlashInfer 0.6.4 to 0.7.2.post1. All GPUs use a library that is not in them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from moedoctor.fixes.arch.targets import Capability
from moedoctor.text import load_yaml


@dataclass(frozen=True)
class LibraryUse:
    """The GPUs and models that use a library."""

    capabilities: str
    """A pattern of the capabilities that use it, as ``(9|10)[.]0`` of 9.0 and 10.0."""
    gpus: str
    """The GPUs in words: ``9.x``."""
    source: str
    """File and condition that show it."""
    needed_by: str | None = None
    """The few models that need it; None if any model may use it on these GPUs."""

    def uses(self, gpu: Capability) -> bool:
        return re.fullmatch(self.capabilities, f"{gpu[0]}.{gpu[1]}") is not None


_ROWS = load_yaml("moedoctor.diagnose.cuda", "library_use.yaml")
VLLM, FLASHINFER = ({name: LibraryUse(**row) for name, row in _ROWS[package].items()} for package in _ROWS)
"""Extension module of vLLM, or module of FlashInfer -> its use."""
_HARDWARE = re.compile(r"_h20_.*$")
"""``fused_moe_90_h20_prebuilt_d`` is fused_moe_90 for one GPU."""


def find_library_use(path: str, module: str | None = None) -> LibraryUse | None:
    """Return when the library at `path`, or the FlashInfer module, is used; None if on every GPU."""
    name = PurePath(path.rpartition("!")[2]).name.partition(".")[0]
    return VLLM.get(name) or FLASHINFER.get(_HARDWARE.sub("", module or name))
