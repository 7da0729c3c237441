"""Scenario files: YAML in, a fully checked `Scenario` out, or one line that says what to change.

``python -m moedoctor.scenario.file [--check] FILE`` writes the JSON schema that editors read, or compares it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from moedoctor.interfaces import Fault
from moedoctor.results import CaseVerdict, Scalar, Tier
from moedoctor.text import (
    TextFileError,
    YamlPath,
    dotted,
    escape,
    explain,
    nearest,
    read_yaml,
    shorten,
    show,
    validate,
)

SubjectKind = Callable[[str], str | None]
"""Subject name -> its kind (``faulty``, ``vllm`` …); None for a name that nobody owns."""

MAX_POINTS = 2000
_SUBJECTS = ("faulty", "fixed", "installed", "vllm@X.Y.Z", "flashinfer@X.Y.Z")
_MESSAGE_LIMIT = 400
_FIRST_WORD = re.compile(r"(\w+):?\s+")


SCHEMA_URI = "https://json-schema.org/draft/2020-12/schema"
DEFAULT_SUBJECTS = ("faulty", "fixed", "installed")
DEFAULT_TIMEOUT = 60.0
MAX_TIMEOUT = 3600.0


def _one_line(text: str) -> str:
    text = text.strip()
    if not text:
        raise PydanticCustomError("blank", "must not be empty")
    if any(unicodedata.category(character) == "Cc" for character in text):
        raise PydanticCustomError("control_character", "must be one line without control characters")
    return text


def _scalar(value: object) -> Scalar:
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise PydanticCustomError("scalar_type", "must be text, a number, true, false or null")


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _without_default(schema: dict[str, Any]) -> None:
    # The default stands for what only the fault or its entry knows, so an editor must not offer it.
    schema.pop("default")


def _distinct_without_default(schema: dict[str, Any]) -> None:
    _without_default(schema)
    schema["uniqueItems"] = True


Name = Annotated[str, Field(min_length=1, max_length=100)]
Line = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_one_line)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
_Scalar = Annotated[Scalar, PlainValidator(_scalar, json_schema_input_type=Scalar)]
_Scalars = Annotated[list[Scalar], Field(min_length=1)]
Values = Annotated[
    list[_Scalar], Field(min_length=1), BeforeValidator(_as_list, json_schema_input_type=Scalar | _Scalars)
]
"""One value, or the values of a dimension of the matrix; always a list after it is read."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class ClaimDocument(_Strict):
    """A statement from upstream that the scenario tests on this machine."""

    key: Name = Field(description="The name of the fault's test of this claim.")
    text: Line = Field(description="The statement, in one line.")
    source: Line = Field(description="Where it was said, e.g. vllm-project/vllm#39593.")
    thresholds: dict[Name, Finite] = Field(
        default={}, description="The figures that decide; exactly the names that the fault's test reads."
    )


