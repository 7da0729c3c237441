"""`moedoctor list`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from moedoctor.commands.options import Full, Output, PageFormat, convert_errors
from moedoctor.commands.pages import deliver_document

if TYPE_CHECKING:
    from moedoctor.reporters.pages.explain import Row


def list_(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD]...", help="Show only failures whose texts hold all of these."),
    ] = None,
    format: PageFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Show the catalogue of known failures, or those that some words are about.

    Searches titles, messages, releases and what happens.
    """
    from moedoctor.reporters.page import Paragraph
    from moedoctor.reporters.pages.explain import Catalogue

    found = Catalogue(tuple(row for row in list_rows() if _is_about(row, words or ())))
    nothing = Paragraph(f"no known failure is about {' '.join(words or ())}; `moedoctor list` shows all")
    page = None if found.catalogue else [nothing]
    return deliver_document(found, format, output, full=full, page=page)


def _is_about(row: Row, words: Sequence[str]) -> bool:
    """Return whether the texts of a failure hold all words, in any case."""
    from moedoctor.entries import find_entry

    entry = find_entry(row.id)
    texts = [row.id, row.name, row.title]
    if entry is not None:
        texts += [entry.where, entry.mechanism, entry.affected, entry.detection]
    text = " ".join(texts).lower()
    return all(word.lower() in text for word in words)


def list_rows() -> list[Row]:
    """Return our failures and those of other projects, in the order of their ids. Loads none of ours."""
    from moedoctor import catalogue
    from moedoctor.entries import load_entries
    from moedoctor.reporters.pages.explain import Row

    with convert_errors(catalogue.PluginError):
        runs = catalogue.list_registered_names()
        rows = [
            Row(entry.id, entry.name, entry.name in runs, entry.title, entry.where, entry.fixed, entry.family)
            for entry in load_entries().values()
        ]
        others = catalogue.load_faults_beside({row.name for row in rows})
    rows += [Row(fault.id, fault.name, True, fault.title, "", "", "") for fault in others]
    return sorted(rows, key=lambda row: row.id)
