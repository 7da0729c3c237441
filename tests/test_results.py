"""Records to and from JSON: writing, reading back, and the messages of refusals."""

import copy
import enum
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import HOSTILE, case, full_report, list_places, report, scenario

from moedoctor.reporters.schemas import make_schema
from moedoctor.results import Report, ReportError, Tier, find_worst, from_json, load_report, to_json, to_plain

SCHEMA = make_schema("run")
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
DOCUMENT = to_plain(full_report())
REPORTS = Path(__file__).parent.parent / "reports"
CASE = ("scenarios", 0, "cases", 1)


_OTHERS = ("fleet", "recorded_", "crash_engines_")
STORED = sorted(file for file in REPORTS.glob("[nr]*/*.json") if not file.stem.startswith(_OTHERS))


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_stored_reports_are_read_and_written_again_as_they_are(file: Path) -> None:
    stored = json.loads(file.read_text(encoding="utf-8"))
    read = to_plain(load_report(file))
    assert {key: read[key] for key in stored if key in read and key != "summary"} == {
        key: value for key, value in stored.items() if key in read and key != "summary"
    }


def test_figures_that_are_not_finite_become_text() -> None:
    evidence = {"a": math.nan, "b": [math.inf, (-math.inf, 1.5)], "c": {"d": math.nan}}
    record = report(scenario("proved", case("faulty", "reproduced", {"x": math.inf}, evidence=evidence)))
    data = json.loads(to_json(record))
    written = data["scenarios"][0]["cases"][0]
    assert written["evidence"] == {"a": "nan", "b": ["inf", ["-inf", 1.5]], "c": {"d": "nan"}}
    assert written["parameters"] == {"x": "inf"}
    assert to_plain(from_json(Report, data)) == data


def test_enums_whole_number_keys_and_broken_text_are_written() -> None:
    class Colour(enum.IntEnum):
        RED = 3

    written = to_plain({8: Colour.RED, "tier": Tier.KERNEL, "text": HOSTILE})
    assert (written["8"], written["tier"]) == (3, "kernel")
    to_json(written).encode("utf-8")


LOOP: dict[str, Any] = {}
LOOP["again"] = LOOP


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        ({"a": {1, 2}}, r"^scenarios\[0\].cases\[0\].evidence.a: a set cannot be written"),
        ({"a": [object()]}, r"evidence.a\[0\]: a object cannot be written"),
        ({"a": {None: 1}}, r"evidence.a: the key None is a NoneType"),
        ({"a": {1: 1, "1": 2}}, r"evidence.a: two of its keys are the same text"),
        (LOOP, "nested more than"),
    ],
)
def test_a_value_outside_json_is_refused_with_its_path(evidence: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_json(report(scenario("proved", case("faulty", "reproduced", evidence=evidence))))


def test_keys_of_a_later_version_are_ignored_and_ours_may_be_absent() -> None:
    data = copy.deepcopy(DOCUMENT)
    for place in (data, data["scenarios"][0], data["scenarios"][0]["cases"][0], data["summary"]):
        place["a_later_addition"] = {"x": 1}
    assert from_json(Report, data) == full_report()
    del data["findings"], data["summary"]["interrupted"], data["scenarios"][0]["line"]
    del data["scenarios"][0]["cases"][0]["device"]
    read = from_json(Report, data)
    assert (read.findings, read.scenarios[0].line, read.scenarios[0].cases[0].device) == ((), 1, "cpu")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("scenarios",), {}, "scenarios: must be a list"),
        (("scenarios", 0, "verdict"), "maybe", "scenarios[0].verdict: must be 'proved', 'found'"),
        ((*CASE, "seconds"), -1, "seconds: must be greater than or equal to 0, not -1"),
        ((*CASE, "evidence"), None, "evidence: must be a mapping (key: value), not null"),
        (("summary", "interrupted"), 0, "summary.interrupted: must be a valid boolean"),
    ],
)
def test_wrong_values_are_refused_with_their_path(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = copy.deepcopy(DOCUMENT)
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ReportError) as caught:
        from_json(Report, data)
    assert message in str(caught.value)
    assert not VALIDATOR.is_valid(data)


def test_a_time_beyond_every_float_is_named() -> None:
    data = copy.deepcopy(DOCUMENT)
    data["scenarios"][0]["cases"][0]["seconds"] = 10**400
    with pytest.raises(ReportError, match="seconds: must be a finite number"):
        from_json(Report, data)


JUNK = st.sampled_from([None, True, -1, 0, 0.5, "", "proved", "reproduced", "model", [], {}, [1], {"a": []}])


@given(st.data(), JUNK)
def test_the_schema_refuses_what_the_reader_refuses(data: st.DataObject, junk: Any) -> None:
    document = copy.deepcopy(DOCUMENT)
    place, key = data.draw(st.sampled_from(list_places(document)))
    if isinstance(place, dict) and data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = junk
    try:
        from_json(Report, document)
    except ReportError:
        assert not VALIDATOR.is_valid(document)


def _with(old: str, new: str) -> str:
    text = to_json(full_report())
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ":1: not JSON"),
        ('{\n"a": 1,\n}', ":3: not JSON"),
        (b"\x01\xff", ":1: is not UTF-8"),
        (b'{\n"a":\n"\xe9"}', ":3: is not UTF-8 text (byte 0xe9)"),
        ("{}", "command: is missing"),
        ("[1]", "must be a mapping (key: value), not a list"),
        (_with('"schema_version": 1', '"schema_version": 3'), "schema_version: 3: this moedoctor reads"),
        (_with('"schema_version": 1', '"schema_version": true'), "schema_version: True: this moedoctor"),
        (_with('"command": "run"', '"moedoctor": "run"'), "the key 'moedoctor' occurs twice in one object"),
        (_with('"gpu": "NVIDIA H200"', '"gpu": NaN'), "the number NaN is not finite"),
        (_with('"gpu": "NVIDIA H200"', '"gpu": 1e999'), "the number 1e999 is not finite"),
        (_with('"gpu": "NVIDIA H200"', f'"gpu": {"9" * 5000}'), "a number of too many digits"),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_a_bad_file_gives_one_line_with_its_place(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ReportError) as caught:
        load_report(path)
    shown = str(caught.value)
    assert shown.startswith(f"{path}:")
    assert message in shown
    assert len(shown) < 400
    assert shown.isprintable()


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0eN\\a\n', max_size=40).map(str.encode))
def test_no_bytes_give_anything_but_a_report_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(content)
    with pytest.raises(ReportError) as caught:
        load_report(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, "nan", "inf"])
def test_the_worst_of_scores_is_one_that_is_not_finite_wherever_it_is(bad: float | str) -> None:
    for scores in ((0.5, bad, 2.0), (bad, 0.5), (0.5, bad), (bad,)):
        assert find_worst(*scores) == math.inf
    assert find_worst(0.5, 2.0, "1.5") == 2.0
    assert find_worst() == 0.0