class ScenarioDocument(_Strict):
    """A moedoctor scenario: one known failure, the cases to run and what is expected of them."""

    id: Name = Field(description="Catalogue id of the known failure, e.g. MD001.")
    name: Name = Field(
        default="",
        description="Catalogue name of the same failure, e.g. nan_routing; may be left out.",
        json_schema_extra=_without_default,
    )
    title: Line = Field(
        default="",
        description="What the scenario shows, in one line; left out, the title of the known failure.",
        json_schema_extra=_without_default,
    )
    subjects: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100)] = Field(
        default=DEFAULT_SUBJECTS,
        description="What is put to the test: faulty, fixed, installed, or a release such as vllm@0.19.1.",
        json_schema_extra={"uniqueItems": True},
    )
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)] = Field(
        default=(),
        description="How real the runs are; left out, all tiers that the fault has.",
        json_schema_extra=_distinct_without_default,
    )
    timeout: Finite = Field(
        default=DEFAULT_TIMEOUT, gt=0, le=MAX_TIMEOUT, description="Time limit of one case, in seconds."
    )
    parameters: dict[Name, Values] = Field(
        default={}, description="Values shared by every case; a list is a dimension of the matrix."
    )
    matrix: Annotated[tuple[dict[Name, Values], ...], Field(min_length=1)] = Field(
        default=({},),
        description="Blocks, each merged over the parameters and expanded as a product by itself.",
    )
    expect: Annotated[dict[Name, Literal["reproduced", "clean"]], Field(min_length=1)] = Field(
        default={"faulty": "reproduced", "fixed": "clean"},
        description="The verdict expected of each subject that must behave.",
    )
    claims: tuple[ClaimDocument, ...] = Field(
        default=(), description="Statements from upstream, tested in the same run."
    )


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a scenario file, for editors."""
    return {"$schema": SCHEMA_URI, **ScenarioDocument.model_json_schema(mode="validation")}


class ScenarioError(Exception):
    """A scenario file that cannot be used. As text it is the one line ``file:line: message``."""

    def __init__(self, file: str, line: int, message: str) -> None:
        """`line` counts from 1 and is 1 if none is known."""
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
    """Return the scenario in the file at `path`, checked against `faults` (catalogue id -> known failure).

    Raises `ScenarioError`, and nothing else, for whatever is wrong with the file.
    """
    file = str(path)
    try:
        source = read_yaml(path)
        document = validate(ScenarioDocument, source, inner={"claims": ClaimDocument})
    except TextFileError as error:
        raise ScenarioError(file, error.line, error.message) from None
    try:
        fault = _fault(document, faults)
        _check_subjects(document, fault, subject_kind)
        return Scenario(
            id=fault.id,
            name=fault.name,
            title=document.title or fault.title,
            file=file,
            line=source.line(()),
            subjects=document.subjects,
            tiers=_tiers(document, fault),
            timeout=document.timeout,
            expect={subject: CaseVerdict(verdict) for subject, verdict in document.expect.items()},
            claims=tuple(_claims(document, fault, source.line)),
            points=expand(document, fault.parameters),
        )
    except InvalidValueError as error:
        raise ScenarioError(file, source.line(error.path), error.message) from None


def _fault(document: ScenarioDocument, faults: Mapping[str, Fault]) -> Fault:
    fault = faults.get(document.id)
    if fault is None:
        raise InvalidValueError(("id",), f"unknown id {show(document.id)}, {nearest(document.id, faults)}")
    if document.name not in ("", fault.name):
        raise InvalidValueError(("name",), f"{show(document.name)} is not {fault.id}, expected {fault.name}")
    return fault


def _check_subjects(document: ScenarioDocument, fault: Fault, subject_kind: SubjectKind) -> None:
    _check_distinct([(("subjects", index), name) for index, name in enumerate(document.subjects)])
    named: list[tuple[YamlPath, str]] = [(("subjects", i), name) for i, name in enumerate(document.subjects)]
    named += [(("expect", name), name) for name in document.expect]
    for path, name in named:
        if subject_kind(name) is None:
            kinds = (kind for kind in fault.tiers if kind not in ("vllm", "flashinfer"))
            known = dict.fromkeys((*_SUBJECTS, *kinds))
            raise InvalidValueError(path, f"unknown subject {show(name)}, {nearest(name, known)}")


def _check_distinct(named: Sequence[tuple[YamlPath, str]]) -> None:
    """Refuse a name that is there twice; each comes with its path."""
    names: set[str] = set()
    for path, name in named:
        if name in names:
            raise InvalidValueError(path, f"{show(name)} is there twice, expected it once")
        names.add(name)


def _tiers(document: ScenarioDocument, fault: Fault) -> tuple[Tier, ...]:
    _check_distinct([(("tiers", index), tier.value) for index, tier in enumerate(document.tiers)])
    has = {tier for tiers in fault.tiers.values() for tier in tiers}
    all_tiers = tuple(tier for tier in Tier if tier in has)
    for index, tier in enumerate(document.tiers):
        if tier not in has:
            listed = ", ".join(known.value for known in all_tiers)
            message = f"{fault.id} has no tier {tier.value}, expected {listed}"
            raise InvalidValueError(("tiers", index), message)
    return document.tiers or all_tiers


def _claims(
    document: ScenarioDocument, fault: Fault, line: Callable[[YamlPath], int]
) -> Iterator[ScenarioClaim]:
    tests = {test.key: test for test in fault.claims}
    for index, claim in enumerate(document.claims):
        path: YamlPath = ("claims", index)
        if claim.key not in tests:
            message = f"unknown claim {show(claim.key)}, {nearest(claim.key, tests)}"
            raise InvalidValueError((*path, "key"), message)
        _check_thresholds((*path, "thresholds"), claim.thresholds, tests[claim.key].thresholds)
        yield ScenarioClaim(claim.key, claim.text, claim.source, claim.thresholds, line(path))
    _check_distinct([(("claims", index, "key"), claim.key) for index, claim in enumerate(document.claims)])


def _check_thresholds(path: YamlPath, given: Mapping[str, float], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise InvalidValueError((*path, name), f"unknown threshold, {nearest(name, names)}")
    for name in names:
        if name not in given:
            raise InvalidValueError((*path, name), "is missing, expected a number")


class InvalidValueError(Exception):
    """A value of a scenario file that cannot be used; the message says which."""

    def __init__(self, path: YamlPath, message: str, *, name: YamlPath | None = None) -> None:
        """`path` is the place of the value; `name` is what to call it if that differs."""
        super().__init__(path, message)
        called = dotted(path if name is None else name)
        self.path = path
        self.message = f"{called}: {message}" if called else message


class _Value(NamedTuple):
    path: YamlPath
    """Its place in the file."""
    value: Scalar


def expand(document: ScenarioDocument, model: type[BaseModel]) -> tuple[Mapping[str, Scalar], ...]:
    """Return every point of the matrix, checked by the fault's `model` and completed with its defaults.

    Points are in the order of the file, and each is there once. Raises `InvalidValueError`.
    """
    blocks = [
        {**_dimensions(document.parameters, ("parameters",)), **_dimensions(block, ("matrix", index))}
        for index, block in enumerate(document.matrix)
    ]
    has_matrix = "matrix" in document.model_fields_set
    _check_size(blocks, ("matrix",) if has_matrix else ("parameters",))
    points: dict[str, Mapping[str, Scalar]] = {}
    for index, block in enumerate(blocks):
        where: YamlPath = ("matrix", index) if has_matrix else ("parameters",)
        for values in itertools.product(*block.values()):
            point = _point(dict(zip(block, values, strict=True)), where, model)
            points.setdefault(json.dumps(point), point)
    return tuple(points.values())


def _dimensions(block: Mapping[str, Sequence[Scalar]], path: YamlPath) -> dict[str, list[_Value]]:
    return {
        name: [_Value((*path, name, index), value) for index, value in enumerate(values)]
        for name, values in block.items()
    }


def _check_size(blocks: Sequence[Mapping[str, Sequence[_Value]]], path: YamlPath) -> None:
    # Counted, not expanded: a hundred short lists make more points than there is memory.
    total = sum(math.prod(len(values) for values in block.values()) for block in blocks)
    if total > MAX_POINTS:
        count = str(total) if total < 10**9 else "over a billion"
        raise InvalidValueError(path, f"expands to {count} points, expected at most {MAX_POINTS}")


def _point(values: Mapping[str, _Value], block: YamlPath, model: type[BaseModel]) -> Mapping[str, Scalar]:
    given = json.dumps({name: value.value for name, value in values.items()})
    try:
        return model.model_validate_json(given, strict=True).model_dump(mode="json")
    except ValidationError as error:
        first = min(error.errors(include_url=False), key=lambda finding: finding["type"] == "missing")

    message = explain(first, model.model_fields)
    name = str(first["loc"][0]) if first["loc"] else ""
    # A check over several parameters has no place of its own: take the one its message starts with.
    word = _FIRST_WORD.match(message)
    if word and word[1] in model.model_fields and name in ("", word[1]):
        name, message = word[1], message[word.end() :]
    path = values[name].path if name in values else block
    if first["type"] == "extra_forbidden":
        path = path[:-1]
    raise InvalidValueError(path, message, name=("parameters", name) if name else ("parameters",))


def schema_text() -> str:
    """Return what ``schema.json`` must hold."""
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
    print(f"{file}: differs from the models; run: python -m moedoctor.scenario.file {file}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
