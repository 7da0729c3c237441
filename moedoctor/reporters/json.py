"""`json`: the report for machines, schema_version 1."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal, Protocol

from typing_extensions import NotRequired, TypedDict

from moedoctor.interfaces import Reporter
from moedoctor.origin import Origin
from moedoctor.results import SCHEMA_VERSION, Report, to_plain
from moedoctor.results import to_json as record_to_json
from moedoctor.text import load_yaml


class JsonReporter(Reporter):
    """Strict JSON, indented; every other format can be made from it."""

    name = "json"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        return record_to_json(report)


class Document(Protocol):
    """A frozen dataclass whose fields are what a command writes as JSON, between `Head` and `Ending`.

    It may have a `summary`: a field, a property, or a class attribute. Without one, JSON has a summary only
    if the exit code is not 0.
    """

    command: ClassVar[str]


@cache
def load_documents() -> Mapping[str, Mapping[str, str]]:
    """Return command -> the row of its document in `documents.yaml`."""
    rows: Mapping[str, Mapping[str, str]] = load_yaml("moedoctor.reporters", "documents.yaml")
    return rows


class Head(TypedDict):
    """The keys that begin every JSON output; `command` is the third."""

    schema_version: Literal[1]
    moedoctor: str
    """The version that wrote it."""
    origin: NotRequired[Origin]
    """Absent in what older releases wrote."""


class Ending(TypedDict):
    """The keys that end every summary."""

    exit_code: int
    reasons: list[str]
    """Reasons for an exit code that is not 0."""


def to_document(record: Document) -> dict[str, Any]:
    """Return what a command writes as JSON, without the head and the ending, as plain data."""
    document = {"command": record.command, **to_plain(record)}
    if (summary := getattr(record, "summary", None)) is not None:
        document["summary"] = to_plain(summary)
    return document


def to_json(document: Mapping[str, Any]) -> str:
    """Return `document` as strict JSON that begins with the schema's version and ends with a line end."""
    return record_to_json({"schema_version": SCHEMA_VERSION, **document})
