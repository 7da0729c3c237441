"""Compares tensors' names with what vLLM releases read, by a table, so that no vLLM is needed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from moedoctor.diagnose.checkpoint.findings import Lint
from moedoctor.models.tensor_names import name_pattern

TABLE = Path(__file__).parent.parent / "read_names.json"
"""Made by `make release`: a row for each architecture, quantization and layout that some releases read.

Below a ``silent`` module they skip every tensor whose name is not in ``read``; a ``loud`` module stops them.
"""
_EXPERT = ".experts."
_OPTIONAL = ("g_idx", "zero_point", "_scale_float")
"""The ends of names that a checkpoint may lack."""
Row = Mapping[str, Any]


@cache
def load_rows() -> tuple[Row, ...]:
    return tuple(json.loads(TABLE.read_text(encoding="utf-8")))


def check_read(checked: Lint) -> None:
    """Find tensors that a release skips in silence while it lacks others in their place."""
    given = checked.checkpoint.config.value.get("architectures")
    names = given if isinstance(given, list) else []
    of_model = [row for row in load_rows() if row["architecture"] in names]
    rows = [row for row in of_model if row["quantization"] == checked.scheme]
    releases = {release for row in rows for release in row["releases"]}
    checked.names_of = tuple(sorted(releases, key=lambda text: [int(part) for part in text.split(".")]))
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for name in checked.checkpoint.tensors if rows else ():
        by_pattern[name_pattern(name)].append(name)
    skipped: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for release in checked.names_of:
        others = [row for row in of_model if release in row["releases"]]
        own = [row for row in others if row in rows]
        for name, lacks in _list_skipped(own, others, by_pattern):
            skipped[name].append((release, lacks))
    for name, by_release in skipped.items():
        last, lacks = by_release[-1]
        check = "name_skipped" if last == checked.names_of[-1] else "name_skipped_before"
        value = f"{', '.join(release for release, _ in by_release)}: not read, and {lacks} is missing"
        checked.add(check, name, checked.checkpoint.tensors[name].shard, value)
        if check == "name_skipped":  # it says the same, and how sure that is
            checked.drop("expert_names_unknown")
    experts = {each for row in of_model for each in row["read"] if _EXPERT in each}
    if not skipped and rows and experts and experts.isdisjoint(by_pattern):
        for name in [name for pattern, alike in by_pattern.items() if _EXPERT in pattern for name in alike]:
            shard = checked.checkpoint.tensors[name].shard
            lacks = min(each for row in rows for each in row["read"] if _EXPERT in each)
            checked.add("expert_names_unknown", name, shard, f"{lacks} is missing")


def _list_skipped(
    rows: Sequence[Row], others: Sequence[Row], by_pattern: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Yield (tensor, pattern of a tensor that is missing) for what one release skips.

    `others` are the rows of all formats: a layout that the release reads in one may be read in this one, too.
    """
    silent = {each for row in rows for each in row["silent"]}
    modules = silent | {each for row in rows for each in row["loud"]}
    read = {each for row in rows for each in row["read"]}
    elsewhere = {each for row in others for each in row["read"]}
    unclear = tuple(f"{each}_" for each in elsewhere if not any(own.startswith(each) for own in read))

    @cache
    def find_owners(pattern: str, size: int) -> frozenset[str]:
        return frozenset(_begin(name, size) for name in by_pattern.get(pattern, ()))

    for pattern, names in by_pattern.items():
        parts = pattern.split(".")
        inside = (".".join(parts[:size]) for size in range(len(parts) - 1, 0, -1))
        module = next((each for each in inside if each in modules), None)
        if pattern in read or f"{pattern}_".startswith(unclear) or module not in silent:
            continue
        # Another expert or layer has no say in what this one lacks.
        own = len(parts) - parts[::-1].index("N") if "N" in parts else 0
        below = max(f"{module}.", "".join(f"{part}." for part in parts[:own]), key=len)
        layouts = [
            [each for each in row["read"] if each.startswith(below) and not each.endswith(_OPTIONAL)]
            for row in rows
        ]
        for name in names:
            place = _begin(name, own)
            lacks = [[each for each in row if place not in find_owners(each, own)] for row in layouts if row]
            if lacks and all(lacks):
                yield name, lacks[0][0]


def _begin(name: str, size: int) -> str:
    return ".".join(name.split(".")[:size])
