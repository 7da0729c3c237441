"""The page of a run: the answer first, the worst failure first, each case counted, 120 lines at most."""

import dataclasses
import re
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import POINTS, case, cases, crashed, report, reports, scenario

from moedoctor import results
from moedoctor.reporters.page import Fold, Span, Step, Table, strip_styles
from moedoctor.reporters.pages import run
from moedoctor.reporters.table import TableReporter, to_text
from moedoctor.reporters.text import format_environment, summarize
from moedoctor.text import escape_commands


def lines_of(given_report: results.Report, width: int | None = None) -> list[str]:
    return TableReporter().render(given_report, width=width).splitlines()


def flat(given_report: results.Report, width: int | None = None) -> str:
    return " ".join(" ".join(lines_of(given_report, width)).split())


@settings(max_examples=20)
@given(reports)
def test_the_answer_comes_first_then_the_worst_and_the_machine_last(given_report: results.Report) -> None:
    lines = lines_of(given_report, 10_000)
    assert lines[0] == f"- {summarize(given_report)}"
    assert lines[-2:-1] == [escape_commands(format_environment(given_report))]
    words = [line.split()[0] for line in lines if re.match(rf"({'|'.join(results.ScenarioVerdict)}) ", line)]
    ranks = [-results.VERDICTS[word].rank for word in words[: len(given_report.scenarios)]]
    if not any(member.affected for each in given_report.scenarios for member in each.cases):
        assert ranks == sorted(ranks)


@given(st.lists(cases, max_size=8))
def test_the_installed_release_is_clean_only_if_it_was_looked_at(members: list[results.CaseResult]) -> None:
    answer = run.find_installed_answer(scenario("proved", *members, case("faulty", "clean")))
    verdicts = {member.verdict.value for member in members if member.subject == "installed"}
    assert (answer == run.AFFECTED) == ("reproduced" in verdicts)
    if answer == run.CLEAN:
        assert "clean" in verdicts
        assert not verdicts & {"error", "reproduced"}
    assert (answer == run.NOT_TESTED) == (answer not in (run.AFFECTED, run.CLEAN))


def test_rows_that_differ_in_numbers_only_share_a_row_of_the_short_page() -> None:
    figures = ["13 of 128 rows", "7 of 64 rows", "no answer", "1.5e-3 of 2 rows"]
    members = [case("faulty", "reproduced", POINTS[n], figure=text) for n, text in enumerate(figures)]
    assert [(label, figure) for _, label, _, figure in rows(*members, detail=run.Detail.SHORT)] == [
        ("3 cases, such as top_k=2 scoring=softmax", "13 of 128 rows"),
        ("top_k=2 scoring=sigmoid", "no answer"),
    ]


def test_all_failures_have_a_line_and_the_figure_that_decides_is_never_cut() -> None:
    figure = "300 of 300 rows hold " + "a very " * 30 + "wrong sum"
    shows = scenario("found", case("installed", "reproduced", figure=figure))
    many = report(*[dataclasses.replace(shows, id=f"MD{number:03}") for number in range(1, 30)])
    lines = lines_of(many, 60)
    assert len(lines) <= 120
    # A table that keeps its limit by leaving failures out would be no answer.
    assert all(any(each.id in line for line in lines[:70]) for each in many.scenarios)
    text = " ".join(" ".join(lines).split())
    assert "more without details" in text
    assert f"reproduced: {figure}" in text


def test_the_three_answers_are_kept_apart() -> None:
    def judge(verdict: str, id: str, *verdicts: str) -> results.ScenarioResult:
        return scenario(verdict, *map(case, ("faulty", "fixed", "installed"), verdicts), id=id)

    affected = judge("found", "MD001", "reproduced", "clean", "reproduced")
    clean = judge("proved", "MD002", "reproduced", "reproduced", "clean")
    absent = judge("absent", "MD005", "clean", "clean")
    text = flat(report(absent, clean, affected))
    assert "our restatement of the failure, shows it in 2 of 3 scenarios; not in MD005" in text
    assert "Our fix removes it in 1 of 2; not in MD002" in text
    assert "affected by 1 (MD001), clean of 1 (MD002); not tested for 1: the scenario has no case" in text
    assert "Your vLLM was not tested: the scenario has no case for it (1)" in flat(report(absent))
    assert "Next: `moedoctor explain MD001`" in text


