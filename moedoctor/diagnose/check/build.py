"""The vLLM that is checked, if it is no known release or was changed: then its source is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moedoctor.entries import load_entries
from moedoctor.entries.entry import Entry
from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.upstream.releases.questions import ENVS, Inquiry, Reading, load_answers
from moedoctor.upstream.releases.release_source import ReleaseSource


@dataclass(frozen=True)
class Build:
    """The answers of the source of a vLLM. Empty for a known release whose source is as it was released."""

    readings: Mapping[str, Reading] = field(default_factory=dict)
    """Entry -> what was read, for the entries whose answer the version does not give."""
    known: bool = True
    """True if the version is that of a known release."""
    variables: frozenset[str] | None = None
    """The variables that envs.py declares, if the version is not known; None if they cannot be read."""
    unknown: tuple[str, ...] = ()
    """What is not known for this build, each with the reason."""

    def find_release(self, id: str) -> str | None:
        """Return the known release that this build is like for an entry; None to go by its version."""
        return self.readings[id].release if id in self.readings else None

    @property
    def answers(self) -> tuple[str, ...]:
        """The answers that were read, a line for each entry."""
        names = {entry.id: entry.name for entry in load_entries().values()}
        return tuple(
            f"{id} {names[id]}: as in {reading.release}: "
            + ", ".join(f"{name} {each.value} ({each.where})" for name, each in reading.answers.items())
            for id, reading in self.readings.items()
            if reading.release is not None
        )


def inspect_build(version: str | None, source: ReleaseSource | None) -> Build:
    """Return what the source of vLLM `version` says; `source` is None if none of it is here."""
    release = (version or "").partition("+")[0]
    known = version is None or release in load_releases()
    inquiry = None if source is None else Inquiry(source)
    if inquiry is not None and isinstance(inquiry.parse(ENVS), str):
        inquiry = None
    if inquiry is None and known:
        return Build()
    entries = load_entries().values()
    asked = [each for each in entries if any(question.decides for question in each.questions)]
    readings = {each.id: inquiry.read(each) for each in asked if inquiry}
    if known:
        readings = {
            id: reading for id, reading in readings.items() if not _is_as_released(id, reading, release)
        }
    variables = inquiry.list_variables() if inquiry and not known else None
    build = Build(readings, known, variables)
    unknown = [f"{each.id} {each.name}: {why}" for each in entries for why in _explain_unknown(each, build)]
    return Build(readings, known, variables, tuple(unknown))


def _is_as_released(id: str, reading: Reading, release: str) -> bool:
    stored = load_answers()
    return all(answer.value == stored[f"{id}.{name}"][release] for name, answer in reading.answers.items())


def _explain_unknown(entry: Entry, build: Build) -> Iterator[str]:
    """Give the reason that an entry about releases of vLLM is not known for a build, if it is not."""
    if all(affected.package != "vllm" for affected in entry.releases):
        return
    if entry.id in build.readings:
        if build.readings[entry.id].release is None:
            yield build.readings[entry.id].where
    elif not build.known and entry.unread:
        yield entry.unread
    elif not build.known and entry.questions:
        yield "the source of this vLLM is not here"
    elif not build.known and build.variables is None:
        yield f"the variables of {ENVS} cannot be read"
