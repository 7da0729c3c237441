"""The page of each command's JSON document, for the command that makes the document and for `show`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from moedoctor.commands.options import CHECK_FORMATS, FULL_FORMATS, PAGE_FORMATS, draw_picture, print_reasons
from moedoctor.reporters.json import load_documents

if TYPE_CHECKING:
    from moedoctor.reporters.page import Block, Page

_OPTIONS: Mapping[str, Callable[[str, bool, bool], Mapping[str, bool]]] = {
    "full": lambda format, full, verbose: {"full": full},
    "full in files": lambda format, full, verbose: {"full": format in FULL_FORMATS},
    "brief in tables": lambda format, full, verbose: {"brief": format == "table"},
    "brief unless verbose": lambda format, full, verbose: {"brief": format == "table" and not verbose},
}
"""Arguments of a page, by their name in the table of documents, from the options of a command."""


def deliver_document(
    document: Any,
    format: str,
    output: Path | None,
    *,
    full: bool,
    verbose: bool = False,
    code: int = 0,
    reasons: Sequence[str] = (),
    masked: bool = False,
    stored: Mapping[str, Any] | None = None,
    page: Page | None = None,
) -> int:
    """Write a command's document or page, masked; print why it ends with `code`, and return `code`.

    `reasons` say why the command ends with `code`: in the document's summary and on stderr. `masked` is for
    a fleet, which masks each answer as it comes, and names hosts where that is wanted. Markdown is a digest
    unless it is to be `full`. `stored` is a document as a file has it, which keeps its own summary and
    origin, and nothing ends with its code. `page` is what is shown instead of the document's page.
    """
    from moedoctor.redaction import Redactor
    from moedoctor.reporters.digest import make_digest
    from moedoctor.reporters.json import to_document, to_json
    from moedoctor.reporters.output import append_step_summary, emit, inspect_terminal
    from moedoctor.reporters.page import report_answer
    from moedoctor.reporters.pages.machine import make_origin_table

    row = load_documents()[document.command]
    show, summarize = (resolve_name(f"moedoctor.reporters.{row[key]}") for key in ("page", "summary"))
    summary: str = summarize(document)
    find = resolve_name(f"moedoctor.reporters.{row['findings']}") if "findings" in row else None
    if page is None:
        page = show(document, **(_OPTIONS[row["options"]](format, full, verbose) if "options" in row else {}))
    written = to_document(document) if stored is None else {**stored, "origin": stored.get("origin")}
    redact: Callable[[Any], Any] = Redactor.from_this_process().record
    mask: Callable[[Any], Any] = (lambda value: value) if masked else redact
    if stored is not None:
        reasons = written.get("summary", {}).get("reasons", ())
    reasons = mask(tuple(reasons) if code or stored is not None else ())
    if format in ("json", *FULL_FORMATS):
        written = {**redact(make_head(written)), **written}
        if written["origin"] is None:  # a stored report of an older release
            del written["origin"]
    if stored is None and (code or "summary" in written):
        ending = {"exit_code": code, "reasons": list(reasons)}
        written = {**written, "summary": {**written.get("summary", {}), **ending}}
    found = [text for text in (summary, *reasons) if text]
    if format == "json":
        text = to_json(mask(written))
    elif format == "markdown":
        from moedoctor.reporters.markdown_page import to_markdown

        blocks = [*mask(place_pictures(page, output)), *make_origin_table(written.get("origin"))]
        text = to_markdown(blocks) if full else make_digest(blocks, mask(report_answer(page, written, found)))
    elif format == "html":
        from moedoctor.reporters.html import put_answer_first, to_html

        # As in Markdown, the commit is no secret: a mask that sees only the text would take it for a token.
        made = make_origin_table(written.get("origin"))
        text = to_html([*mask(put_answer_first(page, {**written, "origin": None}, found)), *made])
    elif find is not None and format in CHECK_FORMATS[len(PAGE_FORMATS) :]:
        from moedoctor.reporters.github import to_commands
        from moedoctor.reporters.junit import to_junit
        from moedoctor.reporters.sarif import to_sarif

        write = {"sarif": to_sarif, "junit": to_junit, "github": to_commands}[format]
        text = write(mask(find(document, summary)))
        if format == "github":
            answered = report_answer(page, written, found)
            append_step_summary(make_digest(mask(page), mask(answered)))
    else:
        from moedoctor.reporters.table import to_text

        colour, width = inspect_terminal(output)
        text = to_text(mask(page), colour=colour, width=width)
    emit(text, output, summary)
    print_reasons(code, reasons, text, output)
    return code


def make_head(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what begins every JSON output. `document` names its command; it may have its own origin."""
    from moedoctor import __version__, environment
    from moedoctor.origin import record_origin
    from moedoctor.results import SCHEMA_VERSION

    head = {"schema_version": SCHEMA_VERSION, "moedoctor": __version__, "command": document["command"]}
    stored = "origin" in document
    return {**head, "origin": None if stored else record_origin(variables=environment.mask_variables())}


def place_pictures(page: Page, report: Path | None) -> list[Block]:
    """Return the page with its pictures drawn beside the file `report`; without a file they stay data."""
    from moedoctor.processes.files import stream_of
    from moedoctor.reporters.page import Picture

    if report is None or stream_of(report) is not None:
        return list(page)
    blocks: list[Block] = []
    for block in page:
        if isinstance(block, Picture):
            path = report.with_name(f"{report.stem}_{block.chart.name}.svg")
            block = replace(block, file=path.name if draw_picture(block.chart, path) else "")
        blocks.append(block)
    return blocks
