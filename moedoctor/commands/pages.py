"""The page of each command's JSON document, for the command that makes the document and for `show`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from moedoctor.commands.options import FULL_FORMATS, deliver

if TYPE_CHECKING:
    from moedoctor.reporters.findings import Findings
    from moedoctor.reporters.json import Document
    from moedoctor.reporters.page import Block


class Wanted(NamedTuple):
    """The options that a page depends on."""

    format: str
    full: bool = False
    verbose: bool = False


class _Kind(NamedTuple):
    """The functions that show a command's document, as ``module:name`` in `moedoctor.reporters`."""

    page: str
    summary: str
    findings: str = ""
    """(document, summary) -> what the formats for machines show; empty if they show nothing."""
    options: Callable[[Wanted], Mapping[str, bool]] = lambda wanted: {}
    """Arguments of the page."""


def _fill_files(wanted: Wanted) -> Mapping[str, bool]:
    return {"full": wanted.format in FULL_FORMATS}


PAGES: Mapping[str, _Kind] = {
    "check": _Kind("pages.check:make_check_page", "pages.check:summarize", "findings:find_in_check"),
    "triage": _Kind("pages.triage:triage_page", "pages.triage:count_line", "findings:find_in_triage"),
    "lint": _Kind("pages.lint:make_lint_page", "pages.lint:summarize", "findings:find_in_lint"),
    "preflight": _Kind(
        "pages.preflight:build_preflight_page", "pages.preflight:summarize", "findings:find_in_preflight"
    ),
    "audit": _Kind(
        "pages.audit:audit_page",
        "pages.audit:summarize",
        "findings:find_in_audit",
        lambda wanted: {"brief": wanted.format == "table"},
    ),
    "autopsy": _Kind("pages.autopsy:make_autopsy_page", "pages.autopsy:summarize"),
    "conform": _Kind(
        "pages.conform:make_conform_page", "pages.conform:summarize", "pages.conform:find_in_conform"
    ),
    "fleet": _Kind(
        "pages.fleet:make_fleet_page",
        "pages.fleet:summarize",
        "pages.fleet:find_in_fleet",
        lambda wanted: {"full": wanted.full},
    ),
    "plan": _Kind("pages.plan:make_plan_page", "pages.plan:summarize"),
    "backends": _Kind("pages.backends:make_backends_page", "pages.backends:summarize"),
    "compare": _Kind("pages.compare:make_compare_page", "pages.compare:summarize"),
    "replay": _Kind("pages.replay:replay_page", "pages.replay:answer_of", options=_fill_files),
    "capsule": _Kind("pages.replay:make_capsule_page", "pages.replay:describe_capsule"),
    "explain": _Kind(
        "pages.explain:Explained.make_page",
        "pages.explain:Explained.summarize",
        options=lambda wanted: {"brief": wanted.format == "table" and not wanted.verbose},
    ),
    "list": _Kind("pages.explain:Catalogue.make_page", "pages.explain:Catalogue.summarize"),
    "bench": _Kind("pages.bench:make_bench_page", "pages.bench:summarize", options=_fill_files),
}
"""Command -> what shows its document; a report of `run` is rendered as a whole."""


def make_page(
    command: str, document: Any, wanted: Wanted
) -> tuple[list[Block], str, Callable[[], Findings] | None]:
    """Return the page of a document, its summary, and what the formats for machines show."""
    kind = PAGES[command]
    show, summarize = (resolve_name(f"moedoctor.reporters.{name}") for name in kind[:2])
    summary: str = summarize(document)
    find = resolve_name(f"moedoctor.reporters.{kind.findings}") if kind.findings else None
    findings = (lambda: find(document, summary)) if find else None
    return show(document, **kind.options(wanted)), summary, findings


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
