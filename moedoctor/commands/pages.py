"""The page of each command's JSON document, for the command that makes the document and for `show`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from moedoctor.commands.options import FULL_FORMATS, deliver
from moedoctor.reporters.json import load_documents

if TYPE_CHECKING:
    from moedoctor.reporters.findings import Findings
    from moedoctor.reporters.json import Document
    from moedoctor.reporters.page import Block


class Wanted(NamedTuple):
    """The options that a page depends on."""

    format: str
    full: bool = False
    verbose: bool = False


_OPTIONS: Mapping[str, Callable[[Wanted], Mapping[str, bool]]] = {
    "full": lambda wanted: {"full": wanted.full},
    "full in files": lambda wanted: {"full": wanted.format in FULL_FORMATS},
    "brief in tables": lambda wanted: {"brief": wanted.format == "table"},
    "brief unless verbose": lambda wanted: {"brief": wanted.format == "table" and not wanted.verbose},
}
"""Arguments of a page, by their name in the table of documents."""


def make_page(
    command: str, document: Any, wanted: Wanted
) -> tuple[list[Block], str, Callable[[], Findings] | None]:
    """Return the page of a document, its summary, and what the formats for machines show."""
    row = load_documents()[command]
    show, summarize = (resolve_name(f"moedoctor.reporters.{row[key]}") for key in ("page", "summary"))
    summary: str = summarize(document)
    find = resolve_name(f"moedoctor.reporters.{row['findings']}") if "findings" in row else None
    findings = (lambda: find(document, summary)) if find else None
    options = _OPTIONS[row["options"]](wanted) if "options" in row else {}
    return show(document, **options), summary, findings


def deliver_document(
    document: Document,
    format: str,
    output: Path | None,
    *,
    full: bool,
    verbose: bool = False,
    code: int = 0,
    reasons: Sequence[str] = (),
    masked: bool = False,
) -> int:
    """Write a command's document in a format, print why it ends with `code`, and return `code`."""
    page, summary, findings = make_page(document.command, document, Wanted(format, full, verbose))
    deliver(
        page,
        document,
        format=format,
        output=output,
        summary=summary,
        code=code,
        reasons=reasons,
        masked=masked,
        full=full,
        findings=findings,
    )
    return code
