"""`moedoctor compare BASELINE CURRENT`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moedoctor.commands.options import Full, Output, PageFormat, Tolerance, as_input_error, deliver

if TYPE_CHECKING:
    from moedoctor.comparison import Comparison

_LISTED = 5


def compare(
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help="The JSON report to compare with.")],
    current: Annotated[Path, typer.Argument(metavar="CURRENT", help="The JSON report to judge.")],
    tolerance: Tolerance = None,
    format: PageFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Compare two JSON reports.

    Exit code 1 if something got worse. Reports of different GPUs or releases cannot be compared.
    """
    from moedoctor import comparison
    from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph
    from moedoctor.results import ReportError, load_report

    with as_input_error(ReportError, ValueError):
        allowed = comparison.Tolerance.parse(tolerance or ())
        changed = comparison.compare(load_report(baseline), load_report(current), allowed)
    groups = {
        name: [str(change) for change in getattr(changed, name)]
        for name in ("regressions", "improvements", "notes")
    }
    page: list[Block] = [Heading(f"{current.name} compared with {baseline.name}", 1)]
    for name, changes in groups.items():
        if changes:
            page += [Heading(name), Bullets(changes)]
    summary = ", ".join(f"{len(changes)} {name}" for name, changes in groups.items())
    page.append(Paragraph(summary))
    page += [Paragraph(f"Next: {text}.") for text in _next(changed, current)]
    code = 1 if changed.regressions else 0
    reasons = [f"worse than the baseline: {text}" for text in groups["regressions"]]
    document = {"command": "compare", **groups, "summary": {"exit_code": code}}
    deliver(
        page, document, format=format, output=output, full=full, summary=summary, code=code, reasons=reasons
    )
    return code


def _next(changed: Comparison, current: Path) -> list[str]:
    """Return what to do now."""
    ids = list(dict.fromkeys(change.scenario for change in changed.regressions if change.scenario))
    if not changed.regressions:
        if changed.improvements or changed.notes:
            return [f"nothing got worse; keep {current} as the baseline from now on"]
        return ["nothing changed; keep the baseline"]
    again = f"`moedoctor run {' '.join(ids[:_LISTED])}`" if ids else "the same command"
    steps = [f"run {again} once more on this machine; a figure that is worse only once may be noise"]
    return [*steps, *(f"`moedoctor explain {ids[0]}` says what it is" for _ in ids[:1])]
