"""The fixes and traces that the plug-in offers, and the vLLM releases that each is made for.

`moedoctor check` and the table in the docs read this too, so it imports neither vllm nor torch. Each
extension also checks vLLM's code when it is applied, and may refuse a release that is listed here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.resources import files

from packaging.specifiers import SpecifierSet

ALL = "all"
"""In place of names: everything that applies to this release, but `Extension.by_name_only`."""


class Need(Enum):
    """The need of a release for an extension."""

    MADE_FOR = "made for"
    UNNEEDED = "not needed"
    REFUSED = "refused"


@dataclass(frozen=True)
class Extension:
    """A fix or a trace."""

    module: str
    """It has ``apply(version: str) -> str``, which returns one line that says what is active."""
    releases: str = ""
    """The releases that it is made for, such as ``>=0.21.0``; empty for all that we know."""
    refusal: str = ""
    """The reason why it refuses other releases."""
    unneeded: str = "<0"
    """The releases that do not need it."""
    reason_unneeded: str = ""
    by_name_only: bool = False
    """True if ``all`` leaves it out."""
    example: Mapping[str, str] = field(default_factory=dict)
    """Variables that it needs besides its name."""

    def need(self, version: str) -> tuple[Need, str]:
        """Return whether it is made for a release, and the reason if it is not."""
        if version in SpecifierSet(self.unneeded, prereleases=True):
            return Need.UNNEEDED, self.reason_unneeded
        if version not in SpecifierSet(self.releases, prereleases=True):
            return Need.REFUSED, self.refusal
        return Need.MADE_FOR, ""


FIXES: Mapping[str, Extension] = {
    "backend": Extension("moedoctor.plugin.backend_fix"),
    "expert_cache": Extension(
        "moedoctor.plugin.expert_cache_fix",
        releases=">=0.21.0,!=0.22.*,!=0.23.*,!=0.24.*,!=0.25.*,!=0.26.*,!=0.27.0",
        refusal="the expert cache was made for vLLM 0.21.0, and for 0.27.1 and later",
        example={"MOEDOCTOR_EXPERT_CACHE": "8"},
    ),
    "moe": Extension(
        "moedoctor.plugin.moe_fix",
        releases=">=0.21.0",
        refusal="made for vLLM 0.21.0 and later, whose MoE methods own their kernel",
        by_name_only=True,
    ),
    "offload": Extension("moedoctor.plugin.offload_fix"),
    "routing": Extension(
        "moedoctor.plugin.routing_fix",
        unneeded=">=0.20.0",
        reason_unneeded="0.20.0 and later route NaN rows to distinct experts",
    ),
}
TRACES: Mapping[str, Extension] = {
    "nan": Extension(
        "moedoctor.plugin.nan_trace",
        releases=">=0.21.0",
        refusal="made for vLLM 0.21.0 and later, whose MoE layers call router and experts in one function",
    ),
    "record": Extension(
        "moedoctor.plugin.record",
        releases=">=0.21.0",
        refusal="made for vLLM 0.21.0 and later, whose MoE layers call router and experts in one function",
        by_name_only=True,
        example={"MOEDOCTOR_RECORD": "capsules"},
    ),
}


@dataclass(frozen=True)
class Chosen:
    """The extensions that a variable asks for."""

    names: tuple[str, ...]
    """The extensions to apply, in order."""
    required: frozenset[str]
    """Those of them that were asked for by name; the others may be left out."""
    unknown: tuple[str, ...]


def read_choice(value: str, table: Mapping[str, Extension] = FIXES) -> Chosen:
    """Read a variable's `value`: names of `table` with commas between, or ``all``."""
    asked = list(dict.fromkeys(part.strip().lower() for part in value.split(",") if part.strip()))
    known = tuple(name for name in asked if name in table)
    unknown = tuple(name for name in asked if name not in (*table, ALL))
    every = tuple(name for name in table if name in known or not table[name].by_name_only)
    return Chosen(every if ALL in asked else known, frozenset(known), unknown)


class Basis(Enum):
    """The evidence for an extension in a release."""

    RAN = "ran in an engine"
    READ = "source checked"
    """Its patches fit the release's Python source; no engine of that release ran with it."""
    UNNEEDED = "not needed"
    REFUSED = "refused"


@dataclass(frozen=True)
class Known:
    """An extension in a release, as stored reports and checks of the source show it."""

    basis: Basis
    reports: tuple[str, ...] = ()
    """Stored reports of engines, below ``reports/``."""
    reason: str = ""
    """The reason why it is refused or not needed."""


@functools.cache
def load_evidence() -> Mapping[str, Mapping[str, Known]]:
    """Return what is known: release -> name of an extension. `make readme` makes the data."""
    text = files(__package__).joinpath("evidence.json").read_text(encoding="utf-8")
    return {
        release: {
            name: Known(Basis(row["basis"]), tuple(row.get("reports", ())), row.get("reason", ""))
            for name, row in rows.items()
        }
        for release, rows in json.loads(text).items()
    }
