"""`moedoctor explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moedoctor.commands.options import Full, InputError, Output, PageFormat, convert_errors
from moedoctor.commands.pages import deliver_document

if TYPE_CHECKING:
    from moedoctor.reporters.pages.explain import Explained


def explain(
    entry: Annotated[str, typer.Argument(metavar="ID|NAME", help="A known failure, such as MD001.")],
    format: PageFormat = "table",
    output: Output = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also show the figures behind each claim, and which releases were run."
        ),
    ] = False,
    full: Full = False,
) -> int:
    """Explain one known failure.

    What happens, who is affected, how to see it, the fix, links, and whether each claim about it holds.
    """
    return deliver_document(_find(entry), format, output, full=full, verbose=verbose)


def _find(text: str) -> Explained:
    """Return the failure of our catalogue, or of another project, with this id or name."""
    from moedoctor import catalogue
    from moedoctor.entries import find_entry, load_entries
    from moedoctor.reporters.pages.explain import Explained
    from moedoctor.text import suggest_nearest

    entry = find_entry(text)
    with convert_errors(catalogue.PluginError):
        if entry is not None:
            return Explained.from_entry(entry, runs=entry.name in catalogue.list_registered_names())
        others = catalogue.load_faults_beside({known.name for known in load_entries().values()})
    key = text.strip().lower().replace("-", "_")
    for fault in others:
        if key in (fault.id.lower(), fault.name):
            return Explained.from_fault(fault)
    valid = [name for known in load_entries().values() for name in (known.id, known.name)]
    valid += [name for fault in others for name in (fault.id, fault.name)]
    raise InputError(
        f"{text}: no such entry; {suggest_nearest(text, valid)} `moedoctor list` shows all of them"
    )
