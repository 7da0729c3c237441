"""Every format: found by name, valid for any report, and text of a stranger stays text in it."""

import json

import pytest
from hostile import problem
from hypothesis import example, given, settings
from report_readers import READERS, list_stored_runs
from report_samples import HOSTILE, STRANGE, case, full_report, report, reports, scenario

from moedoctor import catalogue
from moedoctor.reporters.table import TableReporter
from moedoctor.results import Report, from_json, load_report, to_json

REPORTERS = catalogue.load_reporters()


def test_ours_are_found_through_the_entry_points() -> None:
    assert set(REPORTERS) >= set(READERS)
    for name in READERS:
        assert type(REPORTERS[name]).__module__ == f"moedoctor.reporters.{name}"


def make_strange_report() -> Report:
    """Return a report in which a child died with each text of a stranger, which is everywhere else too."""
    scenarios = []
    for text in STRANGE:
        evidence = {"death": text, "message": text, "stderr_tail": [text, text]}
        died = case("faulty", "error", {text: text}, figure=text, reason=text, evidence=evidence)
        scenarios.append(scenario("error", died, title=text, reason=text, file=text, name=text))
    return report(*scenarios, findings=tuple(STRANGE), environment={text: text for text in STRANGE})


@settings(max_examples=10)
@given(reports)
@example(make_strange_report())
def test_any_report_is_valid_in_every_format_and_the_same_from_a_file(whole: Report) -> None:
    again = from_json(Report, json.loads(to_json(whole)))
    for name, read in READERS.items():
        text = REPORTERS[name].render(whole)
        assert again == whole or text == REPORTERS[name].render(again)
        assert text.endswith("\n")
        lines = [line for line in text.split("\n") if not (name == "github" and line.startswith("::"))]
        assert not problem("\n".join(lines)), name
        read(text, whole)


def test_numbers_that_json_lacks_and_keys_that_are_not_text_read_as_the_ones_in_memory() -> None:
    evidence = {"x": (1.5, float("nan")), 8: HOSTILE}
    strange = scenario("found", case("installed", "reproduced", evidence=evidence))
    original = report(strange, *full_report().scenarios)
    again = from_json(Report, json.loads(to_json(original)))
    for reporter in REPORTERS.values():
        assert reporter.render(original) == reporter.render(again)


def test_the_largest_stored_run_takes_no_more_than_a_format_may_and_120_lines() -> None:
    """JSON has its schema, and `test_html.py` takes this run too."""
    stored = load_report(list_stored_runs()[-1])
    for name in ("markdown", "junit", "github", "sarif"):
        READERS[name](REPORTERS[name].render(stored), stored)
    assert len(TableReporter().render(stored, width=60).splitlines()) <= 120


@pytest.mark.parametrize("name", sorted(set(READERS) - {"table"}))
def test_formats_for_machines_ignore_colour_and_width(name: str) -> None:
    whole = full_report()
    assert REPORTERS[name].render(whole, colour=True, width=60) == REPORTERS[name].render(whole)
