"""`json`: the report for machines, schema_version 1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from moedoctor.interfaces import Reporter
from moedoctor.results import SCHEMA_VERSION, Report
from moedoctor.results import to_json as record_to_json


class JsonReporter(Reporter):
    """Strict JSON, indented; every other format can be made from it."""

    name = "json"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        return record_to_json(report)


def to_json(document: Mapping[str, Any]) -> str:
    """Return `document` as strict JSON that begins with the schema's version and ends with a line end."""
    return record_to_json({"schema_version": SCHEMA_VERSION, **document})


def report_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a report, from `report.schema.json`."""
    text = files("moedoctor.reporters").joinpath("report.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
