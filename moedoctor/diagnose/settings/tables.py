"""Which settings each release has: the tables of `data` as records.

Made by `scripts/extract_settings.py` from the releases' own sources; every row names its file and line.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Setting:
    """One variable or flag, as it is over a span of releases."""

    name: str
    first: str
    """The first release that has it so."""
    last: str
    kind: str
    """What a variable makes of its value: switch, number, decimal, choice, choices, words, text, special,
    elsewhere."""
    choices: tuple[str, ...]
    case_sensitive: bool
    on: tuple[str, ...]
    """The words that count as on, for `words`; every other one counts as off."""
    off: tuple[str, ...]
    """The words that count as off, for `words` where every other one counts as on."""
    deprecated: bool
    source: str


@dataclass(frozen=True)
class Settings:
    """All settings of one kind, over all releases."""

    releases: tuple[str, ...]
    """Oldest first."""
    rows: Mapping[str, tuple[Setting, ...]]
    """Name -> its spans, oldest first."""

    def at(self, release: str) -> Mapping[str, Setting]:
        """Name -> setting, for the ones that this release has."""
        place = self.releases.index(release)
        found = {}
        for name, spans in self.rows.items():
            for one in spans:
                if self.releases.index(one.first) <= place <= self.releases.index(one.last):
                    found[name] = one
        return found

    def after(self, release: str) -> str:
        """The release after `release`; itself for the newest."""
        return self.releases[min(self.releases.index(release) + 1, len(self.releases) - 1)]

    def at_or_before(self, version: str) -> str | None:
        """The newest release of the table that is not newer than `version`; None for an older one, and for
        text that is no version."""
        try:
            wanted = Version(version.partition("+")[0])
        except InvalidVersion:
            return None
        known = [one for one in self.releases if Version(one) <= wanted]
        return known[-1] if known else None


@functools.cache
def vllm_variables() -> Settings:
    """The ``VLLM_*`` variables."""
    return _load("vllm_variables.json")


@functools.cache
def flashinfer_variables() -> Settings:
    """The ``FLASHINFER_*`` variables, by release of flashinfer-python."""
    return _load("flashinfer_variables.json")


@functools.cache
def vllm_flags() -> Settings:
    """The flags of `vllm serve`."""
    return _load("vllm_flags.json")


def _load(name: str) -> Settings:
    folder = files("moedoctor.diagnose.settings") / "data"
    table = json.loads((folder / name).read_text(encoding="utf-8"))
    rows: dict[str, list[Setting]] = {}
    for row in table["rows"]:
        rows.setdefault(row["name"], []).append(_setting(row))
    return Settings(tuple(table["releases"]), {setting: tuple(spans) for setting, spans in rows.items()})


def _setting(row: Mapping[str, Any]) -> Setting:
    first, _, last = row["releases"].partition("-")
    return Setting(
        name=row["name"],
        first=first,
        last=last or first,
        kind=row.get("kind", "text"),
        choices=tuple(row.get("choices", ())),
        case_sensitive=row.get("case_sensitive", True),
        on=tuple(row.get("on", ())),
        off=tuple(row.get("off", ())),
        deprecated=bool(row.get("deprecated")),
        source=row["source"],
    )
