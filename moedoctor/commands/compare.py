"""`moedoctor compare BASELINE CURRENT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moedoctor.commands.options import Full, Output, PageFormat, Tolerance, convert_errors
from moedoctor.commands.pages import deliver_document


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
    from moedoctor.reporters.pages.compare import CompareDocument
    from moedoctor.results import ReportError, load_report

    with convert_errors(ReportError, ValueError):
        allowed = comparison.Tolerance.parse(tolerance or ())
        changed = comparison.compare(load_report(baseline), load_report(current), allowed)
    document = CompareDocument.from_changes(changed, baseline.name, current.name)
    reasons = [f"worse than the baseline: {text}" for text in document.regressions]
    return deliver_document(document, format, output, full=full, code=int(bool(reasons)), reasons=reasons)
