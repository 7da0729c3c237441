"""The catalogue in words, one Markdown file a known failure. Imports no torch and loads no fault."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from moedoctor.entries.entry import Entry, parse_entry
from moedoctor.text import TextFileError, check_printable, read_text

FOLDER = Path(__file__).resolve().parent
MAX_BYTES = 64 * 1024


class EntryError(Exception):
    """An entry file of moedoctor's own that is wrong; `str()` is one line, ``file:line: what is wrong``."""


@functools.cache
def entries() -> Mapping[str, Entry]:
    """Id -> entry, in the order of the ids. Raises EntryError where a file is wrong."""
    found = [load_entry(path) for path in sorted(FOLDER.glob("*.md"))]
    return {entry.id: entry for entry in found}


def load_entry(path: Path) -> Entry:
    """The entry in the file at `path`, which must be called by its id. Raises EntryError."""
    try:
        text = read_text(path, MAX_BYTES)
        check_printable(text)
        entry = parse_entry(text)
        if path.stem != entry.id:
            raise TextFileError(2, f"id {entry.id}, expected {path.stem} as in the file's name")
    except TextFileError as error:
        raise EntryError(f"entries/{path.name}:{error.line}: {error.message}") from None
    return entry


def find_entry(text: str) -> Entry | None:
    """The entry with this id or name, in any case and with ``-`` for ``_``."""
    wanted = text.strip().lower().replace("-", "_")
    return next((one for one in entries().values() if wanted in (one.id.lower(), one.name)), None)
