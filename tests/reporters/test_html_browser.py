"""HTML reports in a real browser: no error, tables that work, whole without the script, and access for all.

`make browser` fetches axe-core and says how to install a browser.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_rows import engine_document, speed_row
from every_command import CALLS, prepare
from fleet_answers import write_answers

from moedoctor.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
AXE = ROOT / ".browser" / "package" / "axe.min.js"
STORED = {
    "run": "baselines/cpu.json",
    "bench of backends": "nvidia-h200-vllm-0.33.0/moe_backends.json",
    "engines": "nvidia-h200-vllm-0.33.0/offload_table_eager.json",
}
CALLED = {name: CALLS[name] for name in ("check", "explain", "lint", "plan", "replay")}
"""These pages have every kind of block: items, prose, places of files, tables and records."""
REPORTS = (*STORED, *CALLED, "bench of engines", "fleet")
SCHEMES = ("light", "dark")
WIDTHS = (390, 1440)
# Each report in two of the four cells, such that every pair of report, width and scheme is there.
PAIRWISE = [
    (name, width, SCHEMES[(number + column) % 2])
    for number, name in enumerate(REPORTS)
    for column, width in enumerate(WIDTHS)
]
OPEN_ALL = "(all) => all.forEach((each) => { each.open = true; })"
WIDE = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText)"

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, replayed_here: set[bool]) -> dict[str, Path]:
    """Return a page of every command: of stored reports, of calls, and of made-up engines and nodes."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("html")
    prepare(folder)
    if not (folder / "fleet").exists():
        write_answers(folder / "fleet")
    rows = [speed_row(name, batch, 50.0 * batch) for name in ("marlin", "triton") for batch in (1, 8)]
    (folder / "engines.json").write_text(json.dumps(engine_document(rows)))
    calls = {name: ["show", str(ROOT / "reports" / stored)] for name, stored in STORED.items()}
    calls |= {**CALLED, "bench of engines": ["show", "engines.json"]}
    calls["fleet"] = ["fleet", "run", "parity", "--from-reports", "fleet"]
    with contextlib.chdir(folder):
        for name, call in calls.items():
            assert main([*call, "-o", f"{name}.html"]) < 3
    return {name: folder / f"{name}.html" for name in calls}


@pytest.fixture
def show(browser: Any, files: dict[str, Path]) -> Iterator[Open]:
    """Give a function that opens a report; the test fails if the browser reports any error."""
    problems: list[str] = []
    contexts = []

    def show(name: str, *, width: int = 1440, scheme: str = "light", script: bool = True) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=script
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or problems.append(request.url))
        page.goto(files[name].as_uri())
        return page

    yield show
    for context in contexts:
        context.close()
    assert not problems


@pytest.mark.alone
@pytest.mark.parametrize(("name", "width", "scheme"), PAIRWISE)
def test_it_opens_within_a_second_and_is_not_wider_than_the_screen(show, files, name, width, scheme):
    page = show(name, width=width, scheme=scheme)
    assert files[name].stat().st_size <= 2_000_000
    load = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    assert min((page.reload(), page.evaluate(load))[1] for _ in range(3)) < 1000
    answer = page.locator("#answer").bounding_box()
    assert answer["y"] + 100 < 900
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (scheme == "light")
    page.locator("details").evaluate_all(OPEN_ALL)
    assert page.locator(".table").evaluate_all(WIDE) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def rows(page: Any, table: int = 0) -> list[list[str]]:
    """Return the texts of the visible rows of a table."""
    script = """(tables, n) => [...tables[n].tBodies[0].rows].filter((row) => !row.hidden)
        .map((row) => [...row.cells].map((cell) => cell.textContent.trim()))"""
    return page.locator("main .table > table").evaluate_all(script, table)  # type: ignore[no-any-return]


def test_a_table_sorts_by_mouse_and_keyboard(show: Open) -> None:
    page = show("run")
    before = [row[1] for row in rows(page)]
    head = page.locator("main .table > table").first.locator("th").nth(1)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert [row[1] for row in rows(page)] == sorted(before) != before
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert [row[1] for row in rows(page)] == sorted(before, reverse=True)


