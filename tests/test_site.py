"""The documentation: it builds strictly, every link leads somewhere, and it needs nothing from elsewhere."""

import os
import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from processes_seen import run

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


@dataclass
class Read:
    """References of a page of the site."""

    ids: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    resources: set[str] = field(default_factory=set)
    """Files that a browser loads by itself."""


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
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    built = run(build, cwd=ROOT, env=environ)
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
    targets = {target for read in pages.values() for target in read.resources}
    assert not [target for target in targets if re.match(r"(https?:)?//", target)]
    for style in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", text), style


def test_every_file_of_docs_is_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    for guide in (ROOT / "docs").glob("*.md"):
        assert f'href="{guide.stem}.html"' in start, guide.name


def test_on_a_phone_the_last_column_and_whole_lines_of_code_are_on_the_screen(site, browser):
    page = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
    wide = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText)"
    for name in ("index", "start", "design", "wsl", "entries/MD002", "measured", "conformance"):
        page.goto((site / f"{name}.html").as_uri())
        assert page.locator("article pre > code, article .md-typeset__scrollwrap").evaluate_all(wide) == []
