"""What all formats have in common: they are found by name and can show any report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from report_samples import HOSTILE, case, full_report, report, reports, scenario

from moedoctor import catalogue
from moedoctor.interfaces import Reporter
from moedoctor.reporters.github import GithubReporter
from moedoctor.reporters.html import HtmlReporter
from moedoctor.reporters.json import JsonReporter
from moedoctor.reporters.junit import JunitReporter
from moedoctor.reporters.markdown import MarkdownReporter
from moedoctor.reporters.table import TableReporter
from moedoctor.results import Report, from_json, to_json

KINDS = (TableReporter, JsonReporter, MarkdownReporter, JunitReporter, GithubReporter, HtmlReporter)
OURS: dict[str, Reporter] = {kind.name: kind() for kind in KINDS}


def test_ours_are_found_through_the_entry_points() -> None:
    found = catalogue.load_reporters()
    assert [type(found[kind.name]) for kind in KINDS] == list(KINDS)


@pytest.mark.parametrize("name", OURS)
def test_a_report_from_a_file_reads_as_the_one_in_memory(name: str) -> None:
    original = report(
        scenario("found", case("installed", "reproduced", evidence={"x": (1.5, float("nan")), 8: HOSTILE})),
        *full_report().scenarios,
    )
    again = from_json(Report, json.loads(to_json(original)))
    assert OURS[name].render(original) == OURS[name].render(again)


@given(reports)
def test_every_format_can_show_any_report(report: Report) -> None:
    for reporter in OURS.values():
        text = reporter.render(report)
        assert text.endswith("\n")
        text.encode("utf-8")
        assert text == reporter.render(report)


@pytest.mark.parametrize("name", sorted(set(OURS) - {"json"}))
def test_no_terminal_escape_or_control_character_survives(name: str) -> None:
    hostile = report(
        scenario("found", case("installed", "reproduced", {HOSTILE: HOSTILE}, figure=HOSTILE), title=HOSTILE),
        environment={"gpu": HOSTILE, HOSTILE: [HOSTILE]},
        findings=(HOSTILE,),
    )
    text = OURS[name].render(hostile)
    assert all(character == "\n" or character.isprintable() for character in text)
    assert "\u202e" not in text


@pytest.mark.parametrize("name", sorted(set(OURS) - {"table"}))
def test_formats_for_machines_ignore_colour_and_width(name: str) -> None:
    whole = full_report()
    assert OURS[name].render(whole, colour=True, width=60) == OURS[name].render(whole)


def test_no_format_needs_torch_and_only_the_table_needs_rich() -> None:
    code = (
        "import sys\nfrom moedoctor.results import Report, Summary\n"
        "for name in ('github', 'html', 'json', 'junit', 'markdown', 'table'):\n"
        "    module = __import__(f'moedoctor.reporters.{name}', fromlist=['x'])\n"
        "    kind = getattr(module, name.capitalize() + 'Reporter')\n"
        "    if name != 'table': kind().render(Report('run', {}, (), Summary(), version='0'))\n"
        "print(sorted({'torch', 'rich'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
