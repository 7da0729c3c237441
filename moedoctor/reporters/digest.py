"""The digest of a page: what fits into an issue. The answer comes first, and equal rows are counted.

`digest` shortens the page of any command, and `run_digest` makes that of a run. GitHub takes 65,536
characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from moedoctor.reporters.markdown_page import to_markdown
from moedoctor.reporters.page import (
    NOTHING_TO_DO,
    Answer,
    Block,
    Bullets,
    Fold,
    Heading,
    Item,
    Page,
    Paragraph,
    Preformatted,
    Prose,
    Span,
    Table,
    Text,
    beside_answer,
    plain,
    spans,
)
from moedoctor.reporters.pages.machine import environment_table, origin_table
from moedoctor.reporters.pages.replay import replay_page
from moedoctor.reporters.pages.run import (
    claim_item,
    notes,
    place,
    shared_parameters,
)
from moedoctor.reporters.pages.run_summary import collapsed, rank, three_answers
from moedoctor.reporters.text import count_of, summary_line
from moedoctor.results import CaseResult, CaseVerdict, ClaimVerdict, Report, ScenarioResult, ScenarioVerdict
from moedoctor.text import one_line, shorten

MOST_CHARACTERS = 60_000
_ABSTRACT = 3
_ABSTRACT_LINE = 300
"""Characters of a line of the abstract."""
_NOTE = 120
"""Characters that the note about what is left out may take."""
_CELL = 300
_LINE = 600


def digest(page: Page, answered: Answer) -> str:
    """Return the page of a command as Markdown of at most `MOST_CHARACTERS`.

    The abstract is what the page says for itself, or else `answered` in three lines.
    """
    blocks = [_collapsed(block) for block in beside_answer(page, answered)]
    titles = 1 if blocks and isinstance(blocks[0], Heading) and blocks[0].level == 1 else 0
    own: list[Block] = [block for block in page if isinstance(block, Prose) and block.in_answer]
    lines = (
        ("Looked at", answered.looked_at),
        ("Found", answered.found or ["nothing"]),
        ("To do", answered.to_do or [NOTHING_TO_DO]),
    )
    abstract = own or [Bullets([_line(name, texts) for name, texts in lines])]
    return fitted([*blocks[:titles], *abstract, *_folded(blocks[titles:])])


def _line(name: str, texts: Sequence[Text]) -> Text:
    return Span(f"{name}: ", "bold"), shorten("; ".join(map(plain, texts)), _ABSTRACT_LINE)


def run_digest(report: Report) -> str:
    """Return the digest of a run: three answers, what differs, then every failure folded."""
    scenarios = sorted(report.scenarios, key=rank)
    answers = list(three_answers(scenarios))[:_ABSTRACT] if scenarios else []
    head: list[Block] = [
        Heading(f"moedoctor {report.version}: {report.command}", 1),
        Bullets([shorten(one_line(text), _LINE) for text in answers] or [summary_line(report)]),
        *([] if report.capsule is None else replay_page(report.capsule, 2)),
        *notes(report, 40),
        Heading("What differs from the expected"),
    ]
    differing = [item for scenario in scenarios for item in _differences(scenario)]
    head += differing or [Paragraph("Nothing: every scenario that ran is proved.")]
    rows = [
        (Span(verdict, verdict), str(count), ", ".join(ids)) for verdict, count, ids in _by_verdict(scenarios)
    ]
    head += [
        Heading("Scenarios"),
        Table(("verdict", "number", "failures"), rows, "lrl"),
        Paragraph(summary_line(report)),
    ]
    folded = [Fold(_title(scenario), list(_scenario(scenario))) for scenario in scenarios]
    environment = _folded(environment_table(report.environment))
    return fitted([*head, *folded, *environment, *origin_table(report.origin)])


def fitted(page: Page, most: int = MOST_CHARACTERS) -> str:
    """Return the page as Markdown of at most `most` characters; what does not fit is left out and counted.

    What is folded comes last: it gives way to what is not, and of the folded blocks the last ones, the
    environment, have their place before the others.
    """
    whole = to_markdown(page)
    if len(whole) <= most:
        return whole
    open_blocks = [index for index, block in enumerate(page) if not isinstance(block, Fold)]
    folded = [index for index, block in enumerate(page) if isinstance(block, Fold)]
    room, chosen = most - _NOTE, {}
    for index in [*open_blocks, *folded[-2:], *folded[:-2]]:
        for block in _shorter(page[index]):
            size = len(to_markdown([block])) + 2
            if size <= room:
                chosen[index] = block
                room -= size
                break
    left = sum(1 for index, block in enumerate(page) if chosen.get(index) is not block)
    note = Paragraph(Span(f"{count_of(left, 'part')} cut or left out: --full has everything.", "dim"))
    return to_markdown([*(chosen[index] for index in sorted(chosen)), note])


def _shorter(block: Block) -> Iterator[Block]:
    """Give the block, then shorter versions of it."""
    yield block
    if isinstance(block, Table):
        rows = len(block.rows) // 2
        while rows:
            note = Span(f"… {len(block.rows) - rows} more rows", "dim")
            last: list[Text] = [note, *([""] * (len(block.header) - 1))]
            yield replace(
                block, rows=[*([_cut(cell) for cell in row] for row in block.rows[:rows]), last], behind=()
            )
            rows //= 2
    elif isinstance(block, Fold):
        blocks = list(block.blocks)
        while len(blocks) > 1:
            blocks = blocks[: len(blocks) // 2]
            yield Fold(block.title, [*blocks, Paragraph("… the rest is left out")])
        for first in blocks:
            yield from (Fold(block.title, [shorter]) for shorter in _shorter(first))
    elif isinstance(block, Preformatted):
        yield Preformatted(block.text[: _LINE * 4] + "\n…")
    elif isinstance(block, Bullets):
        number = len(block.items) // 2
        while number:
            items = [_cut(item) for item in block.items[:number]]
            yield Bullets([*items, f"… {len(block.items) - number} more"])
            number //= 2
    elif isinstance(block, Item):
        yield Item(
            shorten(block.word, _CELL),
            _cut(block.title),
            [(label, _cut(text)) for label, text in block.lines[:8]],
        )
    elif isinstance(block, (Heading, Paragraph)):
        yield replace(block, text=_cut(block.text))
    elif isinstance(block, Prose):
        yield Paragraph(shorten(one_line(block.markdown), _LINE))


def _cut(text: Any) -> Any:
    """Return a text of at most `_CELL` characters, without its styles if it has to be cut."""
    words = plain(text)
    return text if len(words) <= _CELL else shorten(words, _CELL)


def _collapsed(block: Block) -> Block:
    """Return a table with each row once, and how often it is there."""
    if not isinstance(block, Table) or block.grouped:
        return block
    keys = [tuple(tuple(spans(cell)) for cell in row) for row in block.rows]
    counts = Counter(keys)
    if len(counts) == len(keys):
        return block
    rows = dict(zip(keys, block.rows, strict=True))
    counted = [(*row, str(counts[key]) if counts[key] > 1 else "") for key, row in rows.items()]
    align = block.align.ljust(len(block.header), "l") + "r"
    return replace(block, header=(*block.header, "times"), rows=counted, align=align, behind=())


def _folded(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks with everything under the heading ``Environment`` folded."""
    page: list[Block] = []
    inside: list[Block] | None = None
    for block in blocks:
        if isinstance(block, Heading):
            inside = [] if block.text == "Environment" else None
            if inside is not None:
                page.append(Fold("Environment", inside))
                continue
        (page if inside is None else inside).append(block)
    return page


