"""The catalogue of entries that moedoctor ships, and the folders of scenarios and reports.

An entry is one Markdown file for a known failure. Nothing here imports torch or loads a fault.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from moedoctor.entries.entry import Entry, parse_entry
from moedoctor.text import TextFileError, read_text

FOLDER = Path(__file__).resolve().parent
_PACKAGE = FOLDER.parent
MAX_BYTES = 64 * 1024


class EntryError(Exception):
    """An entry file of moedoctor's own that is wrong; `str()` is one line, ``file:line: what is wrong``."""


@functools.cache
def load_entries() -> Mapping[str, Entry]:
    """Return the entries by id, in the order of the ids. Raises EntryError if a file is wrong."""
    return {entry.id: entry for entry in map(load_entry, sorted(FOLDER.glob("*.md")))}


def load_entry(path: Path) -> Entry:
    """Return the entry in the file at `path`, whose name must be its id. Raises EntryError."""
    try:
        entry = parse_entry(read_text(path, MAX_BYTES))
        if path.stem != entry.id:
            raise TextFileError(2, f"id {entry.id}, expected {path.stem} as in the file's name")
    except TextFileError as error:
        raise EntryError(f"entries/{path.name}:{error.line}: {error.message}") from None
    return entry


def find_entry(text: str) -> Entry | None:
    """Return the entry with this id or name, in any case and with ``-`` for ``_``, or None."""
    key = text.strip().lower().replace("-", "_")
    return next((entry for entry in load_entries().values() if key in (entry.id.lower(), entry.name)), None)


def find_builtin_folder() -> Path:
    """Return the folder of the built-in scenarios, one YAML file for each known failure, and `schema.json`.

    Raises FileNotFoundError, which names both places, if it is neither in the wheel nor in a checkout.
    """
    places = _list_places("scenarios")
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise FileNotFoundError(
            f"built-in scenarios: neither {places[0]} nor {places[1]} is a folder; install moedoctor again"
        )
    return folder


def find_reports_folder() -> Path:
    """Return the folder of the shipped reports, with a folder for each machine. It may be missing."""
    packaged, checkout = _list_places("reports")
    return packaged if packaged.is_dir() else checkout


def _list_places(name: str) -> tuple[Path, Path]:
    """Return the two places of a top-level folder of the repository.

    A wheel ships it inside the package; an editable install and a checkout have it beside the package.
    """
    return _PACKAGE / f"_{name}", _PACKAGE.parent / name
