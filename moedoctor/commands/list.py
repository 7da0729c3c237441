"""`moedoctor list`, and the same catalogue as the table of README.md."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from moedoctor.commands.options import PageFormat, as_input_error, deliver


@dataclass(frozen=True)
class Row:
    """One known failure."""

    id: str
    name: str
    scenario: bool
    """Whether moedoctor can run it."""
    title: str


def list_(format: PageFormat = "table") -> int:
    """Show the catalogue of known failures."""
    from moedoctor.reporters.page import Block, Paragraph, Span, Table

    rows = list_rows()
    cells = [(row.id, row.name, "yes" if row.scenario else "not yet", row.title) for row in rows]
    more = Paragraph(
        ("Details: ", Span("moedoctor explain ID", "code"), ". Run one: ", Span("moedoctor run ID", "code"))
    )
    page: list[Block] = [Table(("id", "name", "runs", "failure"), cells), more]
    deliver(page, {"catalogue": [asdict(row) for row in rows]}, format=format)
    return 0


def list_rows() -> list[Row]:
    """Return our failures and those of other projects, in the order of their ids. Loads none of ours."""
    from moedoctor import catalogue
    from moedoctor.entries import entries

    with as_input_error(catalogue.PluginError):
        runs = catalogue.registered_names()
        rows = [Row(entry.id, entry.name, entry.name in runs, entry.title) for entry in entries().values()]
        others = catalogue.faults_beside({row.name for row in rows})
    rows += [Row(fault.id, fault.name, True, fault.title) for fault in others]
    return sorted(rows, key=lambda row: row.id)


def readme_table() -> str:
    """Return our failures as the table of README.md, without a line end at its end."""
    from moedoctor.entries import entries
    from moedoctor.reporters.markdown import to_markdown
    from moedoctor.reporters.page import Span, Table

    rows = [
        (Span(entry.id, "code"), entry.name, entry.title, entry.where, entry.fixed)
        for entry in entries().values()
    ]
    return to_markdown([Table(("id", "name", "failure", "who has it", "fixed in"), rows)]).rstrip("\n")
