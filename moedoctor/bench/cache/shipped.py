"""The routing trace that comes with moedoctor, which commands and failures replay unless they get another."""

from __future__ import annotations

from pathlib import Path

from moedoctor.entries import find_reports_folder
from moedoctor.trace.format import RoutingTrace, load

SHIPPED = Path("traces", "small_moe_decode.safetensors")
"""In the folder of the evidence."""


def load_shipped_trace() -> RoutingTrace:
    """Return the decode of a small MoE language model on held-out text. Raises TraceError."""
    return load(find_reports_folder() / SHIPPED)
