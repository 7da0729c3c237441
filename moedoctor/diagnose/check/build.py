"""Asks the source of the vLLM and FlashInfer that are checked, if their versions do not tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from moedoctor.entries import load_entries
from moedoctor.entries.entry import PACKAGES, Entry
from moedoctor.fixes.arch.flashinfer import list_releases
from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.upstream.releases.questions import ENVS, Inquiry, Reading, load_answers
from moedoctor.upstream.releases.release_source import ReleaseSource

ASKED = {"vllm": ENVS, "flashinfer": "flashinfer/__init__.py"}
"""Package -> a file that its source must have to be asked."""


@dataclass(frozen=True)
class Build:
    """The answers of the sources. Empty for known releases whose source is as it was released."""

    readings: Mapping[str, Reading] = field(default_factory=dict)
    """Entry -> what was read, for the entries whose answer the version does not give."""
    known: frozenset[str] = frozenset(ASKED)
    """The packages whose version is that of a known release."""
    variables: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    """Package that is not known -> the variables that it declares; None if they cannot be read."""
    unknown: tuple[str, ...] = ()
    """Facts that are not known for this build, each with the reason."""

    def find_release(self, id: str) -> str | None:
        """Return the known release that this build is like for an entry; None to go by its version."""
        return self.readings[id].release if id in self.readings else None

    @property
    def answers(self) -> tuple[str, ...]:
        """The answers that were read, a line for each entry."""
        names = {entry.id: entry.name for entry in load_entries().values()}
        return tuple(
            f"{id} {names[id]}: as in {'' if reading.package == 'vllm' else 'FlashInfer '}{reading.release}: "
            + ", ".join(f"{name} {each.value} ({each.where})" for name, each in reading.answers.items())
            for id, reading in self.readings.items()
            if reading.release is not None
        )


def inspect_build(
    versions: Mapping[str, str | None],
    find_source: Callable[[str], ReleaseSource | None],
    environ: Iterable[str] = (),
) -> Build:
    """Return what the sources of vLLM and FlashInfer say.

    `versions` are those of both packages, None if one is absent; `find_source` gives None if none of its
    source is here; `environ` are the names of the variables that are set.
    """
    releases = {"vllm": list(load_releases()), "flashinfer": list_releases()}
    names = {package: (versions[package] or "").partition("+")[0] for package in ASKED}
    known = frozenset(package for package in ASKED if names[package] in ("", *releases[package]))
    sources = {package: find_source(package) for package in ASKED}
    inquiries = {package: Inquiry(source) for package, source in sources.items() if source is not None}
    inquiries = {
        package: each
        for package, each in inquiries.items()
        if not isinstance(each.parse(ASKED[package]), str)
    }
    entries = load_entries().values()
    readings = {}
    for entry in entries:
        asked = next((question.package for question in entry.questions if question.decides), None)
        if asked is None or asked not in inquiries or not names[asked]:
            continue
        reading = inquiries[asked].read(entry)
        if asked not in known or not _is_as_released(entry.id, reading, names[asked]):
            readings[entry.id] = reading
    variables: dict[str, frozenset[str] | None] = dict.fromkeys(ASKED.keys() - known)
    for package in variables.keys() & inquiries.keys():
        inquiry = inquiries[package]
        if package == "vllm":
            variables[package] = inquiry.list_variables()
        elif any(
            name.upper().startswith("FLASHINFER_") for name in environ
        ):  # else it takes seconds for nothing
            variables[package] = inquiry.list_flashinfer_variables()
    build = Build(readings, known, variables)
    unknown = [f"{each.id} {each.name}: {why}" for each in entries for why in _explain_unknown(each, build)]
    return Build(readings, known, variables, tuple(unknown))


def _is_as_released(id: str, reading: Reading, release: str) -> bool:
    stored = load_answers()
    return all(answer.value == stored[f"{id}.{name}"][release] for name, answer in reading.answers.items())


def _explain_unknown(entry: Entry, build: Build) -> Iterator[str]:
    """Give the reason that an entry about releases is not known for a build, if it is not."""
    packages = {affected.package for affected in entry.releases}
    if entry.id in build.readings:
        if build.readings[entry.id].release is None:
            yield entry.unread or build.readings[entry.id].where
        return
    for package in sorted(packages & (ASKED.keys() - build.known)):
        if entry.unread and not entry.questions:
            yield entry.unread
        elif entry.questions:
            yield f"the source of this {PACKAGES[package]} is not here"
        elif build.variables[package] is None:
            yield f"the variables of {ASKED[package]} cannot be read"
