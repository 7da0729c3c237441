"""The page of `moedoctor conform`: a row for each question, and how each wrong answer is repeated."""

from __future__ import annotations

from moedoctor.reporters.findings import Finding, Findings
from moedoctor.reporters.page import Block, Heading, Item, Paragraph, Span, Step, Table, Text
from moedoctor.testing.questions import Answer, ConformReport, Verdict, load_questions


def make_conform_page(report: ConformReport) -> list[Block]:
    """Return the badge, a table of questions by variants, and the answers that are not right."""
    page: list[Block] = [Heading(f"moedoctor: conform {report.target}", 1)]
    page.append(Paragraph(Span(report.badge, "bold")))
    page.append(Paragraph(f"{report.package} on {report.machine}, seed {report.seed}"))
    variants = list(dict.fromkeys(answer.variant for answer in report.answers))
    by_place = {(answer.question, answer.variant): answer for answer in report.answers}
    questions = load_questions(report.kind)
    asked = [name for name in questions if any((name, variant) in by_place for variant in variants)]
    rows = [
        (name, *(_show(by_place.get((name, variant))) for variant in variants), questions[name].asks)
        for name in asked
    ]
    page.append(Table(("question", *(variant or "answer" for variant in variants), "it asks"), rows))
    page += [
        Item(answer.verdict.value, answer.name, _list_lines(answer), tone=_choose_tone(answer))
        for answer in report.answers
        if answer.verdict not in (Verdict.RIGHT, Verdict.SKIPPED)
    ]
    if report.failed:
        page.append(Step("mend what does not pass: the Python line below each repeats its smallest example"))
    return page


def summarize(report: ConformReport) -> str:
    return report.badge


def find_in_conform(report: ConformReport, summary: str) -> Findings:
    """Return the answers that do not pass, with the line that repeats each."""
    questions = load_questions(report.kind)
    found, file = [], report.target.partition(":")[0]
    for answer in report.failed:
        rule, title = answer.entry or answer.question, questions[answer.question].asks
        message = f"{answer.name}: {answer.verdict.value}: {answer.reason}. {answer.repeat}"
        key, about = (answer.name,), report.target
        found.append(Finding(rule, "error", title, message, file, key=key, logical=about))
    passed = [each.name for each in report.answers if each.passes and each.verdict is not Verdict.SKIPPED]
    skipped = [(each.name, each.reason or "") for each in report.answers if each.verdict is Verdict.SKIPPED]
    titles = {question.name: (question.asks, question.why) for question in questions.values()}
    return Findings("conform", found, passed, skipped, summary, titles)


def _show(answer: Answer | None) -> Text:
    if answer is None or answer.verdict is Verdict.SKIPPED:
        return "–"
    return Span(answer.verdict.value, _choose_tone(answer))


def _choose_tone(answer: Answer) -> str:
    """Return a key of `TONES`."""
    if answer.verdict is Verdict.RIGHT:
        return "clean"
    return "note" if answer.passes else "damage"


def _list_lines(answer: Answer) -> list[tuple[str, Text]]:
    sizes = ", ".join(f"{name} {size}" for name, size in (answer.sizes or {}).items())
    more = (("with", sizes), ("documented", answer.undefined), ("failure", answer.entry))
    lines: list[tuple[str, Text]] = [("what", answer.reason or "")]
    lines += [(label, text) for label, text in more if text]
    return [*lines, ("repeat", Span(answer.repeat or "", "code"))]
