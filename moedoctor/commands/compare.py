"""`moedoctor compare BASELINE CURRENT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moedoctor.commands.options import Output, PageFormat, Tolerance, as_input_error, deliver


def compare(
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help="The JSON report to compare with.")],
    current: Annotated[Path, typer.Argument(metavar="CURRENT", help="The JSON report to judge.")],
    tolerance: Tolerance = None,
    format: PageFormat = "table",
    output: Output = None,
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
    code = 1 if changed.regressions else 0
    reasons = [f"worse than the baseline: {text}" for text in groups["regressions"]]
    document = {"command": "compare", **groups, "summary": {"exit_code": code}}
    deliver(page, document, format=format, output=output, summary=summary, code=code, reasons=reasons)
    return code
