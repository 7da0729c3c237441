"""`moedoctor check`."""

from __future__ import annotations

from moedoctor.commands.options import Output, PageFormat, deliver


def check(format: PageFormat = "table", output: Output = None) -> int:
    """Find the known failures that can affect this environment.

    Looks at GPUs, driver, packages, settings and caches, and tries to pin memory. It runs no model and
    changes nothing. Exit code 1 if something was found.
    """
    from moedoctor.diagnose.check.check import check as find
    from moedoctor.reporters.check import check_document, check_page, summary_line

    result = find()
    page = check_page(result, facts_last=format == "markdown")
    deliver(page, check_document(result), format=format, output=output, summary=summary_line(result))
    return result.exit_code