def _title(scenario: ScenarioResult) -> str:
    return f"{scenario.id} {scenario.name}: {scenario.verdict.value}"


def _by_verdict(scenarios: Sequence[ScenarioResult]) -> Iterator[tuple[str, int, list[str]]]:
    groups: dict[str, list[str]] = {}
    for scenario in scenarios:
        groups.setdefault(scenario.verdict.value, []).append(one_line(scenario.id))
    for verdict, ids in groups.items():
        yield verdict, len(ids), list(dict.fromkeys(ids))


def _differences(scenario: ScenarioResult) -> Iterator[Item]:
    """Give what is not as expected: the verdict, the cases that show it, and claims that are refuted."""
    refuted = [claim for claim in scenario.claims if claim.verdict is ClaimVerdict.REFUTED]
    if scenario.verdict in (ScenarioVerdict.PROVED, ScenarioVerdict.SKIPPED) and not refuted:
        return
    lines: list[tuple[str, Any]] = [("why", shorten(scenario.reason, _LINE))] if scenario.reason else []
    unexpected = [case for case in scenario.cases if _is_unexpected(case)]
    for where, cases in _places(unexpected):
        for label, verdict, figure in collapsed(cases, shared_parameters(scenario.cases)):
            words = f"{verdict}{f' ({label})' if label else ''}: {figure}"
            lines.append((where, shorten(words, _LINE)))
    lines += [("refuted", shorten(f"{claim.text}: {claim.reason or ''}", _LINE)) for claim in refuted]
    yield Item(scenario.verdict.value, f"{scenario.id} {scenario.title}", lines)


def _is_unexpected(case: CaseResult) -> bool:
    if case.verdict is CaseVerdict.SKIPPED:
        return False
    expected = case.expected
    if expected is None:
        expected = CaseVerdict.REPRODUCED if case.subject == "faulty" else CaseVerdict.CLEAN
    return case.verdict is not expected


def _places(cases: Sequence[CaseResult]) -> Iterator[tuple[str, list[CaseResult]]]:
    groups: dict[str, list[CaseResult]] = {}
    for case in cases:
        groups.setdefault(place(case), []).append(case)
    yield from groups.items()


def _scenario(scenario: ScenarioResult) -> Iterator[Block]:
    yield Paragraph(scenario.title)
    shared = shared_parameters(scenario.cases)
    rows = [
        (where, label, Span(verdict, verdict), figure)
        for where, cases in _places(scenario.cases)
        for label, verdict, figure in collapsed(cases, shared)
    ]
    if rows:
        yield Table(("subject", "parameters", "verdict", "figure"), rows)
    for claim in scenario.claims:
        yield claim_item(claim)
