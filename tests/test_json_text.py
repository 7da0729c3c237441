"""Strict JSON text: what is refused, and where it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from report_samples import evidences

from moedoctor.json_text import JsonError, JsonPath, format_path, line_of, parse, short_repr


def _paths(value: Any, path: JsonPath = ()) -> list[JsonPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, one in items for inner in _paths(one, (*path, key)))]


@given(evidences)
def test_strict_json_reads_as_the_standard_parser_reads_it(value: dict[str, Any]) -> None:
    assert parse(json.dumps(value)) == value


@given(evidences)
def test_every_value_is_found_on_its_line(value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=1)
    lines = text.split("\n")
    for path in _paths(value):
        line = lines[line_of(text, path) - 1]
        assert len(line) - len(line.lstrip(" ")) == len(path)
        if path and isinstance(path[-1], str):
            assert line.lstrip(" ").startswith(json.dumps(path[-1]) + ": ")


def test_equal_elements_are_told_apart_by_their_line() -> None:
    text = '{"a": [\n1,\n1,\n{"b":\n1}, 1]}'
    assert [line_of(text, ("a", i)) for i in range(4)] == [2, 3, 4, 5]
    assert line_of(text, ("a", 2, "b")) == 4


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "not JSON"),
        ('{\n"a": 1,\n}', 3, "not JSON"),
        ('{"a": 1}\n\nx', 3, "not JSON: Extra data"),
        ('{"NaN": 1,\n"a": NaN}', 2, "NaN is not JSON"),
        ("[1,\n\n-Infinity]", 3, "-Infinity is not JSON"),
        ("[1,\n1e999]", 2, "1e999 is out of range"),
        ("[\n" + "9" * 5000 + "]", 2, "5000 digits"),
        ('{"a": {"b": 1},\n"c": {"b": 1,\n"d": 2,\n"b": 3}}', 4, "'b' occurs twice"),
        ('{"a": "\\"a\\": {",\n"a": 2}', 2, "'a' occurs twice"),
        ('{"a": 1,\n"\\u0061": 2}', 2, "'a' occurs twice"),
        ("[" * 200_000, 1, "nested too deeply"),
    ],
)
def test_what_strict_json_does_not_allow_is_refused_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(JsonError, match=message.replace("(", r"\(")) as caught:
        parse(text)
    assert caught.value.line == line
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_paths_read_like_code() -> None:
    assert format_path(("scenarios", 0, "cases", 2, "verdict")) == "scenarios[0].cases[2].verdict"
    assert format_path(()) == "report"
    assert "\n" not in format_path(("a\nb",))


def test_values_are_shown_in_a_few_characters() -> None:
    assert [short_repr(one) for one in (None, True, 3, [1], {"a": 1})] == [
        "null",
        "true",
        "3",
        "an array",
        "an object",
    ]
    assert len(short_repr("x" * 1000)) < 50
    assert "\n" not in short_repr("a\nb")
