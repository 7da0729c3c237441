"""Pages of the documentation that are made when it is built: MkDocs calls the functions ``on_…`` as a hook.

Entries become a page each, triage's signatures the page of symptoms, the Typer app the page of commands. The
README, CONTRIBUTING, the changelog, scenarios and reports are taken as they are. Links between files of the
repository lead to their pages; a link to a file without a page becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click
from typer.main import get_command

from moedoctor import catalogue
from moedoctor.cli import app
from moedoctor.diagnose.triage.signatures import Clue, load_clues, load_signatures
from moedoctor.entries import load_entries
from moedoctor.entries.entry import Entry
from moedoctor.reporters.markdown_page import to_markdown
from moedoctor.reporters.page import Table
from moedoctor.reporters.pages.explain import Explained

ROOT = Path(__file__).resolve().parent.parent
_TEXTS = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File of the repository -> its page."""
_MADE = re.compile(r"(?:entries/\w+|symptoms|commands)\.md")
"""The pages of `_make_pages`, to which files in docs/ may link."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_CODE = re.compile(r"(^ *```.*?^ *```[ ]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_SHORTEST_MESSAGE = 12
_LEAST_SURE = 0.2
"""Less sure signs are left out of the page of symptoms."""
_MOST_PHRASES, _SHORT = 6, 4
_SIGNS = ("the text says", "with words such as", "and it must also say", "how sure")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of entries and reports, and guides that it does not name, into the navigation."""
    known = [{f"{entry.id} {entry.name}": f"entries/{entry.id}.md"} for entry in load_entries().values()]
    reports = [
        {_report_name(path): path} for path in _sources() if path.endswith("README.md") and "/" in path
    ]
    named = set(re.findall(r"[\w-]+\.md", str(config.nav)))
    guides = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in named]
    filled = []
    for section in config.nav or ():
        ((title, items),) = section.items()
        if items == "entries":
            items = ["entries/index.md", *known]
        elif isinstance(items, list):
            items = [item for item in items if item != "reports"] + (reports if "reports" in items else [])
            items += guides if title == "Guides" else []
        filled.append({title: items})
    config.nav = filled
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that no file in docs/ holds."""
    for source, page in _sources().items():
        content = (ROOT / source).read_bytes()
        is_text = page.endswith(".md")
        files.append(
            File.generated(config, page, content=_relink(content.decode(), source) if is_text else content)
        )
    for name, text in _make_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the links of the files in docs/ lead to pages."""
    source = page.file.src_uri
    return markdown if page.file.generated_by else _relink(markdown, f"docs/{source}")


def _sources() -> Mapping[str, str]:
    """Return file of the repository -> the file of the site that it becomes."""
    places = [ROOT / name for name in _TEXTS]
    places += [*(ROOT / "reports").rglob("*.md"), *(ROOT / "reports").rglob("*.svg")]
    places += (ROOT / "scenarios").rglob("*.yaml")
    paths = sorted(place.relative_to(ROOT).as_posix() for place in places)
    return {path: _TEXTS.get(path, path) for path in paths}


