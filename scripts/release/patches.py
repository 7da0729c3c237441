"""The functions that the plug-in's fixes and traces change or rely on in one release, with their hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import ROOT, read_json, sort_releases, write_json

from moedoctor.plugin.known_code import Code, load_table

CODE = ROOT / "moedoctor" / "plugin" / "known_code.json"
SOURCES = ROOT / "evidence" / "plugin_sources.json"


def write_patches(folder: Path, answers: Mapping[str, Mapping[str, Any]], releases: Sequence[str]) -> None:
    """Put what `moedoctor.plugin.sources` says of the release in `folder` into both tables.

    A function that is not found in the source has no hash, so that it is never taken as the same.
    """
    load_table.cache_clear()
    release, code = folder.name, Code(lambda file: (folder / file).read_text(encoding="utf-8"))
    needs, functions = (dict(load_table()[key]) for key in ("needs", "functions"))
    for name, row in answers.items():
        needs[name] = {key: value for key, value in needs.get(name, {}).items() if key != release}
        if "patches" in row:
            needs[name][release] = list(dict.fromkeys(row["patches"]))
    names = sorted({name for rows in needs.values() for each in rows.values() for name in each})
    hashes = {name: dict(functions.get(name, {})) for name in names}
    for name in names:
        asked = any(name in row.get("patches", ()) for row in answers.values())
        hashes[name][release] = code.hash(name) if asked else None
    kept = {name: {key: value for key, value in row.items() if value} for name, row in hashes.items()}
    numbers = {
        name: {each: [names.index(function) for function in rows[each]] for each in releases if each in rows}
        for name, rows in needs.items()
    }
    ordered = {name: sort_releases(row, releases) for name, row in kept.items()}
    write_json(CODE, {"functions": ordered, "needs": numbers})
    bases = {name: {key: row[key] for key in row if key != "patches"} for name, row in answers.items()}
    write_json(SOURCES, sort_releases({**read_json(SOURCES), release: bases}, releases))
