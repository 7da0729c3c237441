"""Cases arranged for reading."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from report_samples import POINTS, case, cases, crashed

from moedoctor.reporters.rows import crash_notes, group_cases, shared_parameters
from moedoctor.results import CaseResult, CaseVerdict


def test_shared_parameters_are_those_of_every_case() -> None:
    assert shared_parameters([case("faulty", "clean", point) for point in POINTS]) == {"tokens": 128}
    assert shared_parameters([]) == {}
    mixed = [case("faulty", "clean", {"a": 1, "b": 1, "c": 1}), case("fixed", "clean", {"a": True, "b": 1})]
    assert shared_parameters(mixed) == {"b": 1}


def test_cases_are_grouped_by_subject_tier_and_device_in_their_order() -> None:
    mixed = [case(subject, "clean", point) for point in POINTS for subject in ("faulty", "vllm@0.19.1")]
    groups = group_cases([*mixed, case("vllm@0.19.1", "clean", device="cuda:1")])
    assert [group.title for group in groups] == [
        "faulty · model",
        "vllm@0.19.1 · kernel · cuda:0",
        "vllm@0.19.1 · kernel · cuda:1",
    ]
    assert groups[0].rows[0].parameters == {"top_k": "2", "scoring": "softmax"}


def test_a_row_names_what_varies_and_leaves_null_out() -> None:
    points = [{"experts": 8, "groups": None, "seed": 0}, {"experts": 64, "groups": 4, "seed": 0}]
    (group,) = group_cases([case("fixed", "clean", point) for point in points])
    assert [row.label for row in group.rows] == ["experts=8", "experts=64 groups=4"]


def test_cases_skipped_for_one_reason_share_a_row() -> None:
    reasons = ["no vllm", "no vllm", "too large", "no vllm"]
    skipped = [
        case("installed", "skipped", point, reason=why) for point, why in zip(POINTS, reasons, strict=True)
    ]
    ran = case("installed", "clean", {**POINTS[0], "tokens": 1}, figure="no vllm")
    (group,) = group_cases([*skipped, ran])
    assert [(row.label, row.figure, row.cases) for row in group.rows] == [
        ("3 cases", "no vllm", 3),
        ("tokens=128 top_k=2 scoring=sigmoid", "too large", 1),
        ("tokens=1 top_k=2 scoring=softmax", "no vllm", 1),
    ]


@given(st.lists(cases, max_size=8))
def test_no_case_is_lost(some: list[CaseResult]) -> None:
    shown: Counter[CaseVerdict] = Counter()
    for group in group_cases(some):
        for row in group.rows:
            shown[row.verdict] += row.cases
            assert row.cases == 1 or row.verdict is CaseVerdict.SKIPPED
    assert shown == Counter(one.verdict for one in some)


def test_equal_deaths_are_told_once() -> None:
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
