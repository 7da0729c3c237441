"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FormatOption = Annotated[
    str, typer.Option("--format", "-f", metavar="FORMAT", help="table, json, markdown, junit or github.")
]
TableFormatOption = Annotated[
    str, typer.Option("--format", "-f", metavar="FORMAT", help="table, json or markdown.")
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the report to this file.")
]
ToleranceOption = Annotated[
    list[str] | None,
    typer.Option(metavar="[KEY=]SHARE", help="How much worse a figure may be: 5%, or KEY=5% for one figure."),
]
