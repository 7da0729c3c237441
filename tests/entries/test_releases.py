"""Statements of entries about releases rest on stored reports, or say that they do not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from moedoctor.entries import find_reports_folder, load_entries
from moedoctor.entries.entry import Affected, Entry, Run, parse_entry
from moedoctor.fixes.arch.flashinfer import list_releases
from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.results import load_report
from moedoctor.text import TextFileError
from moedoctor.upstream.releases.questions import load_answers
from tests.entries.test_entry import WHOLE

ROOT = Path(__file__).resolve().parents[2]

RUNS = [
    pytest.param(entry, affected, run, id=f"{entry.id}-{affected.package}-{run.release}-{run.tier}")
    for entry in load_entries().values()
    for affected in entry.releases
    for run in affected.runs
]


def _ran(
    package: str, release: str, tier: str, subject: str, backend: object, facts: Mapping[str, Any]
) -> bool:
    """Return True if a case with this subject ran that release of the package."""
    if package == "torch":
        return subject == "faulty" and str(facts["torch"]).partition("+")[0] == release
    # In an engine the control is the installed release with a broken checkpoint or setting; with an operator
    # of vLLM it is the installed operator with a broken argument.
    own = tier == "engine" or str(backend).startswith("vllm_")
    installed = subject == "installed" or (subject == "faulty" and own)
    return subject == f"{package}@{release}" or (installed and facts[package] == release)


@pytest.mark.parametrize(("entry", "affected", "run"), RUNS)
def test_a_run_is_what_its_report_says(entry: Entry, affected: Affected, run: Run) -> None:
    report = load_report(find_reports_folder() / f"{run.report}.json")
    verdicts = [
        case.verdict.value
        for scenario in report.scenarios
        if scenario.id == entry.id
        for case in scenario.cases
        if case.tier.value == run.tier
        and _ran(
            affected.package,
            run.release,
            run.tier,
            case.subject,
            case.parameters.get("backend"),
            report.environment,
        )
        and all(case.parameters.get(name) == value for name, value in run.cases.items())
    ]
    shown = [verdict for verdict in verdicts if verdict in ("reproduced", "clean")]
    assert shown, f"{run.report} has no case of {affected.package} {run.release} that ran"
    assert ("reproduced" in shown) is run.strikes


@pytest.mark.parametrize("entry", load_entries().values(), ids=lambda entry: entry.id)
def test_words_about_releases_are_made_of_them_and_say_what_was_not_run(entry: Entry) -> None:
    for affected in entry.releases:
        struck = {run.release for run in affected.runs if run.strikes}
        assert (affected.basis == "run") is ({affected.first, affected.last} <= struck)
        assert affected.range in entry.where
        assert ("read in the source" in affected.evidence) is (affected.basis == "read")
        assert affected.fixed is None or affected.fixed in entry.fixed


@pytest.mark.parametrize("entry", load_entries().values(), ids=lambda entry: entry.id)
def test_check_finds_a_failure_in_all_of_its_releases_and_no_others(entry: Entry) -> None:
    """Of those vLLM releases that moedoctor knows; a rule without a vLLM range holds for all of them."""
    ranges = [affected for affected in entry.releases if affected.package == "vllm"]
    if not ranges:
        return
    rules = [SpecifierSet(rule.when.packages.get("vllm", "")) for rule in entry.affects]
    for release in map(Version, load_releases()):
        struck = any(Version(part.first) <= release <= Version(part.last) for part in ranges)
        assert any(release in rule for rule in rules) is struck, release


RELEASES = """\
releases:
  - package: vllm
    first: "0.18.0"
    last: "0.19.1"
    fixed: "0.20.0"
    note: with care
    runs:
      - {release: "0.18.0", tier: kernel, report: nvidia-h200/nan_routing}
      - {release: "0.20.0", tier: kernel, report: nvidia-h200/nan_routing, strikes: false}
  - {package: torch, first: "2.14.0", last: "2.14.0"}
"""
ENTRY = WHOLE.replace('where: nowhere\nfixed: "no"\n', RELEASES)


def test_words_are_made_from_the_ranges() -> None:
    entry = parse_entry(ENTRY)
    assert entry.where == "vLLM 0.18.0 to 0.19.1, with care; torch 2.14.0"
    assert entry.fixed == "vLLM 0.20.0; no"
    first, second = entry.releases
    assert (first.basis, second.basis) == ("read", "read")
    assert first.evidence.startswith("run in 0.18.0 (kernel); gone in 0.20.0 (kernel); the rest was read")
    assert second.evidence == "read in the source, not run"


def test_a_report_outside_of_the_folder_is_refused() -> None:
    with pytest.raises(TextFileError, match="must match pattern"):
        parse_entry(ENTRY.replace("nvidia-h200/nan_routing}", "../secret}"))


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("MD002.never_pins", "From {clean} on"),
        ("MD009.asserts", "Up to {last} an assertion"),
        ("MD012.takes_one", "All releases from {first} to {last} have this text"),
        ("MD013.not_installed", 'fixed: "{clean}"'),
        ("MD014.quark", "from {first} on also Quark"),
        ("MD015.stops_without", "{first} and later"),
    ],
)
def test_since_and_up_to_are_those_of_the_sources_of_all_releases(question: str, words: str) -> None:
    id, _, name = question.partition(".")
    affected, clean = (list_answered(id, name, value) for value in ("affected", "clean"))
    text = (ROOT / "moedoctor" / "entries" / f"{id}.md").read_text()
    given = {"first": affected[0], "last": affected[-1], "clean": clean[0] if clean else ""}
    assert words.format(**given) in text


def list_answered(id: str, name: str, value: str) -> list[str]:
    """Return the known releases whose source gave this answer."""
    row = load_answers()[f"{id}.{name}"]
    return [release for release, answer in row.items() if answer == value]


def test_all_known_releases_were_asked_all_questions() -> None:
    asked = {f"{entry.id}.{each.name}" for entry in load_entries().values() for each in entry.questions}
    assert load_answers().keys() == asked
    known = {"vllm": list(load_releases()), "flashinfer": list(list_releases())}
    assert {release.flashinfer for release in load_releases().values()} <= {*known["flashinfer"]}
    for entry in load_entries().values():
        for question in entry.questions:
            assert list(load_answers()[f"{entry.id}.{question.name}"]) == known[question.package]
        packages = {question.package for question in entry.questions if question.decides}
        assert len(packages) <= 1, "a reading is that of one package"


@pytest.mark.parametrize("entry", load_entries().values(), ids=lambda entry: entry.id)
def test_ranges_have_questions_whose_answers_no_run_contradicts(entry: Entry) -> None:
    """`tests/test_release.py` holds that the ranges are those of the answers."""
    for affected in entry.releases:
        if affected.question is None:
            read = entry.unread or entry.id == "MD010"
            assert read or affected.basis == "run", "MD010 rests on the tables of variables"
            continue
        asked = {each.name: each for each in entry.questions}[affected.question]
        assert (asked.package, asked.decides) == (affected.package, True)
        known = list(load_answers()[f"{entry.id}.{asked.name}"])
        struck = list_answered(entry.id, asked.name, "affected")
        unknown = list_answered(entry.id, asked.name, "unknown")
        assert not [release for release in unknown if known.index(release) > known.index(struck[0])]
        for run in affected.runs:
            assert (run.release in struck) is run.strikes
