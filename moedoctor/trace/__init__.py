"""Hooks on a running model: where a NaN starts, what the router chose, and calls kept as capsules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moedoctor.trace.moe_recorder import MoeRecorder as MoeRecorder
    from moedoctor.trace.nan_locator import NanLocator as NanLocator

__all__ = ["MoeRecorder", "NanLocator"]
_MODULES = {"MoeRecorder": "moe_recorder", "NanLocator": "nan_locator"}


def __getattr__(name: str) -> Any:
    """Import the recorders when they are asked for: they need torch, the trace file's format does not."""
    if name in _MODULES:
        return getattr(import_module(f"moedoctor.trace.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
