"""The report as JSON, and its schema."""

from __future__ import annotations

import dataclasses
import json

import jsonschema
from hypothesis import given
from report_samples import full_report, reports

from moedoctor.reporters.json import JsonReporter
from moedoctor.reporters.json import to_json as document_to_json
from moedoctor.reporters.schemas import make_schema
from moedoctor.results import Report, from_json, to_json


@given(reports)
def test_a_report_is_strict_json_fits_the_schema_and_reads_back(report: Report) -> None:
    text = JsonReporter().render(report)
    data = json.loads(text, parse_constant=_no_json)
    jsonschema.validate(data, make_schema("run"), jsonschema.Draft202012Validator)
    assert from_json(Report, data) == report


def _no_json(token: str) -> None:
    raise AssertionError(f"{token} is not JSON")


def test_text_is_readable_and_indented() -> None:
    report = dataclasses.replace(full_report(), findings=("3 µs → 4 µs",))
    text = JsonReporter().render(report)
    assert text.startswith('{\n  "schema_version": 1,\n  "moedoctor": "0.1.0",\n')
    assert '"3 µs → 4 µs"' in text
    assert text == to_json(report)


def test_terminal_escapes_are_escaped() -> None:
    text = document_to_json({"text": "\x1b[31m\x9b2J\u202egnp\u2028 µs 漢字"})
    assert "\\u001b[31m\\u009b2J\\u202egnp\\u2028 µs 漢字" in text
    assert json.loads(text)["text"] == "\x1b[31m\x9b2J\u202egnp\u2028 µs 漢字"
