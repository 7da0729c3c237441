"""Asks the installed vLLM which names of tensors it reads, and where it skips others in silence.

Puts the release into read_names.json of moedoctor/diagnose/checkpoint, so that `lint` needs no vLLM. The
checkpoints are those of tests/checkpoint_headers.py. A made-up tensor is added below each module of one: if
the release starts all the same, it skips every name there that it does not know.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tables import ROOT, read_json, write_json

sys.path.append(str(ROOT / "tests"))

from checkpoint_headers import FUSED, SOUND, Built, write_headers

from moedoctor.diagnose.checkpoint.checkpoint import read_checkpoint
from moedoctor.diagnose.checkpoint.checks.names import TABLE
from moedoctor.diagnose.checkpoint.findings import Lint
from moedoctor.diagnose.preflight.ask import Question, Release, ask_release
from moedoctor.diagnose.preflight.command import ServeCommand
from moedoctor.diagnose.preflight.model import read_headers
from moedoctor.diagnose.preflight.records import Verdict
from moedoctor.models.tensor_names import name_pattern

QUESTION = Question((9, 0), 80 << 30, 8, seconds=3600)
_OTHER = "moedoctor_other"
Row = dict[str, Any]


def list_places(built: Built, *, every: bool) -> Iterator[tuple[str, str]]:
    """Yield (pattern of a module, name of a made-up tensor below it), without `every` for experts alone."""
    places = set()
    for name in built.tensors:
        parts = name.split(".")[:-1]
        for size in range(1, len(parts) + 1):
            module = ".".join(parts[:size])
            pattern = name_pattern(module)
            if pattern not in places and (every or "expert" in pattern):
                places.add(pattern)
                tail = "" if size == len(parts) else ".weight"
                yield pattern, f"{module}.{_OTHER}{tail}"


def ask_rows() -> tuple[str, list[Row]]:
    """Return (release, rows): for each checkpoint, the modules below which any other name is skipped."""
    with tempfile.TemporaryDirectory() as scratch:
        commands, headers, asked = [], {}, []
        for name, build in {**SOUND, **FUSED}.items():
            built = build()
            row = describe(built, write_headers(Path(scratch, name), built))
            made = {"": built}
            for pattern, other in list_places(built, every=name.endswith("bf16")):
                made[pattern] = built.add(**{other: ("BF16", (8, 8))})
            for pattern, each in made.items():
                folder = write_headers(Path(scratch, str(len(commands))), each)
                headers |= read_headers(folder)
                commands.append(ServeCommand((str(folder), "--max-model-len", "512"), {}))
                asked.append((row, pattern))
        answers = ask_release(Release("installed"), commands, QUESTION, headers)
    rows: list[Row] = []
    for (row, pattern), answer in zip(asked, answers, strict=True):
        starts = answer.verdict is Verdict.STARTS
        if pattern == "" and starts:
            rows.append(row)
        elif row in rows[-1:]:
            row["silent" if starts else "loud"].append(pattern)
    return answers[0].release, [finish(row) for row in rows if row["silent"]]


def describe(built: Built, folder: Path) -> Row:
    """Return the row of a checkpoint, before a release was asked."""
    return {
        "architecture": built.config["architectures"][0],
        "quantization": Lint(read_checkpoint(folder)).scheme,
        "silent": [],
        "loud": [],
        "read": sorted({name_pattern(name) for name in built.tensors}),
    }


def finish(row: Row) -> Row:
    """Keep the outermost silent modules, the modules below them that are not silent, and the names there."""
    outer = [
        each for each in row["silent"] if not any(each.startswith(f"{other}.") for other in row["silent"])
    ]
    below = tuple(f"{each}." for each in outer)
    kept = {key: sorted(name for name in row[key] if name.startswith(below)) for key in ("loud", "read")}
    return {**row, "silent": sorted(outer), **kept}


def merge_rows(stored: list[Row], release: str, rows: list[Row]) -> list[Row]:
    """Return the stored rows with those of a release in place of what it had; equal rows become one."""
    merged: dict[str, Row] = {}
    kept = [{**row, "releases": [each for each in row["releases"] if each != release]} for row in stored]
    for row in [*kept, *({**row, "releases": [release]} for row in rows)]:
        key = json.dumps({**row, "releases": None})
        releases = {*merged.get(key, row)["releases"], *row["releases"]}
        if releases:
            order = sorted(releases, key=lambda each: [int(part) for part in each.split(".")])
            merged[key] = {**row, "releases": order}
    return sorted(merged.values(), key=lambda row: (row["architecture"], row["quantization"], row["read"]))


if __name__ == "__main__":
    asked, own = ask_rows()
    write_json(TABLE, merge_rows(read_json(TABLE), asked, own), levels=1)