def test_claims_that_were_not_tested_are_left_out_but_not_with_v() -> None:
    claims = [results.ClaimResult(f"claim {each.value}", "a/b#1", each) for each in results.ClaimVerdict]
    short = report(scenario(claims=claims))
    assert re.findall(r"claim (\w+) \(", flat(short)) == ["confirmed", "refuted"]
    assert "claim untested" in TableReporter(verbose=True).render(short)


def rows(*members: results.CaseResult, detail: run.Detail = run.Detail.CASES) -> list[tuple[str, ...]]:
    """Return the rows of the table of cases as text."""
    *_, fold = run.run_page(report(scenario("proved", *members)), detail)
    assert isinstance(fold, Fold)
    (table,) = (block for block in fold.blocks if isinstance(block, Table))
    return [tuple(cell.text if isinstance(cell, Span) else cell for cell in row) for row in table.rows]  # type: ignore[misc]


def test_cases_skipped_for_one_reason_share_a_row() -> None:
    reasons = ["no vllm", "no vllm", "too large", "no vllm"]
    skipped = [case("installed", "skipped", POINTS[n], reason=why) for n, why in enumerate(reasons)]
    ran = case("installed", "clean", {**POINTS[0], "tokens": 1}, figure="no vllm")
    assert [(label, figure) for _, label, _, figure in rows(*skipped, ran)] == [
        ("3 cases", "no vllm"),
        ("tokens=128 top_k=2 scoring=sigmoid", "too large"),
        ("tokens=1 top_k=2 scoring=softmax", "no vllm"),
    ]


@given(st.lists(cases, min_size=1, max_size=8), st.sampled_from(run.Detail))
def test_no_case_is_lost(members: list[results.CaseResult], detail: run.Detail) -> None:
    # Labels of our own, because any text could look like a number of cases.
    named = [dataclasses.replace(each, parameters={"n": n}) for n, each in enumerate(members)]
    shown: Counter[str] = Counter()
    for _, label, verdict, _ in rows(*named, detail=detail):
        number = re.match(r"(\d+) cases", label)
        shown[verdict] += int(number[1]) if number else 1
    assert shown == Counter(member.verdict.value for member in members)


def test_equal_crashes_appear_once() -> None:
    other = case("fixed", "error", evidence={"death": "hang", "message": "no answer within 60 s"})
    same = crashed("installed", POINTS[0]), crashed("installed", POINTS[1])
    notes = run.crash_notes([*same, other, case("faulty", "clean")])
    assert [(note.death, note.others) for note in notes] == [("illegal memory access", 1), ("hang", 0)]
    assert notes[0].where == "installed kernel tokens=128 top_k=2 scoring=softmax"
    assert notes[0].stderr_tail == ("Traceback", "[red]last words[/]")
    assert notes[1].stderr_tail == ()


def test_an_unfinished_run_clears_nothing_and_lists_what_is_left_with_its_cost() -> None:
    left = results.Unfinished("--time-budget 180 s ended", {"installed": 3}, 2, 540.0, True)
    started = scenario("skipped", case("faulty", "reproduced"), case("installed", "clean"), unfinished=left)
    untried = scenario(
        "skipped",
        case("faulty", "skipped", reason="--time-budget 180 s ended before it finished"),
        id="MD008",
        name="offload_garbage",
        unfinished=results.Unfinished("--time-budget 180 s ended", {"faulty": 1}, 0, 600.0),
    )
    assert run.find_installed_answer(started) == run.NOT_TESTED
    text = to_text(run.run_page(report(started, untried), run.Detail.SHORT), width=80)
    words = " ".join(text.split())
    assert "clean of" not in text
    assert "4 cases and 2 claims of 2 failures did not run (MD001, MD008)" in words
    assert "about 9 min" in words
    assert "at most 10 min" in words
    assert "MD008 offload_garbage: skipped" not in text, "a failure of which nothing ran has one row"


def test_a_failure_without_a_case_for_the_installed_release_names_the_command_that_looks_for_it() -> None:
    missing = [scenario(id=id) for id in ("MD012", "MD020")]
    page = run.run_page(report(*missing), run.Detail.SHORT)
    steps = [strip_styles(block.text) for block in page if isinstance(block, Step)]
    assert "`moedoctor lint CHECKPOINT` looks for MD012, which a run does not test in your vLLM" in steps
    assert "`moedoctor check` looks for MD020, which a run does not test in your vLLM" in steps