def test_a_table_filters_by_words_and_by_verdict(show: Open) -> None:
    page = show("run")
    whole = rows(page)
    search = page.get_by_label("Filter").first
    search.fill("MD011")
    assert [row[1] for row in rows(page)] == ["MD011 duplicate_ids"]
    assert page.locator("output").first.inner_text() == f"1 of {len(whole)} rows"
    search.fill("")
    page.locator(".tools select").first.select_option("absent")
    left = [row for row in whole if row[0] == "absent"]
    assert rows(page) == left
    assert 0 < len(left) < len(whole)


def test_a_link_of_the_overview_opens_its_section_and_evidence_is_behind_a_click(show: Open) -> None:
    page = show("run")
    section = page.locator("details.section", has=page.locator("h2", has_text="MD011"))
    assert section.get_attribute("open") is None
    page.locator("main .table a", has_text="MD011").first.click()
    page.wait_for_selector("details.section[open] > summary:has-text('MD011')")
    assert section.get_attribute("open") is not None
    evidence = section.locator("details.evidence").first
    table = evidence.locator("table").first
    assert not table.is_visible()
    evidence.locator("summary").press("Enter")
    assert table.is_visible()


@pytest.mark.parametrize("name", REPORTS)
def test_without_its_script_the_page_begins_with_the_answer_has_every_text_and_opens_on_paper(show, name):
    texts = "(cells) => cells.map((cell) => cell.textContent.replaceAll(/\\s+/g, ' ').trim())"
    cells = show(name).locator("td").evaluate_all(texts)
    page = show(name, script=False)
    first = page.locator("main > *").nth(1)
    assert first.get_attribute("id") == "answer"
    assert first.locator("dt").all_inner_texts() == ["Looked at", "Found", "What to do"]
    looked_at, found, to_do = (text.strip() for text in first.locator("dd").all_inner_texts())
    assert looked_at
    assert found not in ("", looked_at)
    assert to_do
    plain = page.locator("main").evaluate("(main) => main.textContent.replaceAll(/\\s+/g, ' ')")
    assert page.locator("tbody tr[hidden], input, button, select").count() == 0
    assert cells
    assert not [cell for cell in cells if cell not in plain]
    inside = page.locator("details:not([open]) > .body").first
    assert not inside.is_visible()
    page.emulate_media(media="print")
    assert inside.is_visible()


FOCUS = """() => {
    const at = document.activeElement, style = getComputedStyle(at);
    return at === document.body ? null : style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
}"""


@pytest.mark.parametrize("name", REPORTS)
def test_keys_reach_sort_open_and_filter_everything_and_the_focus_is_seen(show: Open, name: str) -> None:
    page = show(name)
    count = """() => [...document.querySelectorAll("summary, button, a[href], input, select")]
        .filter((each) => each.checkVisibility()).map((each) => each.tabIndex)"""
    assert set(page.evaluate(count)) == {0}
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate(FOCUS)
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'answer'")
    for _ in range(25):
        page.keyboard.press("Tab")
        outlined = page.evaluate(FOCUS)
        if outlined is None:
            break
        assert outlined, page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
    first = page.locator("summary:visible").first
    opened = [first.evaluate("(summary) => summary.parentElement.open")]
    for key in ("Enter", "Space"):
        first.press(key)
        opened.append(first.evaluate("(summary) => summary.parentElement.open"))
    assert opened == [opened[0], not opened[0], opened[0]]
    page.locator("details").evaluate_all(OPEN_ALL)
    heads = page.locator("main .table > table th:has(button)")
    assert not [head for head in heads.all_inner_texts() if not head.strip()]
    if heads.count():
        for key, order in (("Enter", "ascending"), ("Space", "descending")):
            heads.first.locator("button").press(key)
            assert heads.first.get_attribute("aria-sort") == order


@pytest.mark.parametrize(
    ("name", "scheme"), [(name, scheme) for name, width, scheme in PAIRWISE if width == WIDTHS[0]]
)
def test_axe_finds_no_serious_problem(show: Open, name: str, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: `make browser` fetches it with npm")
    page = show(name, scheme=scheme)
    page.locator("details").evaluate_all("(all) => all.slice(0, 60).forEach((each) => { each.open = true; })")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    start = time.perf_counter()
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    assert time.perf_counter() - start < 120
    assert found["passes"]
    serious = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
    assert not [(each["id"], each["nodes"][0]["html"][:200]) for each in serious]
