"""Evidence that is a list of records, arranged as a table: measurements over shapes, counts over releases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.reporters.text import one_line, short_value
from moedoctor.results import Evidence

_SPREAD = ("_p20", "_p80")


@dataclass(frozen=True)
class EvidenceTable:
    """One list of records under a name."""

    name: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def evidence_tables(evidence: Evidence) -> tuple[EvidenceTable, ...]:
    """The lists of records in `evidence`; a median with its percentiles becomes ``1.49 (1.48 to 1.51)``."""
    return tuple(_table(one_line(str(name)), value) for name, value in evidence.items() if is_records(value))


def without_records(evidence: Evidence) -> dict[str, Any]:
    """The rest of `evidence`, for a line of text."""
    return {name: value for name, value in evidence.items() if not is_records(value)}


def is_records(value: Any) -> bool:
    """Whether `value` is a list of mappings, with at least one."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _table(name: str, records: Sequence[Mapping[str, Any]]) -> EvidenceTable:
    keys = list(dict.fromkeys(str(key) for record in records for key in record))
    shown = [key for key in keys if not _is_percentile(key, keys)]
    rows = tuple(tuple(_cell(record, key) for key in shown) for record in records)
    return EvidenceTable(name, tuple(one_line(key).replace("_", " ") for key in shown), rows)


def _cell(record: Mapping[str, Any], key: str) -> str:
    if key not in record:
        return ""
    low, high = (record.get(f"{key}{end}") for end in _SPREAD)
    median = short_value(record[key])
    return median if low is None or high is None else f"{median} ({short_value(low)} to {short_value(high)})"


def _is_percentile(key: str, keys: Sequence[str]) -> bool:
    return any(key.endswith(end) and key.removesuffix(end) in keys for end in _SPREAD)


def lines(table: EvidenceTable) -> Iterator[str]:
    """The table as aligned lines of plain text, the header first."""
    grid = [table.header, *table.rows]
    widths = [max(len(row[column]) for row in grid) for column in range(len(table.header))]
    for row in grid:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
