"""`json`: the report for machines, schema_version 1."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from moedoctor.interfaces import Reporter
from moedoctor.results import SCHEMA_VERSION, Report
from moedoctor.results import to_json as record_to_json

# A terminal acts on some of these, others hide or reorder text; JSON itself escapes only those below U+0020.
_NOT_SHOWN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


class JsonReporter(Reporter):
    """Strict JSON, indented; every other format can be made from it."""

    name = "json"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        return _escaped(record_to_json(report))


def to_json(document: Mapping[str, Any]) -> str:
    """Return `document` as strict JSON that begins with the schema's version and ends with a line end."""
    return _escaped(record_to_json({"schema_version": SCHEMA_VERSION, **document}))


def _escaped(json_text: str) -> str:
    return _NOT_SHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", json_text)


def report_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a report, from `report.schema.json`."""
    text = files("moedoctor.reporters").joinpath("report.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
