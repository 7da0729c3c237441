"""The page of a run: the table of cases, and crashes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from report_samples import POINTS, case, cases, crashed, report, scenario

from moedoctor.reporters.page import Span, Table
from moedoctor.reporters.pages.run import crash_notes, run_page, shared_parameters
from moedoctor.results import CaseResult


def rows(*members: CaseResult) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table of cases as text."""
    page = run_page(report(scenario("proved", *members)), full=False)
    (table,) = (block for block in page if isinstance(block, Table))
    return [tuple(cell.text if isinstance(cell, Span) else cell for cell in row) for row in table.rows]  # type: ignore[misc]


def test_shared_parameters_are_those_of_every_case() -> None:
    assert shared_parameters([case("faulty", "clean", point) for point in POINTS]) == {"tokens": 128}
    assert shared_parameters([]) == {}
    mixed = [case("faulty", "clean", {"a": 1, "b": 1, "c": 1}), case("fixed", "clean", {"a": True, "b": 1})]
    assert shared_parameters(mixed) == {"b": 1}


def test_cases_are_grouped_by_subject_tier_and_device_in_their_order() -> None:
    mixed = [case(subject, "clean", point) for point in POINTS for subject in ("faulty", "vllm@0.19.1")]
    table = rows(*mixed, case("vllm@0.19.1", "clean", device="cuda:1"))
    assert list(dict.fromkeys(group for group, *_ in table)) == [
        "faulty · model",
        "vllm@0.19.1 · kernel · cuda:0",
        "vllm@0.19.1 · kernel · cuda:1",
    ]
    assert table[0] == ("faulty · model", "top_k=2 scoring=softmax", "clean", "0 of 128 rows")


def test_a_row_names_what_varies_and_leaves_null_out() -> None:
    points = [{"experts": 8, "groups": None, "seed": 0}, {"experts": 64, "groups": 4, "seed": 0}]
    table = rows(*(case("fixed", "clean", point) for point in points))
    assert [label for _, label, *_ in table] == ["experts=8", "experts=64 groups=4"]


def test_cases_skipped_for_one_reason_share_a_row() -> None:
    reasons = ["no vllm", "no vllm", "too large", "no vllm"]
    skipped = [
        case("installed", "skipped", point, reason=why) for point, why in zip(POINTS, reasons, strict=True)
    ]
    ran = case("installed", "clean", {**POINTS[0], "tokens": 1}, figure="no vllm")
    assert [(label, figure) for _, label, _, figure in rows(*skipped, ran)] == [
        ("3 cases", "no vllm"),
        ("tokens=128 top_k=2 scoring=sigmoid", "too large"),
        ("tokens=1 top_k=2 scoring=softmax", "no vllm"),
    ]


@given(st.lists(cases, min_size=1, max_size=8))
def test_no_case_is_lost(members: list[CaseResult]) -> None:
    shown: Counter[str] = Counter()
    for _, label, verdict, _ in rows(*members):
        number, _, word = label.partition(" ")
        shared = word == "cases" and verdict == "skipped" and number.isdigit()
        shown[verdict] += int(number) if shared else 1
    assert shown == Counter(member.verdict.value for member in members)


def test_equal_crashes_appear_once() -> None:
    other = case("fixed", "error", evidence={"death": "hang", "message": "no answer within 60 s"})
    notes = crash_notes(
        [crashed("installed", POINTS[0]), crashed("installed", POINTS[1]), other, case("faulty", "clean")]
    )
    assert [(note.death, note.others) for note in notes] == [("illegal memory access", 1), ("hang", 0)]
    assert notes[0].where == "installed kernel tokens=128 top_k=2 scoring=softmax"
    assert notes[0].stderr_tail == ("Traceback", "[red]last words[/]")
    assert notes[1].stderr_tail == ()


def test_stderr_is_cleaned_line_by_line() -> None:
    evidence = {"death": "silent", "message": "m\n\x1b[1mx", "stderr_tail": ["a\rb", "\x1b[31mc\x00"]}
    (note,) = crash_notes([case("fixed", "error", evidence=evidence)])
    assert (note.message, note.stderr_tail) == ("m x", ("a", "b", "c"))
    (note,) = crash_notes([case("fixed", "error", evidence={"death": "silent", "stderr_tail": "one text"})])
    assert note.stderr_tail == ("one text",)
