"""What is said of one setting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SettingFinding:
    """One setting that is not what it seems."""

    setting: str
    """As it was given: ``VLLM_MXFP4_USE_MARLIN=1`` or ``--moe-backend banana``."""
    problem: str
    """unknown, removed, not_yet, misspelt, wrong_case, invalid, silently_off, shadowed, ignored; or, where
    it does take effect, deprecated or other_layers."""
    message: str
    instead: str | None
    """What would do, for this release; None where nothing would, or nobody can know what was meant."""
    source: str
    """File and line that say so; empty for what is nowhere."""
    takes_effect: bool = False
    stops: bool = False
    """vLLM itself stops at it, and so tells."""
