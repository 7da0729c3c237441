"""Scenario files: YAML in, a typed and fully checked `Scenario` out, or one line that says what to change.

``python -m moedoctor.scenario.file [--check] FILE`` writes the JSON schema that editors read, or compares it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moedoctor import text as yaml_source
from moedoctor.interfaces import Fault
from moedoctor.results import CaseVerdict, Scalar, Tier
from moedoctor.scenario.document import InvalidValueError, ScenarioDocument, read_document, schema
from moedoctor.scenario.matrix import expand
from moedoctor.text import TextFileError, YamlPath, escape, nearest, shorten, show

__all__ = ["Scenario", "ScenarioClaim", "ScenarioError", "load", "schema", "schema_text"]

SubjectKind = Callable[[str], str | None]
"""Subject name -> its kind (``faulty``, ``vllm`` …); None for a name that nobody owns."""

_SUBJECTS = ("faulty", "fixed", "installed", "vllm@X.Y.Z", "flashinfer@X.Y.Z")
_MESSAGE_LIMIT = 400


class ScenarioError(Exception):
    """A scenario file that cannot be used. As text it is the one line ``file:line: message``."""

    def __init__(self, file: str, line: int, message: str) -> None:
        """`line` counts from 1 and is 1 where none is known."""
        super().__init__(file, line, message)
        self.file = file
        self.line = line
        self.message = escape(shorten(message, _MESSAGE_LIMIT))

    def __str__(self) -> str:
        return f"{escape(self.file)}:{self.line}: {self.message}"


@dataclass(frozen=True)
class ScenarioClaim:
    """One claim of a scenario, with the figures that decide it."""

    key: str
    """The `ClaimTest.key` of the fault."""
    text: str
    source: str
    thresholds: Mapping[str, float]
    line: int


@dataclass(frozen=True)
class Scenario:
    """One scenario file, checked against the catalogue and expanded."""

    id: str
    name: str
    title: str
    file: str
    """The path as it was given."""
    line: int
    subjects: tuple[str, ...]
    tiers: tuple[Tier, ...]
    timeout: float
    """Time limit of one case, in seconds."""
    points: tuple[Mapping[str, Scalar], ...]
    """The parameters of each point of the matrix, defaults filled in, in the order of the file."""
    expect: Mapping[str, CaseVerdict]
    """Subject -> the verdict that it must show."""
    claims: tuple[ScenarioClaim, ...]


def load(path: Path, *, faults: Mapping[str, Fault], subject_kind: SubjectKind) -> Scenario:
    """The scenario in the file at `path`, checked against `faults` (catalogue id -> known failure).

    Raises `ScenarioError`, and nothing else, for whatever is wrong with the file.
    """
    file = str(path)
    try:
        source = yaml_source.read(path)
    except TextFileError as error:
        raise ScenarioError(file, error.line, error.message) from None
    try:
        document = read_document(source)
        fault = _fault(document, faults)
        _check_subjects(document, fault, subject_kind)
        return Scenario(
            id=document.id,
            name=document.name,
            title=document.title,
            file=file,
            line=source.line(()),
            subjects=document.subjects,
            tiers=_tiers(document, fault),
            timeout=document.timeout,
            points=expand(document, fault.parameters),
            expect={subject: CaseVerdict(verdict) for subject, verdict in document.expect.items()},
            claims=tuple(_claims(document, fault, source.line)),
        )
    except InvalidValueError as error:
        raise ScenarioError(file, source.line(error.path), error.message) from None


def _fault(document: ScenarioDocument, faults: Mapping[str, Fault]) -> Fault:
    fault = faults.get(document.id)
    if fault is None:
        raise InvalidValueError(("id",), f"unknown id {show(document.id)}, {nearest(document.id, faults)}")
    if document.name != fault.name:
        raise InvalidValueError(("name",), f"{show(document.name)} is not {fault.id}, expected {fault.name}")
    return fault


def _check_subjects(document: ScenarioDocument, fault: Fault, subject_kind: SubjectKind) -> None:
    _check_distinct(("subjects",), document.subjects)
    named: list[tuple[YamlPath, str]] = [(("subjects", i), name) for i, name in enumerate(document.subjects)]
    named += [(("expect", name), name) for name in document.expect]
    for path, name in named:
        if subject_kind(name) is None:
            kinds = (kind for kind in fault.tiers if kind not in ("vllm", "flashinfer"))
            known = dict.fromkeys((*_SUBJECTS, *kinds))
            raise InvalidValueError(path, f"unknown subject {show(name)}, {nearest(name, known)}")


def _check_distinct(path: YamlPath, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise InvalidValueError((*path, index), f"{show(name)} is there twice, expected it once")
        seen.add(name)


def _tiers(document: ScenarioDocument, fault: Fault) -> tuple[Tier, ...]:
    _check_distinct(("tiers",), [tier.value for tier in document.tiers])
    has = {tier for tiers in fault.tiers.values() for tier in tiers}
    all_tiers = tuple(tier for tier in Tier if tier in has)
    for index, tier in enumerate(document.tiers):
        if tier not in has:
            listed = ", ".join(one.value for one in all_tiers)
            raise InvalidValueError(
                ("tiers", index), f"{fault.id} has no tier {tier.value}, expected {listed}"
            )
    return document.tiers or all_tiers


def _claims(
    document: ScenarioDocument, fault: Fault, line: Callable[[YamlPath], int]
) -> Iterator[ScenarioClaim]:
    tests = {test.key: test for test in fault.claims}
    seen: set[str] = set()
    for index, claim in enumerate(document.claims):
        path: YamlPath = ("claims", index)
        if claim.key not in tests:
            message = f"unknown claim {show(claim.key)}, {nearest(claim.key, tests)}"
            raise InvalidValueError((*path, "key"), message)
        if claim.key in seen:
            raise InvalidValueError((*path, "key"), f"{show(claim.key)} is there twice, expected it once")
        seen.add(claim.key)
        _check_thresholds((*path, "thresholds"), claim.thresholds, tests[claim.key].thresholds)
        yield ScenarioClaim(claim.key, claim.text, claim.source, claim.thresholds, line(path))


def _check_thresholds(path: YamlPath, given: Mapping[str, float], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise InvalidValueError((*path, name), f"unknown threshold, {nearest(name, names)}")
    for name in names:
        if name not in given:
            raise InvalidValueError((*path, name), "is missing, expected a number")


def schema_text() -> str:
    """What ``schema.json`` must hold."""
    return json.dumps(schema(), indent=2) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the JSON schema to a file, or with ``--check`` compare: 0 the same, 1 different, 2 usage."""
    check = "--check" in arguments
    files = [Path(argument) for argument in arguments if argument != "--check"]
    if len(files) != 1:
        print("usage: python -m moedoctor.scenario.file [--check] FILE", file=sys.stderr)
        return 2
    file = files[0]
    if not check:
        file.write_text(schema_text(), encoding="utf-8")
        return 0
    if file.is_file() and file.read_text(encoding="utf-8") == schema_text():
        return 0
    print(
        f"{file}: is not what the models say; run: python -m moedoctor.scenario.file {file}", file=sys.stderr
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