def _report_name(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return text.splitlines()[0].lstrip("# ")


def _relink(text: str, source: str) -> str:
    """Return the Markdown of the file `source` with links between pages of the site."""
    sources = _sources()
    here = posixpath.dirname(sources.get(source, source.removeprefix("docs/")))

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if ":" in target or not path:
            return match[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if (ROOT / place).is_dir():
            place = f"{place}/README.md"
        page = place.removeprefix("docs/") if place.startswith("docs/") else sources.get(place)
        if page is None or not ((ROOT / place).is_file() or _MADE.fullmatch(page)):
            return label
        return f"{mark}[{label}]({posixpath.relpath(page, here or '.')}{hash_sign}{anchor})"

    parts = _CODE.split(text)
    # Code is left as it is. A link whose label is code spans several parts, so it is found first.
    held: list[str] = []

    def hold(part: str) -> str:
        held.append(part)
        return f"\0{len(held) - 1}\0"

    joined = "".join(hold(part) if index % 2 else part for index, part in enumerate(parts))
    linked = _LINK.sub(link, _with_lists(joined))
    return re.sub(r"\0(\d+)\0", lambda match: held[int(match[1])], linked)


def _with_lists(text: str) -> str:
    """Return Markdown for GitHub so that Python-Markdown finds the same lists.

    It wants an empty line before a list, and four spaces before an inner item.
    """
    lines: list[str] = []
    in_list = False
    for line in text.split("\n"):
        is_item = re.match(r" *(?:[-*]|\d+\.) ", line) is not None
        if is_item and not in_list and lines and lines[-1].strip():
            lines.append("")
        in_list = is_item or (in_list and bool(line.strip()))
        lines.append(f"  {line}" if re.match(r"  [-*] ", line) else line)
    return "\n".join(lines)


def _make_pages() -> Mapping[str, str]:
    pages = {f"entries/{entry.id}.md": _entry_page(entry) for entry in load_entries().values()}
    return {
        **pages,
        "entries/index.md": _entry_list(),
        "symptoms.md": _symptoms(),
        "commands.md": _commands(),
    }


def _entry_page(entry: Entry) -> str:
    runs = entry.name in catalogue.list_registered_names()
    page = to_markdown(Explained.from_entry(entry, runs=runs).make_page())
    links = {f"reports/{run.report}.md": run.report for each in entry.releases for run in each.runs}
    listed = [f"- [{name}](../{path})" for path, name in links.items() if (ROOT / path).is_file()]
    page = _with_lists(_with_links_to_entries(page, entry.id))
    if listed:
        page += "\n## Reports\n\n" + "\n".join(listed) + "\n"
    if (ROOT / "scenarios" / f"{entry.name}.yaml").is_file():
        page += f"\nThe cases and claims: [{entry.name}.yaml](../scenarios/{entry.name}.yaml).\n"
    return page


def _with_links_to_entries(page: str, own: str) -> str:
    """Return Markdown in which the ids of other entries are links, but in headings, links and code."""
    ids = "|".join(id for id in load_entries() if id != own)
    skipped = rf"^#.*$|`[^`\n]*`|\[[^\]\n]*\]\([^)]*\)|\b({ids})\b"

    def link(match: re.Match[str]) -> str:
        return f"[{match[1]}]({match[1]}.md)" if match[1] else match[0]

    return re.sub(skipped, link, page, flags=re.MULTILINE)


def _entry_list() -> str:
    rows = [(entry.id, entry.title, entry.where, entry.fixed) for entry in load_entries().values()]
    table = to_markdown([Table(("id", "failure", "who has it", "fixed in"), rows)])
    return f"""# Known failures

A page for each: who has it, what to do today, where it is fixed, how it works, and its claims.
Looking for a text in a log? See [In trouble](../symptoms.md).

{_with_links_to_entries(table, "")}"""


def _symptoms() -> str:
    head = """# In trouble

Find what your log, traceback or answer says; the entry says what to do. `moedoctor triage server.log`
does this for a whole file, weighs all signals, and knows the releases. A phrase alone is a sign, not a proof.

*How sure* is an estimate of how often a text with this sign, and with what must be there too, is about the
failure. `triage` raises or lowers it by everything else in the text."""
    messages: dict[str, list[str]] = {}
    for entry in load_entries().values():
        for text in _messages(entry):
            messages.setdefault(text, []).append(entry.id)
    lines = [head, "", "## A message", "", _row("failure", "the log says"), _row("---", "---")]
    for text, ids in sorted(messages.items(), key=lambda item: item[0].lower()):
        lines.append(_row(_to_entries(ids), _code(text, "message")))
    for title, silent in (("Wrong answers without an error", True), ("Other signs", False)):
        lines += ["", f"## {title}", "", _row("failure", "what is seen"), _row("---", "---")]
        lines += [_row(_to_entries(ids), _plain(sign)) for sign, ids in _signs(silent=silent).items()]
    lines += ["", "## Each failure"]
    for entry in load_entries().values():
        lines += ["", f"### {entry.id}: {_plain(entry.title)}", "", f"**Do today**: {_plain(entry.next)} — "]
        lines[-1] += f"[the entry](entries/{entry.id}.md)"
        if own := _messages(entry):
            lines += ["", "Messages:", "", *(f"- `{message}`" for message in own)]
        if rows := list(_signals(entry)):
            lines += ["", _row(*_SIGNS), _row("---", "---", "---", "---:"), *rows]
    return "\n".join([*lines, ""])


def _messages(entry: Entry) -> Sequence[str]:
    """Return what programs print if the failure strikes, from the entry."""
    return list(dict.fromkeys(text for text in _SPAN.findall(entry.detection) if _is_message(text)))


def _signs(*, silent: bool) -> Mapping[str, Sequence[str]]:
    """Return sign in words -> entries, the surest first; `silent` chooses the failures without a crash."""
    sure: dict[str, dict[str, float]] = {}
    for signature in load_signatures():
        for clue in (load_clues()[name] for name in signature.shows):
            if clue.says and signature.silent == silent and signature.confidence >= _LEAST_SURE:
                ids = sure.setdefault(clue.says, {})
                ids[signature.id] = max(ids.get(signature.id, 0), signature.confidence)
    return {sign: sorted(ids, key=lambda id: -ids[id]) for sign, ids in sorted(sure.items())}


def _to_entries(ids: Sequence[str]) -> str:
    return "<br>".join(f"[{id}](entries/{id}.md) {_plain(load_entries()[id].title)}" for id in ids)


def _is_message(text: str) -> bool:
    """Return True if a piece of code in an entry is what a program printed, not a command or a name."""
    words = not text.startswith(("moedoctor ", "--", "vllm ", "VLLM_", "MOEDOCTOR_"))
    return " " in text and len(text) >= _SHORTEST_MESSAGE and words


def _signals(entry: Entry) -> Iterator[str]:
    """Give the rows of the signatures of an entry, the surest first, each sign once."""
    own = [signature for signature in load_signatures() if signature.id == entry.id]
    given: set[tuple[str, str]] = set()
    for signature in sorted(own, key=lambda signature: -signature.confidence):
        needed = "; ".join(_says(group) for group in (*signature.near, *signature.anywhere))
        for name in signature.shows:
            if signature.confidence >= _LEAST_SURE and (name, needed) not in given:
                given.add((name, needed))
                sure = f"{signature.confidence:.0%}"
                yield _row(_plain(_says([name])), _phrases(load_clues()[name]), _plain(needed), sure)


def _says(names: Sequence[str]) -> str:
    """Return what a text says that has any of these clues."""
    return " or ".join(load_clues()[name].says or name.replace("_", " ") for name in names)


def _phrases(clue: Clue) -> str:
    needles = [needle.strip() for needle in clue.needles.split("|")]
    telling = [needle for needle in needles if len(needle) > _SHORT] or needles
    return " · ".join(map(_code, telling[:_MOST_PHRASES]))


def _commands() -> str:
    command = get_command(app)
    context = command.context_class(command, info_name="moedoctor")
    return get_docs_for_click(obj=command, ctx=context, name="moedoctor", title="Commands")


def _code(text: str, kind: str = "name") -> str:
    """Return code for the cell of a table, where backticks would keep the backslash before ``|``."""
    escaped = re.sub(r"[][|*_`\\<>&]", lambda match: f"&#{ord(match[0])};", text)
    return f'<code class="{kind}">{escaped}</code>'


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _plain(text: str) -> str:
    """Return text whose characters mean nothing to Markdown; code between backticks stays code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        part if index % 2 else re.sub(r"([*_<>\[\]#])", r"\\\1", part) for index, part in enumerate(parts)
    )
