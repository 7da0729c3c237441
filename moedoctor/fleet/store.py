"""The folder of answers, a file a node, written as they come: nothing is lost if the driver dies."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moedoctor.fleet.node import MOST_BYTES
from moedoctor.fleet.rows import Place, Row, Status, from_document, make_failed_row, to_document
from moedoctor.processes import files
from moedoctor.results import SCHEMA_VERSION, ReportError, read_json, to_json

QUESTION = "question.json"
_MOST_FILES = 100_000


class StoreError(ValueError):
    """A folder that cannot be used; one line says why."""


@dataclass(frozen=True)
class Store:
    """One folder of answers to one question."""

    folder: Path
    show_hosts: bool = False

    @classmethod
    def create(cls, folder: Path, question: Mapping[str, Any], *, show_hosts: bool = False) -> Store:
        """Make the folder for a new question. Raises StoreError if it holds answers already."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise StoreError(f"{folder}: is not empty; continue it with --resume, or name a new folder")
            document = {"schema_version": SCHEMA_VERSION, "command": "fleet question", **question}
            files.write(folder / QUESTION, to_json(document))
        except OSError as error:
            raise StoreError(f"{folder}: cannot be written: {error.strerror or error}") from None
        return cls(folder, show_hosts)

    @classmethod
    def resume(cls, folder: Path, question: Mapping[str, Any], *, show_hosts: bool = False) -> Store:
        """Open the folder of an earlier run. Raises StoreError if it was about another question."""
        try:
            before = read_json(folder / QUESTION, MOST_BYTES)
        except ReportError as error:
            raise StoreError(f"--resume: {error}") from None
        asked = before.get("question") if isinstance(before, dict) else None
        if asked != question.get("question"):
            was = " ".join(map(str, asked)) if isinstance(asked, list) else "something else"
            raise StoreError(f"--resume {folder}: its question was `fleet {was}`; expected the same one")
        return cls(folder, show_hosts)

    def write(self, row: Row) -> Row:
        """Write the row and return it with its file. Raises OutputError if the disk is full."""
        name = _name_file(row.place)
        document = to_document(row)
        if self.show_hosts:
            document["host"] = row.place.host
        files.write(self.folder / name, to_json(document))
        return replace(row, file=name)

    def read_rows(self, hosts: Mapping[str, str]) -> list[Row]:
        """Return the rows of nodes that answered; `hosts` is node -> name, of the nodes that Ray lists.

        Every other node is asked again, also if only one of its GPUs gave no answer: what is stored of why
        not is removed.
        """
        nodes: dict[str, list[Row]] = defaultdict(list)
        for row in read_folder(self.folder, hosts):
            nodes[row.place.node].append(row)
        kept = []
        for rows in nodes.values():
            silent = [row for row in rows if row.status is not Status.ANSWERED]
            kept += [] if silent else rows
            for row in silent:
                if row.file == _name_file(row.place):  # a file that is ours
                    (self.folder / row.file).unlink(missing_ok=True)
        return kept


def read_folder(folder: Path, hosts: Mapping[str, str] | None = None) -> Iterator[Row]:
    """Give a row for each JSON file in `folder`: an answer as `Store` writes it, or a plain report.

    A host is named by the file's ``host``, by `hosts`, or as the file is. Raises StoreError for a folder that
    cannot be read; a file that cannot be used is a row that says why.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json") and name != QUESTION)
    except OSError as error:
        raise StoreError(f"{folder}: {error.strerror or error}; expected a folder of JSON files") from None
    if len(names) > _MOST_FILES:
        raise StoreError(f"{folder}: holds {len(names)} files; expected at most {_MOST_FILES}")
    for name in names:
        stem = name.removesuffix(".json")
        try:
            data = read_json(folder / name, MOST_BYTES)
            if not isinstance(data, dict):
                raise ReportError(name, "expected a JSON object")
            node = str(data.get("node", ""))
            host = data.get("host") or (hosts or {}).get(node) or stem
            yield from_document(data, str(host), name)
        except (ReportError, RecursionError) as error:
            reason = str(error).removeprefix(f"{folder}{os.sep}")
            yield replace(make_failed_row(Place(stem, stem), Status.UNREADABLE, reason), file=name)


def _name_file(place: Place) -> str:
    """Return a file name from ids that may hold anything."""
    key = json.dumps([place.node, place.gpu])
    return f"node-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
