"""`json`: the report for machines, schema_version 1."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from moedoctor.interfaces import Reporter
from moedoctor.results import Report, to_json


class JsonReporter(Reporter):
    """Strict JSON, indented; every other format can be made from it."""

    name = "json"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        return to_json(report)


def report_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of what `JsonReporter` writes, from `report.schema.json`."""
    text = files("moedoctor.reporters").joinpath("report.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
