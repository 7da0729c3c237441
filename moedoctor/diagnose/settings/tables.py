"""The settings of each release: the tables of `data` as records.

`make release` makes them from the releases' own sources; every row names its file and line.
`replacements.json` is written by hand.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from packaging.version import InvalidVersion, Version

from moedoctor.fixes.backends.release_tables import load_releases


@dataclass(frozen=True)
class SettingFinding:
    """One setting that is not what it seems."""

    setting: str
    """As it was given: ``VLLM_MXFP4_USE_MARLIN=1`` or ``--moe-backend banana``."""
    problem: str
    """unknown, removed, not_yet, misspelt, wrong_case, invalid, silently_off, shadowed, ignored; or, if it
    does take effect, deprecated, other_layers or not_considered."""
    message: str
    instead: str | None
    """A setting that works in this release; None if there is none or the intention is not known."""
    source: str
    """File and line behind the message; empty for unknown settings."""
    takes_effect: bool = False
    stops: bool = False
    """True if vLLM itself stops with an error."""

    @property
    def name(self) -> str:
        """The variable or flag without its value: ``VLLM_MXFP4_USE_MARLIN``."""
        return re.split("[= ]", self.setting, maxsplit=1)[0]


@dataclass(frozen=True)
class Setting:
    """One variable or flag over a span of releases."""

    name: str
    first: str
    """The first release of the span."""
    last: str
    source: str
    kind: str = "text"
    """The type of a variable's value: switch, number, decimal, choice, choices, words, text, special,
    elsewhere."""
    choices: tuple[str, ...] = ()
    case_sensitive: bool = True
    on: tuple[str, ...] = ()
    """For `words`: the values that mean on; every other value means off."""
    off: tuple[str, ...] = ()
    """For `words`: the values that mean off, if every other value means on."""
    default: str = ""
    """The value that counts where a variable is not set; empty if the tables do not know it."""
    deprecated: bool = False
    of: str = ""
    """The flag that a short form such as ``-ep`` is another name of."""
    moe: str = ""
    """The file of MoE code that reads the variable; empty if none does."""


@dataclass(frozen=True)
class NewDefault:
    """Something that a release does by itself and the release before it does not."""

    since: str
    back: str
    """The setting that takes the old default back: ``VLLM_USE_V2_MODEL_RUNNER=0``."""
    says: str
    kinds: tuple[str, ...]
    """The classes of errors (`causes.yaml` of triage) that it may explain."""


@dataclass(frozen=True)
class Settings:
    """All settings of one kind, over all releases."""

    releases: tuple[str, ...]
    """Oldest first."""
    rows: Mapping[str, tuple[Setting, ...]]
    """Name -> its spans, oldest first."""

    def list_at(self, release: str) -> Mapping[str, Setting]:
        place = self.releases.index(release)
        return {
            name: span
            for name, spans in self.rows.items()
            for span in spans
            if self.releases.index(span.first) <= place <= self.releases.index(span.last)
        }

    def explain_absence(self, name: str, release: str) -> tuple[str, str, str] | None:
        """Return (``not_yet`` or ``removed``, the release with which it came or went, its source).

        Return None for a setting that no release has. The setting must not be in `release`.
        """
        spans, place = self.rows.get(name), self.releases.index
        if not spans:
            return None
        if place(spans[0].first) > place(release):
            return "not_yet", spans[0].first, spans[0].source
        last = min(place(spans[-1].last) + 1, len(self.releases) - 1)
        return "removed", self.releases[last], spans[-1].source

    def find_release(self, version: str) -> str | None:
        """Return the newest release of the table that is not newer than `version`.

        Return None for an older version and for text that is not a version.
        """
        try:
            newest = Version(version.partition("+")[0])
        except InvalidVersion:
            return None
        releases = [release for release in self.releases if Version(release) <= newest]
        return releases[-1] if releases else None


@functools.cache
def load_flashinfer_variables() -> Settings:
    """Return the ``FLASHINFER_*`` variables, for the releases of flashinfer-python that vLLM's require."""
    pins = dict.fromkeys(release.flashinfer for release in load_releases().values())
    return _load("flashinfer_variables.json", tuple(pins))


@functools.cache
def load_replacements() -> Mapping[str, Any]:
    """Return what to set instead of settings that are gone or never existed, and notes on some variables."""
    table: Mapping[str, Any] = _read("replacements.json")
    return table


def list_spans(flag: str, value: str = "") -> tuple[str, ...]:
    """Return the first and the last release with a flag, or with a value of it; nothing if none has it."""
    flags = load_vllm_flags().rows.get(flag, ())
    chosen = [span for span in flags if not value or value in span.choices]
    spans = load_vllm_values().rows.get(f"{flag} {value}") or chosen
    return (spans[0].first, spans[-1].last) if spans else ()


def list_new_defaults(before: str, after: str, words: str) -> Iterator[NewDefault]:
    """Yield the defaults that a later one of two known releases changed, but for those that `words` set.

    `words` are the model, flags and variables, as far as they are known. Of several changes that the same
    setting takes back, a model has the first that names it; a variable must still be read.
    """
    known = load_vllm_variables().list_at(after)
    place, settings = [*load_releases()].index, {name for name in re.split(r"[=\s]", words) if name}
    for row in load_replacements()["defaults"]:
        setting = re.split("[= ]", row["back"], maxsplit=1)[0]
        if setting not in settings and re.search(row.get("models", ""), words.lower()):
            settings.add(setting)
            read = setting in known or setting.startswith("-")
            elsewhere = re.search(row.get("unless", "(?!)"), words.lower())
            if read and not elsewhere and place(before) < place(row["since"]) <= place(after):
                yield NewDefault(row["since"], row["back"], row["says"], tuple(row["kinds"]))


@functools.cache
def _load(name: str, releases: tuple[str, ...] = ()) -> Settings:
    """Return the settings of a table, for all releases of vLLM or for others."""
    rows: dict[str, list[Setting]] = {}
    for row in _read(name)["rows"]:
        first, _, last = row["releases"].partition("-")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else str(value) if key == "default" else value
            for key, value in row.items()
            if key != "releases"
        }
        rows.setdefault(row["name"], []).append(Setting(first=first, last=last or first, **values))
    spans = {setting: tuple(spans) for setting, spans in rows.items()}
    return Settings(releases or tuple(load_releases()), spans)


load_vllm_variables, load_vllm_flags, load_vllm_values = (
    functools.partial(_load, f"vllm_{kind}.json") for kind in ("variables", "flags", "values")
)
"""Return the settings of vLLM; the values are those of flags that have names, as ``--tool-call-parser x``."""


def _read(name: str) -> Any:
    folder = files("moedoctor.diagnose.settings") / "data"
    return json.loads((folder / name).read_text(encoding="utf-8"))
