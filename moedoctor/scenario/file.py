"""Scenario files: YAML in, a fully checked `Scenario` out, or one line that says what to change."""

from __future__ import annotations

import itertools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

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
from moedoctor.results import CaseVerdict, ClaimVerdict, Scalar, Tier
from moedoctor.text import (
    TextFileError,
    YamlPath,
    escape,
    explain,
    join_path,
    read_yaml,
    shorten,
    show,
    suggest_nearest,
    validate,
)

SubjectKind = Callable[[str], str | None]
"""Subject name -> its kind (``faulty``, ``vllm`` …); None for a name that nobody owns."""

MAX_POINTS = 2000


def _require_one_line(text: str) -> str:
    text = text.strip()
    if not text:
        raise PydanticCustomError("blank", "must not be empty")
    if any(unicodedata.category(character) == "Cc" for character in text):
        raise PydanticCustomError("control_character", "must be one line without control characters")
    return text


def _check_scalar(value: object) -> Scalar:
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise PydanticCustomError("scalar_type", "must be text, a number, true, false or null")


def _wrap_in_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _drop_default(schema: dict[str, Any]) -> None:
    # The default stands for what only the fault or its entry knows, so an editor must not offer it.
    schema.pop("default")
    if schema["type"] == "array":
        schema["uniqueItems"] = True


Name = Annotated[str, Field(min_length=1, max_length=100)]
Line = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_require_one_line)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
_Scalar = Annotated[Scalar, PlainValidator(_check_scalar, json_schema_input_type=Scalar)]
_Scalars = Annotated[list[Scalar], Field(min_length=1)]
Values = Annotated[
    list[_Scalar],
    Field(min_length=1),
    BeforeValidator(_wrap_in_list, json_schema_input_type=Scalar | _Scalars),
]
"""One value, or the values of a dimension of the matrix; always a list after it is read."""


def _declare_optional(description: str) -> Any:
    """Return the field of a text that may be left out; no editor offers its default."""
    return Field(default="", description=description, json_schema_extra=_drop_default)


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
    subject: Line = _declare_optional(
        "What the statement is about: the model, kernel or release that it names."
    )
    conditions: Line = _declare_optional("Where it was said to hold, or was measured.")
    gpu: Line = _declare_optional(
        "The GPU of the statement's figures; no other GPU confirms or refutes them."
    )
    stand_in: Line = _declare_optional(
        "What the scenario measures in place of the subject; this decides nothing."
    )

    def qualify(
        self, verdict: ClaimVerdict, reason: str | None, gpu: str | None
    ) -> tuple[ClaimVerdict, str | None]:
        """Return untested, with why, unless the claim's own subject ran under its own conditions.

        `gpu` is the GPU of the measurement. The figures of `reason` stay.
        """
        if verdict is ClaimVerdict.UNTESTED:
            return verdict, reason
        unnamed = [name for name in ("subject", "conditions") if not getattr(self, name)]
        if unnamed:
            why = f"the scenario does not name the claim's {' and '.join(unnamed)}"
        elif self.stand_in:
            why = f"only a stand-in ran, {self.stand_in}"
        elif self.gpu and self.gpu not in (gpu or ""):
            why = f"the claim is about {self.gpu}, and {gpu or 'no GPU'} was measured"
        else:
            return verdict, reason
        return ClaimVerdict.UNTESTED, f"{why}: {reason}" if reason else why


class ScenarioDocument(_Strict):
    """A moedoctor scenario: one known failure, the cases to run and what is expected of them."""

    id: Name = Field(description="Catalogue id of the known failure, e.g. MD001.")
    name: Name = _declare_optional("Catalogue name of the same failure, e.g. nan_routing; may be left out.")
    title: Line = _declare_optional(
        "What the scenario shows, in one line; left out, the title of the known failure."
    )
    subjects: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100)] = Field(
        default=("faulty", "fixed", "installed"),
        description="What is put to the test: faulty, fixed, installed, or a release such as vllm@0.19.1.",
        json_schema_extra={"uniqueItems": True},
    )
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)] = Field(
        default=(),
        description="How real the runs are; left out, all tiers that the fault has.",
        json_schema_extra=_drop_default,
    )
    timeout: Finite = Field(default=60.0, gt=0, le=3600.0, description="Time limit of one case, in seconds.")
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


