"""`moedoctor list`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from moedoctor import catalogue
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.entries import entries

FORMATS = ("table", "json", "markdown")
_HEAD = ("id", "name", "runs", "failure")


@dataclass(frozen=True)
class Row:
    """One known failure."""

    id: str
    name: str
    scenario: bool
    """Whether moedoctor can run it."""
    title: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The same as text."""
        return self.id, self.name, "yes" if self.scenario else "not yet", self.title


def list_rows() -> tuple[Row, ...]:
    """Ours and those of other projects, in the order of their ids. Loads none of ours."""
    with as_input_error(catalogue.PluginError):
        registered = catalogue.registered_names()
        ours = [Row(one.id, one.name, one.name in registered, one.title) for one in entries().values()]
        others = catalogue.faults_beside({one.name for one in ours})
    return tuple(sorted([*ours, *(Row(one.id, one.name, True, one.title) for one in others)], key=_id))


def list_text(format: str) -> str:
    """The catalogue, one entry a line."""
    if format not in FORMATS:
        raise InputError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    rows = list_rows()
    if format == "json":
        listed = [vars(row) for row in rows]
        return json.dumps({"schema_version": 1, "catalogue": listed}, indent=1, ensure_ascii=False) + "\n"
    cells = [_HEAD, *(row.cells for row in rows)]
    if format == "markdown":
        head, *body = (f"| {' | '.join(row)} |" for row in cells)
        return "\n".join([head, "|---|---|---|---|", *body]) + "\n"
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = (
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in cells
    )
    return "\n".join(lines) + "\n\n`moedoctor explain ID` tells one in full; `moedoctor run ID` runs it.\n"


def _id(row: Row) -> str:
    return row.id
