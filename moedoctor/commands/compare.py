"""`moedoctor compare BASELINE CURRENT`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.comparison import Comparison, Tolerance, compare
from moedoctor.results import ReportError, load_report

FORMATS = ("table", "json", "markdown")


def compare_command(baseline: Path, current: Path, tolerance: Sequence[str], format: str) -> int:
    """Print what changed from `baseline` to `current`; 1 where something got worse."""
    if format not in FORMATS:
        raise InputError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    with as_input_error(ReportError, ValueError):
        comparison = compare(load_report(baseline), load_report(current), Tolerance.parse(tolerance))
    print(_render(comparison, format))
    return 1 if comparison.regressions else 0


def _render(comparison: Comparison, format: str) -> str:
    groups = {
        "regressions": [str(one) for one in comparison.regressions],
        "improvements": [str(one) for one in comparison.improvements],
        "notes": [str(one) for one in comparison.notes],
    }
    if format == "json":
        return json.dumps({"schema_version": 1, "command": "compare", **groups}, indent=1)
    mark = "## " if format == "markdown" else ""
    lines = []
    for name, entries in groups.items():
        if entries:
            lines += [f"{mark}{name}", *(f"{'-' if mark else ' '} {entry}" for entry in entries), ""]
    counts = ", ".join(f"{len(entries)} {name}" for name, entries in groups.items())
    return "\n".join([*lines, counts])
