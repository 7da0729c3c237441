"""The table of failures in README.md, made from the entries; `scripts/check_readme.py` compares the two."""

from __future__ import annotations

from moedoctor import catalogue
from moedoctor.entries import entries

_HEAD = ("id", "failure", "strikes", "fixed", "`run`")


def failures_table() -> str:
    """The table, without a line end at its end."""
    registered = catalogue.registered_names()
    rows = [
        (
            f"`{one.id}`",
            f"**{one.name}**: {one.title}",
            one.where,
            one.fixed,
            "yes" if one.name in registered else "",
        )
        for one in entries().values()
    ]
    return "\n".join((_row(_HEAD), _row(("---",) * len(_HEAD)), *map(_row, rows)))


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
