"""The fixes and traces that the plug-in offers, and the vLLM releases that each is made for.

`moedoctor check` and the table in the docs read this too, so it imports neither vllm nor torch. Each
extension also checks vLLM's code when it is applied, and may refuse a release that is listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from packaging.specifiers import SpecifierSet

ALL = "all"
"""In place of names: everything that applies to this release, but `Extension.by_name_only`."""


class Need(Enum):
    """What a release has to do with an extension."""

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
    """Why it refuses other releases."""
    unneeded: str = "<0"
    """The releases that do not need it."""
    reason_unneeded: str = ""
    by_name_only: bool = False
    """Whether ``all`` leaves it out."""

    def need(self, version: str) -> tuple[Need, str]:
        """Return whether it is made for a release, and the reason if it is not."""
        if version in SpecifierSet(self.unneeded, prereleases=True):
            return Need.UNNEEDED, self.reason_unneeded
        if version not in SpecifierSet(self.releases, prereleases=True):
            return Need.REFUSED, self.refusal
        return Need.MADE_FOR, ""


FIXES: Mapping[str, Extension] = {
    "backend": Extension("moedoctor.upstream.plugin.backend_fix"),
    "expert_cache": Extension(
        "moedoctor.upstream.plugin.expert_cache_fix",
        releases=">=0.21.0,!=0.22.*,!=0.23.*,!=0.24.*,!=0.25.*,!=0.26.*,!=0.27.0",
        refusal="the expert cache was made for vLLM 0.21.0, and for 0.27.1 and later",
    ),
    "moe": Extension(
        "moedoctor.upstream.plugin.moe_fix",
        releases=">=0.21.0",
        refusal="made for vLLM 0.21.0 and later, whose MoE methods own their kernel",
        by_name_only=True,
    ),
    "offload": Extension("moedoctor.upstream.plugin.offload_fix"),
    "routing": Extension(
        "moedoctor.upstream.plugin.routing_fix",
        unneeded=">=0.20.0",
        reason_unneeded="0.20.0 and later route NaN rows to distinct experts",
    ),
}
TRACES: Mapping[str, Extension] = {
    "nan": Extension(
        "moedoctor.upstream.plugin.nan_trace",
        releases=">=0.21.0",
        refusal="made for vLLM 0.21.0 and later, whose MoE layers call router and experts in one function",
    ),
}


@dataclass(frozen=True)
class Chosen:
    """What a variable asks for."""

    names: tuple[str, ...]
    """What is to be applied, in order."""
    required: frozenset[str]
    """Those of them that were asked for by name; the others may be left out."""
    unknown: tuple[str, ...]


def chosen(value: str, table: Mapping[str, Extension] = FIXES) -> Chosen:
    """Read a variable's `value`: names of `table` with commas between, or ``all``."""
    asked = list(dict.fromkeys(part.strip().lower() for part in value.split(",") if part.strip()))
    known = tuple(name for name in asked if name in table)
    unknown = tuple(name for name in asked if name not in (*table, ALL))
    every = tuple(name for name in table if name in known or not table[name].by_name_only)
    return Chosen(every if ALL in asked else known, frozenset(known), unknown)
