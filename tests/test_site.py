"""The documentation: it builds strictly, every link leads somewhere, and it needs nothing from elsewhere."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from moedoctor.cli import app
from moedoctor.diagnose.triage.signatures import load_signatures
from moedoctor.entries import load_entries

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


@dataclass
class Read:
    """What a page of the site refers to."""

    ids: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    resources: set[str] = field(default_factory=set)
    """What a browser loads by itself."""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.read = Read()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.read.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.read.links.add(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.read.resources.add(values["href"])
        elif values.get("src"):
            self.read.resources.add(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material: make setup")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Read]:
    pages = {}
    for path in site.rglob("*.html"):
        reader = _Reader()
        reader.feed(path.read_text(encoding="utf-8"))
        pages[path] = reader.read
    return pages


def test_every_internal_link_and_anchor_leads_somewhere(site: Path, pages: dict[Path, Read]) -> None:
    lost = []
    for page, read in pages.items():
        for target in read.links | read.resources:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            place = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            place = place / "index.html" if place.is_dir() else place
            anchor = unquote(parts.fragment)
            if not place.is_file() or (anchor and anchor not in pages[place].ids | {"__top"}):
                lost.append(f"{page.relative_to(site)}: {target}")
    assert not lost
    assert sum(len(read.links) for read in pages.values()) > 1000


def test_no_page_loads_anything_from_elsewhere(site: Path, pages: dict[Path, Read]) -> None:
    loaded = {
        target for read in pages.values() for target in read.resources if re.match(r"(https?:)?//", target)
    }
    assert not loaded
    for style in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", text), style


def test_there_is_a_page_for_each_entry_with_its_words_claims_and_links(site: Path) -> None:
    for entry in load_entries().values():
        text = (site / "entries" / f"{entry.id}.html").read_text(encoding="utf-8")
        for heading in ("What happens", "Who is affected", "How to see it", "Fix", "Links"):
            assert f">{heading}<" in text, (entry.id, heading)
        assert all(f'href="{link.url}"' in text for link in entry.links), entry.id
        assert "<p>- " not in text, entry.id
    routing = (site / "entries" / "MD001.html").read_text(encoding="utf-8")
    claims = routing.partition("Claims, and what came out")[2]
    assert re.search(r"<li>[^<]*<strong>confirmed</strong>(?:(?!</ul>).)*<li>nvidia-h200", claims, re.DOTALL)
    assert 'href="../reports/nvidia-h200/nan_routing.html"' in routing


def test_symptoms_commands_and_functions_have_their_places(site: Path, pages: dict[Path, Read]) -> None:
    symptoms = html.unescape((site / "symptoms.html").read_text(encoding="utf-8"))
    assert all(f"entries/{id}.html" in symptoms for id in {signature.id for signature in load_signatures()})
    messages, _, signs = symptoms.partition(">Wrong answers without an error<")
    (row,) = re.findall(
        r"<tr>(?:(?!</tr>).)*RuntimeError: b_scales is not on GPU.*?</tr>", messages, re.DOTALL
    )
    assert 'href="entries/MD003.html"' in row
    assert "is the same for both calls" not in symptoms, "text between two pieces of code is no message"
    (row,) = re.findall(
        r"<tr>(?:(?!</tr>).)*the output is wrong.*?</tr>", signs.partition("<h3")[0], re.DOTALL
    )
    assert 'href="entries/MD008.html"' in row
    from typer.main import get_command

    commands: Any = get_command(app)
    ids = pages[site / "commands.html"].ids
    assert {f"moedoctor-{name}" for name in commands.commands} <= ids
    functions = pages[site / "python.html"].ids
    assert {"moedoctor.fixes.routing.topk_softmax", "moedoctor.interfaces.Fault.judge"} <= functions


def test_the_site_opens_and_searches_from_a_disk(site: Path) -> None:
    """In Chromium, with file:// and without a network."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make setup")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium: install the distribution's package")
    problems: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(offline=True, viewport={"width": 390, "height": 844})
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: _note_request(request.url, problems))
        for name in ("index", "start", "symptoms", "entries/MD003", "commands", "python", "evidence"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        page.locator("label[for=__search]").first.click()
        page.locator("input[name=query]").press_sequentially("b_scales")
        first = page.locator(".md-search-result__link").first
        first.wait_for(timeout=20_000)
        assert "MD003" in " ".join(page.locator(".md-search-result__link").all_inner_texts())
        browser.close()
    assert not problems


def _note_request(url: str, problems: list[str]) -> None:
    if url.startswith(("http:", "https:", "ws:")):
        problems.append(url)


def test_every_file_of_docs_is_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    for guide in (ROOT / "docs").glob("*.md"):
        assert f'href="{guide.stem}.html"' in start, guide.name
