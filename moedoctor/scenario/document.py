"""The shape of a scenario file as pydantic models, and the JSON schema that editors read.

Only the shape: what needs the catalogue (ids, parameters, claims) is checked in `moedoctor.scenario.file`.
"""

from __future__ import annotations

import json
import unicodedata
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
from pydantic_core import ErrorDetails, PydanticCustomError

from moedoctor.results import Scalar, Tier
from moedoctor.text import YamlPath, YamlSource, dotted, explain

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


class InvalidValueError(Exception):
    """A value of a scenario file that cannot be used; the message says which."""

    def __init__(self, path: YamlPath, message: str, *, name: YamlPath | None = None) -> None:
        """`path` is the place of the value; `name` is what to call it if that differs."""
        super().__init__(path, message)
        called = dotted(path if name is None else name)
        self.path = path
        self.message = f"{called}: {message}" if called else message


def read_document(source: YamlSource) -> ScenarioDocument:
    """Return the file's data in its shape. Raises `InvalidValueError` for the first misfit."""
    try:
        # Through JSON, because pydantic's strict mode takes enums and tuples from text only there.
        return ScenarioDocument.model_validate_json(json.dumps(source.data))
    except ValidationError as error:
        errors = error.errors(include_url=False)

    def rank(error: ErrorDetails) -> tuple[bool, int, int]:
        # A misspelt key is also a missing one, a bad item leaves its list too short: the cause comes first.
        follows = error["type"] == "missing" or (error["type"] == "too_short" and bool(error["input"]))
        return follows, source.line(error["loc"]), -len(error["loc"])

    first = min(errors, key=rank)
    beside = ClaimDocument if first["loc"][:1] == ("claims",) else ScenarioDocument
    path = first["loc"] if first["type"] == "missing" else source.known(first["loc"])
    raise InvalidValueError(path, explain(first, beside.model_fields))