def make_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a scenario file, for editors."""
    uri = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": uri, **ScenarioDocument.model_json_schema(mode="validation")}


class ScenarioError(Exception):
    """A scenario file that cannot be used. As text it is the one line ``file:line: message``."""

    def __init__(self, file: str, line: int, message: str) -> None:
        """`line` counts from 1 and is 1 if none is known."""
        super().__init__(f"{escape(file)}:{line}: {escape(shorten(message, 400))}")


@dataclass(frozen=True)
class Scenario:
    """One scenario file, checked against the catalogue and expanded."""

    id: str
    name: str
    title: str
    file: str
    """The file as messages and reports name it."""
    line: int
    subjects: tuple[str, ...]
    tiers: tuple[Tier, ...]
    timeout: float
    """Time limit of one case, in seconds."""
    points: tuple[Mapping[str, Scalar], ...]
    """The parameters of each point of the matrix, defaults filled in, in the order of the file."""
    expect: Mapping[str, CaseVerdict]
    """Subject -> the verdict that it must show."""
    claims: tuple[ClaimDocument, ...]


def load(
    path: Path, *, faults: Mapping[str, Fault], subject_kind: SubjectKind, shown: str | None = None
) -> Scenario:
    """Return the scenario in the file at `path`, checked against `faults` (catalogue id -> known failure).

    `shown` is what to call the file, if not by its path. Raises `ScenarioError`, and nothing else, for
    whatever is wrong with the file.
    """
    file = str(path) if shown is None else shown
    try:
        source = read_yaml(path)
        document = validate(ScenarioDocument, source, inner={"claims": ClaimDocument})
    except TextFileError as error:
        raise ScenarioError(file, error.line, error.message) from None
    try:
        fault = faults.get(document.id)
        if fault is None:
            message = f"unknown id {show(document.id)}, {suggest_nearest(document.id, faults)}"
            raise _InvalidValueError(("id",), message)
        if document.name not in ("", fault.name):
            message = f"{show(document.name)} is not {fault.id}, expected {fault.name}"
            raise _InvalidValueError(("name",), message)
        _check_subjects(document, fault, subject_kind)
        _check_claims(document, fault)
        return Scenario(
            id=fault.id,
            name=fault.name,
            title=document.title or fault.title,
            file=file,
            line=source.find_line(()),
            subjects=document.subjects,
            tiers=_read_tiers(document, fault),
            timeout=document.timeout,
            expect={subject: CaseVerdict(verdict) for subject, verdict in document.expect.items()},
            claims=document.claims,
            points=expand(document, fault.parameters),
        )
    except _InvalidValueError as error:
        raise ScenarioError(file, source.find_line(error.path), str(error)) from None


class _InvalidValueError(Exception):
    def __init__(self, path: YamlPath, message: str, *, name: YamlPath | None = None) -> None:
        """`path` is the place of the value; `name` is what to call it if that differs."""
        super().__init__(f"{join_path(name or path)}: {message}")
        self.path = path


def _check_distinct(names: Sequence[str], list_: str, *inside: str) -> None:
    """Refuse a name that is there twice in the list `list_`, or under the key `inside` of its items."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _InvalidValueError(
                (list_, index, *inside), f"{show(name)} is there twice, expected it once"
            )


def _check_subjects(document: ScenarioDocument, fault: Fault, subject_kind: SubjectKind) -> None:
    _check_distinct(document.subjects, "subjects")
    named: list[tuple[YamlPath, str]] = [(("subjects", i), name) for i, name in enumerate(document.subjects)]
    for path, name in (*named, *((("expect", name), name) for name in document.expect)):
        if subject_kind(name) is None:
            kinds = (kind for kind in fault.tiers if kind not in ("vllm", "flashinfer"))
            known = dict.fromkeys(("faulty", "fixed", "installed", "vllm@X.Y.Z", "flashinfer@X.Y.Z", *kinds))
            raise _InvalidValueError(path, f"unknown subject {show(name)}, {suggest_nearest(name, known)}")


