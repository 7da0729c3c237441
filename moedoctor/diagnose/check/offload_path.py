"""Which of its two paths vLLM's CPU offload takes here: mapped host memory (UVA), or copies in every forward.

Restated from `offloader/uva.py`, `platforms/interface.py` and `platforms/cuda.py` of vLLM 0.17.1 to 0.33.0.
What vLLM decides says nothing about whether pinning works; `moedoctor.diagnose.check.pinning` tries that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

DISABLE_UVA = "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"
DISABLE_PIN = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"
WSL_PIN = "VLLM_WSL2_ENABLE_PIN_MEMORY"
WSL_PIN_SINCE = Version("0.24.0")
WSL_KERNEL = (4, 19, 121)
"""The first WSL 2 kernel that vLLM lets pin memory."""


@dataclass(frozen=True)
class Answer:
    """Yes, no or unknown, and why."""

    value: bool | None
    reason: str


@dataclass(frozen=True)
class OffloadPath:
    """What vLLM's offloader does with the weights that it keeps on the host."""

    uva: Answer
    """Whether it maps them into the GPU's address space; else it copies them in every forward."""
    pins: Answer
    """Whether it keeps them in pinned memory."""


def offload_path(
    vllm: str | None, *, wsl: bool | None, kernel: str | None, variables: Mapping[str, str]
) -> OffloadPath:
    """The path that vLLM release `vllm` takes under these variables; unknown where a fact is."""
    if vllm is None:
        nothing = Answer(None, "vLLM is not installed")
        return OffloadPath(nothing, nothing)
    platform = _platform_pins(vllm, wsl, kernel, variables)
    return OffloadPath(_unless(platform, DISABLE_UVA, variables), _unless(platform, DISABLE_PIN, variables))


def _unless(platform: Answer, switch: str, variables: Mapping[str, str]) -> Answer:
    if _is_on(variables.get(switch)):
        return Answer(False, f"{switch}={variables[switch]} is set")
    return platform


def _platform_pins(vllm: str, wsl: bool | None, kernel: str | None, variables: Mapping[str, str]) -> Answer:
    if wsl is None:
        return Answer(None, "whether this is WSL is not known")
    if not wsl:
        return Answer(True, "Linux without WSL")
    try:
        chosen = Version(vllm) >= WSL_PIN_SINCE
    except InvalidVersion:
        return Answer(None, f"vLLM's version {vllm!r} cannot be read")
    if not chosen:
        return Answer(False, f"vLLM {vllm} never pins memory on WSL")
    if not _is_on(variables.get(WSL_PIN)):
        return Answer(False, f"on WSL vLLM {vllm} pins memory only with {WSL_PIN}=1")
    found = tuple(int(part) for part in re.findall(r"\d+", kernel or "")[:3])
    if found < WSL_KERNEL:
        return Answer(False, f"the WSL kernel {kernel or 'of unknown release'} is older than 4.19.121")
    return Answer(True, f"{WSL_PIN}={variables[WSL_PIN]} is set")


def _is_on(value: str | None) -> bool:
    """As vLLM reads its switches; what is no number stops vLLM itself."""
    try:
        return bool(int(value or "0"))
    except ValueError:
        return False
