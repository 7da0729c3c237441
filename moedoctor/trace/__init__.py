"""Hooks on a running model: where a NaN starts, what the router chose, and the file that keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moedoctor.trace.nan_locator import NanLocator as NanLocator

__all__ = ["NanLocator"]


def __getattr__(name: str) -> Any:
    """`NanLocator` needs torch, the trace file's format does not."""
    if name == "NanLocator":
        from moedoctor.trace.nan_locator import NanLocator

        return NanLocator
    raise AttributeError(f"module {__name__} has no attribute {name}")