def _read_tiers(document: ScenarioDocument, fault: Fault) -> tuple[Tier, ...]:
    _check_distinct([tier.value for tier in document.tiers], "tiers")
    has = {tier for tiers in fault.tiers.values() for tier in tiers}
    all_tiers = tuple(tier for tier in Tier if tier in has)
    for index, tier in enumerate(document.tiers):
        if tier not in has:
            listed = ", ".join(known.value for known in all_tiers)
            message = f"{fault.id} has no tier {tier.value}, expected {listed}"
            raise _InvalidValueError(("tiers", index), message)
    return document.tiers or all_tiers


def _check_claims(document: ScenarioDocument, fault: Fault) -> None:
    tests = {test.key: test for test in fault.claims}
    for index, claim in enumerate(document.claims):
        path: YamlPath = ("claims", index)
        if claim.key not in tests:
            message = f"unknown claim {show(claim.key)}, {suggest_nearest(claim.key, tests)}"
            raise _InvalidValueError((*path, "key"), message)
        names = tests[claim.key].thresholds
        for name in (*claim.thresholds, *names):
            place = (*path, "thresholds", name)
            if name not in names:
                raise _InvalidValueError(place, f"unknown threshold, {suggest_nearest(name, names)}")
            if name not in claim.thresholds:
                raise _InvalidValueError(place, "is missing, expected a number")
    _check_distinct([claim.key for claim in document.claims], "claims", "key")


_Value = tuple[YamlPath, Scalar]
"""A value, behind its place in the file."""


def expand(document: ScenarioDocument, model: type[BaseModel]) -> tuple[Mapping[str, Scalar], ...]:
    """Return every point of the matrix, checked by the fault's `model` and completed with its defaults.

    Points are in the order of the file, and each is there once. Raises `_InvalidValueError`.
    """
    blocks = [
        {
            **_read_dimensions(document.parameters, ("parameters",)),
            **_read_dimensions(block, ("matrix", index)),
        }
        for index, block in enumerate(document.matrix)
    ]
    has_matrix = "matrix" in document.model_fields_set
    # Counted, not expanded: a hundred short lists make more points than there is memory.
    total = sum(math.prod(map(len, block.values())) for block in blocks)
    if total > MAX_POINTS:
        count = str(total) if total < 10**9 else "over a billion"
        message = f"expands to {count} points, expected at most {MAX_POINTS}"
        raise _InvalidValueError(("matrix",) if has_matrix else ("parameters",), message)
    points: dict[str, Mapping[str, Scalar]] = {}
    for index, block in enumerate(blocks):
        where: YamlPath = ("matrix", index) if has_matrix else ("parameters",)
        for values in itertools.product(*block.values()):
            point = _make_point(dict(zip(block, values, strict=True)), where, model)
            points.setdefault(json.dumps(point), point)
    return tuple(points.values())


def _read_dimensions(block: Mapping[str, Sequence[Scalar]], path: YamlPath) -> dict[str, list[_Value]]:
    return {
        name: [((*path, name, index), value) for index, value in enumerate(values)]
        for name, values in block.items()
    }


def _make_point(
    values: Mapping[str, _Value], block: YamlPath, model: type[BaseModel]
) -> Mapping[str, Scalar]:
    given = json.dumps({name: value for name, (_, value) in values.items()})
    try:
        return model.model_validate_json(given, strict=True).model_dump(mode="json")
    except ValidationError as error:
        first = min(error.errors(include_url=False), key=lambda finding: finding["type"] == "missing")

    message = explain(first, model.model_fields)
    name = str(first["loc"][0]) if first["loc"] else ""
    # A check over several parameters has no place of its own: take the one its message starts with.
    word = re.match(r"(\w+):?\s+", message)
    if word and word[1] in model.model_fields and name in ("", word[1]):
        name, message = word[1], message[word.end() :]
    path = values[name][0] if name in values else block
    if first["type"] == "extra_forbidden":
        path = path[:-1]
    raise _InvalidValueError(path, message, name=("parameters", name) if name else ("parameters",))
