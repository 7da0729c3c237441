"""Reports to and from JSON."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import HOSTILE, case, full_report, report, reports, scenario

from moedoctor.reporters.json import report_schema
from moedoctor.results import CaseResult, ClaimResult, Report, ScenarioResult, Summary, Tier
from moedoctor.serialise import MAX_REPORT_BYTES, ReportError, load_report, report_from_dict, report_to_dict

VALIDATOR = jsonschema.Draft202012Validator(report_schema())


def _document() -> dict[str, Any]:
    return report_to_dict(full_report())


_DOCUMENT = _document()


def _write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_layout_is_the_documented_one() -> None:
    data = _document()
    assert list(data) == [
        "schema_version",
        "moedoctor",
        "command",
        "environment",
        "scenarios",
        "findings",
        "summary",
    ]
    assert data["schema_version"] == 1
    assert data["moedoctor"] == "0.1.0"
    first = data["scenarios"][0]
    assert {"id", "name", "title", "verdict", "file", "cases", "claims"} <= set(first)
    assert first["cases"][0] == {
        "subject": "faulty",
        "tier": "model",
        "device": "cpu",
        "parameters": {"tokens": 128, "top_k": 2, "scoring": "softmax"},
        "verdict": "reproduced",
        "figure": "13 of 128 rows",
        "evidence": {"rows": 13},
        "reason": None,
        "seconds": 0.0,
    }
    assert first["claims"][0] == {
        "text": "the fused clamp is free",
        "source": "vllm-project/vllm#39391",
        "verdict": "confirmed",
        "evidence": {"with_us": 3.43125},
        "reason": None,
    }
    counts = {"proved": 0, "found": 0, "absent": 1, "failed": 0, "skipped": 0, "error": 1, "exit_code": 1}
    assert data["summary"] == {**counts, "cases": {"clean": 6}, "interrupted": True}


@given(reports)
def test_a_report_survives_the_round_trip_and_fits_the_schema(one: Report) -> None:
    text = json.dumps(report_to_dict(one), allow_nan=False)
    data = json.loads(text)
    VALIDATOR.validate(data)
    assert report_from_dict(data) == one
    assert json.dumps(report_to_dict(report_from_dict(data))) == text


def test_every_field_of_the_records_is_written_and_in_the_schema() -> None:
    """A field that is added to the records must be added to the JSON, too."""
    data, schema = _document(), report_schema()
    scenario_data = data["scenarios"][0]
    for kind, written, described in (
        (Report, data, schema),
        (ScenarioResult, scenario_data, schema["$defs"]["scenario"]),
        (CaseResult, scenario_data["cases"][0], schema["$defs"]["case"]),
        (ClaimResult, scenario_data["claims"][0], schema["$defs"]["claim"]),
        (Summary, data["summary"], schema["$defs"]["summary"]),
    ):
        fields = {field.name for field in dataclasses.fields(kind)}
        names = fields - {"version"} | {"moedoctor"} if kind is Report else fields
        assert set(written) == set(described["properties"]) == names


def test_figures_that_are_not_finite_become_text() -> None:
    evidence = {"a": math.nan, "b": [math.inf, (-math.inf, 1.5)], "c": {"d": math.nan}}
    one = report(scenario("proved", case("faulty", "reproduced", {"x": math.inf}, evidence=evidence)))
    data = json.loads(json.dumps(report_to_dict(one), allow_nan=False))
    written = data["scenarios"][0]["cases"][0]
    assert written["evidence"] == {"a": "nan", "b": ["inf", ["-inf", 1.5]], "c": {"d": "nan"}}
    assert written["parameters"] == {"x": "inf"}
    assert report_to_dict(report_from_dict(data)) == data


def test_enums_whole_number_keys_and_broken_text_are_written() -> None:
    class Colour(enum.IntEnum):
        RED = 3

    evidence = {8: Colour.RED, "tier": Tier.KERNEL, "text": HOSTILE}
    one = report(scenario("proved", case("faulty", "reproduced", evidence=evidence)))
    written = report_to_dict(one)["scenarios"][0]["cases"][0]["evidence"]
    assert (written["8"], written["tier"]) == (3, "kernel")
    json.dumps(written, ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        ({"a": {1, 2}}, r"^scenarios\[0\].cases\[0\].evidence.a: a set cannot be written"),
        ({"a": [object()]}, r"evidence.a\[0\]: a object cannot be written"),
        ({"a": {None: 1}}, r"evidence.a: the key None is a NoneType"),
        ({"a": {1: 1, "1": 2}}, r"evidence.a: two of its keys are the same text"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_path(evidence: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report_to_dict(report(scenario("proved", case("faulty", "reproduced", evidence=evidence))))


def test_evidence_that_holds_itself_is_refused() -> None:
    evidence: dict[str, Any] = {}
    evidence["again"] = evidence
    with pytest.raises(ValueError, match="nested more than"):
        report_to_dict(report(scenario("proved", case("faulty", "reproduced", evidence=evidence))))


def test_a_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cases\[0\].seconds: nan"):
        report_to_dict(report(scenario("proved", case("faulty", "reproduced", seconds=math.nan))))


def test_unknown_keys_are_tolerated() -> None:
    data = _document()
    for place in (data, data["scenarios"][0], data["scenarios"][0]["cases"][0], data["summary"]):
        place["a_later_addition"] = {"x": 1}
    assert report_from_dict(data) == full_report()


def test_our_additional_keys_may_be_absent() -> None:
    data = _document()
    del data["findings"], data["summary"]["cases"], data["summary"]["interrupted"]
    for one in data["scenarios"]:
        del one["reason"], one["line"], one["conclusions"]
        for inner in one["cases"]:
            del inner["reason"], inner["device"], inner["figure"]
    read = report_from_dict(data)
    assert read.findings == ()
    assert read.scenarios[0].line == 1
    assert read.scenarios[0].cases[0].device == "cpu"
    VALIDATOR.validate(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema_version",), 2, r"^schema_version: 2: this moedoctor reads schema_version 1"),
        (("schema_version",), True, r"^schema_version: true: expected an integer"),
        (("environment",), [], r"^environment: an array: expected an object"),
        (("scenarios",), {}, r"^scenarios: an object: expected an array"),
        (
            ("scenarios", 0, "verdict"),
            "maybe",
            r"^scenarios\[0\].verdict: 'maybe': expected one of proved, found",
        ),
        (("scenarios", 0, "line"), 0, r"^scenarios\[0\].line: 0: expected an integer, 1 or more"),
        (("scenarios", 0, "cases", 1, "tier"), ["model"], r"^scenarios\[0\].cases\[1\].tier: an array"),
        (("scenarios", 0, "cases", 1, "seconds"), "1", r"seconds: '1': expected a finite number"),
        (("scenarios", 0, "cases", 1, "seconds"), -1, r"seconds: -1: expected a finite number, 0 or more"),
        (("scenarios", 0, "cases", 1, "seconds"), 10**400, r"seconds: 1000"),
        (
            ("scenarios", 0, "cases", 1, "parameters", "top_k"),
            [2],
            r"parameters.top_k: an array: expected text",
        ),
        (("scenarios", 0, "cases", 1, "evidence"), None, r"evidence: null: expected an object"),
        (("scenarios", 0, "claims", 0, "reason"), 3, r"claims\[0\].reason: 3: expected text"),
        (("summary", "proved"), -1, r"^summary.proved: -1: expected an integer, 0 or more"),
        (("summary", "cases", "clean"), 0.5, r"^summary.cases.clean: 0.5: expected an integer"),
        (("summary", "interrupted"), 0, r"^summary.interrupted: 0: expected true or false"),
        (("findings", 0), None, r"^findings\[0\]: null: expected text"),
    ],
)
def test_wrong_values_are_refused_with_their_path(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = _document()
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        report_from_dict(data)


def test_a_missing_key_is_named() -> None:
    data = _document()
    del data["scenarios"][0]["cases"][3]["verdict"]
    with pytest.raises(ValueError, match=r"^scenarios\[0\].cases\[3\]: the key 'verdict' is missing"):
        report_from_dict(data)
    with pytest.raises(ValueError, match=r"^report: an array: expected an object"):
        report_from_dict([])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield value, key
        yield from _places(one)


@given(
    st.data(),
    st.sampled_from([None, True, -1, 0, 0.5, "", "proved", "reproduced", "model", [], {}, [1], {"a": []}]),
)
def test_the_schema_and_the_reader_refuse_the_same(data: st.DataObject, junk: Any) -> None:
    document = copy.deepcopy(_DOCUMENT)
    place, key = data.draw(st.sampled_from(list(_places(document))))
    if isinstance(place, dict) and data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = junk
    valid = VALIDATOR.is_valid(document)
    try:
        report_from_dict(document)
    except ValueError:
        assert not valid
    else:
        assert valid


def test_a_report_file_is_read(tmp_path: Path) -> None:
    text = json.dumps(_document(), indent=2)
    assert load_report(_write(tmp_path / "a.json", text)) == full_report()
    assert load_report(str(_write(tmp_path / "b.json", b"\xef\xbb\xbf" + text.encode()))) == full_report()


def _with(old: str, new: str) -> str:
    text = json.dumps(_DOCUMENT, indent=2)
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"", 1, "not JSON"),
        (b"\x00\x01\xff", 1, "not UTF-8"),
        (b'{\n"a":\n"\xe9"}', 3, "not UTF-8 at byte 8"),
        ("{}", 1, "report: the key 'schema_version' is missing"),
        ("[1]", 1, "report: an array: expected an object"),
        (_with('"schema_version": 1', '"schema_version": 3'), 2, "schema_version: 3: this moedoctor reads"),
        (_with('"command": "run"', '"moedoctor": "run"'), 4, "'moedoctor' occurs twice"),
        (_with('"gpu": "NVIDIA H200"', '"gpu": NaN'), 6, "NaN is not JSON"),
        (
            _with('"tier": "model"', '"tier": "cloud"'),
            1 + json.dumps(_DOCUMENT, indent=2).split('"tier"')[0].count("\n"),
            r"scenarios[0].cases[0].tier: 'cloud': expected one of",
        ),
    ],
)
def test_a_bad_file_gives_one_line_with_its_place(
    tmp_path: Path, content: str | bytes, line: int, message: str
) -> None:
    path = _write(tmp_path / "bad.json", content)
    with pytest.raises(ReportError) as caught:
        load_report(path)
    assert (caught.value.file, caught.value.line) == (str(path), line)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_a_report_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="No such file"):
        load_report(tmp_path / "none.json")
    with pytest.raises(ReportError, match="a folder, expected a report"):
        load_report(tmp_path)
    with pytest.raises(ReportError, match="cannot be read"):
        load_report("a\x00b")
    with (tmp_path / "huge.json").open("wb") as stream:
        stream.truncate(MAX_REPORT_BYTES + 1)
    with pytest.raises(ReportError, match="more than 64 MB"):
        load_report(tmp_path / "huge.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ReportError, match="not a regular file"):
        load_report(tmp_path / "pipe")


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0eN\\a\n', max_size=40).map(str.encode))
def test_no_bytes_give_anything_but_a_report_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = _write(tmp_path_factory.getbasetemp() / "fuzz.json", content)
    with pytest.raises(ReportError) as caught:
        load_report(path)
    assert len(str(caught.value).splitlines()) == 1
