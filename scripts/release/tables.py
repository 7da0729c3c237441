"""Tables of all releases: a row holds for a run of releases in which its facts are the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
ROOT = Path(__file__).resolve().parents[2]


def replace_rows(
    stored: Iterable[Row], release: str, rows: Iterable[Row], releases: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the stored rows with `rows` in place of what `release` had.

    `releases` are all of the table, oldest first.
    """
    return merge_rows({**spread_rows(stored, releases), release: list(rows)})


def spread_rows(stored: Iterable[Row], releases: Sequence[str]) -> dict[str, list[Row]]:
    """Return the rows of each release."""
    given: dict[str, list[Row]] = {name: [] for name in releases}
    for row in stored:
        first, _, last = row["releases"].partition("-")
        facts = {key: value for key, value in row.items() if key != "releases"}
        for name in releases[releases.index(first) : releases.index(last or first) + 1]:
            given[name].append(facts)
    return given


def merge_rows(given: Mapping[str, Iterable[Row]]) -> list[dict[str, Any]]:
    """Return one row for each run of releases in which its facts are the same.

    Its source, and the file of MoE code that reads it, are those of the first release.
    """
    releases = list(given)
    runs: dict[str, list[Any]] = {}
    done: list[list[Any]] = []
    for place, rows in enumerate(given.values()):
        for row in rows:
            known = {key: value for key, value in row.items() if key not in ("source", "moe")}
            facts = json.dumps({**known, "moe": "moe" in row})
            run = runs.get(facts)
            if run is None or place > run[1] + 1:
                run = runs[facts] = [releases[place], place, row]
                done.append(run)
            run[1] = place
    return [
        {"releases": first if first == releases[last] else f"{first}-{releases[last]}", **row}
        for first, last, row in done
    ]


def write_json(file: Path, document: Any, levels: int = 2) -> None:
    """Write JSON in which everything below some levels is one line."""
    file.write_text("".join(_lay_out(document, levels, "\n")) + "\n", encoding="utf-8")


def _lay_out(document: Any, levels: int, newline: str) -> Iterator[str]:
    if not levels or not document or not isinstance(document, dict | list):
        yield json.dumps(document, ensure_ascii=False)
        return
    is_dict, inner = isinstance(document, dict), f"{newline} "
    yield "{" if is_dict else "["
    for number, item in enumerate(document.items() if is_dict else document):
        yield f"{',' if number else ''}{inner}"
        if is_dict:
            yield f"{json.dumps(item[0], ensure_ascii=False)}: "
        yield from _lay_out(item[1] if is_dict else item, levels - 1, inner)
    yield f"{newline}{'}' if is_dict else ']'}"


def read_json(file: Path) -> Any:
    """Return a stored table."""
    return json.loads(file.read_text(encoding="utf-8"))


def sort_releases(row: Mapping[str, Any], releases: Sequence[str]) -> dict[str, Any]:
    """Return what is known of each release, oldest first."""
    return {name: row[name] for name in releases if name in row}
