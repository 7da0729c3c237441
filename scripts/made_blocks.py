"""Writes what is made from the code and from stored reports, blocks of documents and files, and checks it.

A block begins with ``<!-- made: KIND WORDS -->`` and ends with ``<!-- made:end -->``. `KINDS` says what each
kind is. With ``--write`` every block becomes what it would be now; without it each must be so already.

Exit code: 0 every block is what it would be, 1 one is not, 2 a block cannot be made.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import design_table
import plugin_table
import yaml
from packaging.version import Version
from typer.testing import CliRunner

from moedoctor.cli import app
from moedoctor.entries import load_entries
from moedoctor.results import ClaimVerdict
from moedoctor.scenario.file import ClaimDocument, make_schema
from moedoctor.upstream.engine.clear_prompts import TOKENS
from moedoctor.upstream.releases.questions import load_answers

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^(<!-- made: (\w+)([^\n]*?) -->\n)(.*?)^<!-- made:end -->$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^<!-- made:.*$", re.MULTILINE)


class Claim(NamedTuple):
    """The verdict of one stored report on a statement of somebody else."""

    id: str
    text: str
    source: str
    about: str
    verdict: str
    figures: str
    machine: str
    report: Path | None


def documents() -> Iterator[Path]:
    """Give the files that may hold blocks."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").glob("*.md"))
    yield from sorted((ROOT / "reports").rglob("README.md"))


def with_blocks(document: Path) -> str:
    """Return the text of a document with every block made anew. Raises ValueError, with the line."""
    text = document.read_text(encoding="utf-8")
    place = document.relative_to(ROOT)
    marks = sum(len(_MARK.findall(block[0])) for block in _BLOCK.finditer(text))
    if marks != len(_MARK.findall(text)) or marks != 2 * len(_BLOCK.findall(text)):
        raise ValueError(
            f"{place}: a block needs <!-- made: KIND --> before it and <!-- made:end --> after it"
        )

    def make(match: re.Match[str]) -> str:
        if match[2] not in KINDS:
            line = text.count("\n", 0, match.start()) + 1
            raise ValueError(f"{place}:{line}: no kind '{match[2]}' of block; known: {', '.join(KINDS)}")
        content = KINDS[match[2]](document, match[3].split())
        return f"{match[1]}{content}\n<!-- made:end -->"

    return _BLOCK.sub(make, text)


def help_text() -> str:
    """Return what ``moedoctor --help`` prints in 100 columns without color."""
    width = {"terminal_width": 98, "max_content_width": 98}  # click leaves a margin of two columns
    answer = CliRunner().invoke(app, ["--help"], prog_name="moedoctor", color=False, **width)
    lines = "\n".join(line.rstrip() for line in answer.stdout.strip().splitlines())
    return f"```text\n$ moedoctor --help\n{lines}\n```"


def failures() -> str:
    """Return the catalogue as a table."""
    from moedoctor.reporters.markdown_page import to_markdown
    from moedoctor.reporters.page import Span, Table

    rows = [
        (Span(entry.id, "code"), entry.name, entry.title, entry.where, entry.fixed)
        for entry in load_entries().values()
    ]
    return to_markdown([Table(("id", "name", "failure", "who has it", "fixed in"), rows)]).rstrip("\n")


def claims_table(document: Path, ids: Sequence[str]) -> str:
    """Return a row for each claim about these failures, or about all, and for each verdict on it.

    The figures are those of the newest release, whose report is the first of the row.
    """
    rows: dict[tuple[str, ...], list[Claim]] = {}
    for claim in _claims():
        if not ids or claim.id in ids:
            rows.setdefault(claim[:5], []).append(claim)
    cells = []
    for (id, text, source, about, verdict), alike in rows.items():
        links = dict.fromkeys(_link(document, claim.machine, claim.report) for claim in alike)
        words = (f"{text} ({_issue(source)})", about, f"**{verdict}**", alike[0].figures, ", ".join(links))
        cells.append((id, *words))
    return _table(("failure", "claim", "about", "verdict", "figures", "measured on"), cells)


def promises_table(document: Path, names: Sequence[str]) -> str:
    """Return a row for each promise, or each whose name begins with one of `names`, and for each machine."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "evidence"))
    from promises import judge_folder, load_promises  # evidence/promises.py

    cells = []
    for promise in load_promises(ROOT / "evidence" / "promises.yaml"):
        if promise.is_of_tests or (names and not promise.report.startswith(tuple(names))):
            continue
        about = (f"`{promise.report}`", promise.words, promise.bound)
        rows = []
        for folder in sorted((ROOT / "reports").glob("*-vllm-*")):
            file = folder / f"{promise.report}.json"
            for _, verdict, value in judge_folder(folder, [promise]) if file.exists() else ():
                machine = _link(document, _machine(_read(file)), file)
                measured = _count_prompts(_read(file), promise.value) or _number(value)
                rows.append((*about, measured, f"**{verdict}**", machine))
        cells += rows or [(*about, "", "not run", "")]
    table = _table(("name", "promise", "bound", "measured", "verdict", "on"), cells)
    if not any(row[3].endswith(" prompts") for row in cells):
        return table
    return f"{table}\n\nPrompts are those that the other engine decides clearly at each of {TOKENS} tokens."


def answers_table() -> str:
    """Return what the source of each known release answers to the questions of the entries."""
    files = {
        f"{entry.id}.{each.name}": each.file for entry in load_entries().values() for each in entry.questions
    }
    cells = []
    for name, answers in load_answers().items():
        runs = [(answer, list(run)) for answer, run in itertools.groupby(answers, answers.__getitem__)]
        spans = (f"{' to '.join(dict.fromkeys((run[0], run[-1])))}: {answer}" for answer, run in runs)
        cells.append((f"`{name}`", f"`{files[name]}`", "; ".join(spans)))
    return _table(("question", "read in", "releases of vLLM, or of FlashInfer for its files"), cells)


def kernels_table(document: Path, formats: Sequence[str]) -> str:
    """Return our time divided by each other backend's for every stored ``bench --backend``.

    A ratio is given where both results were right and both were timed in one run.
    """
    parts = []
    for file, report in _reports():
        rows = report.get("bench", {}).get("backends", {}).get("rows", ())
        times = {
            (row["quantization"], row["model"], row["backend"], row["tokens"]): row["time_us"]
            for row in rows
            if row.get("right") and row.get("time_us") and (not formats or row["quantization"] in formats)
        }
        tokens = sorted({key[3] for key in times})
        cells = []
        for kind, model, backend in sorted({key[:3] for key in times}):
            shares = [
                times[kind, model, "OURS", count] / times[kind, model, backend, count]
                if {(kind, model, "OURS", count), (kind, model, backend, count)} <= times.keys()
                else None
                for count in tokens
            ]
            if backend != "OURS" and any(shares):
                ratios = ("" if share is None else f"{share:.2f}" for share in shares)
                cells.append((f"{model}, {kind} beside {backend}", *ratios))
        if cells:
            head = ("our time divided by theirs, tokens:", *map(str, tokens))
            parts += [f"{_link(document, file.stem, file)}, {_machine(report)}:", _table(head, cells)]
    return "\n\n".join(parts)


def tiles_table(document: Path, _: Sequence[str]) -> str:
    """Return how much faster other tiles are than the rule of vLLM's Triton kernel for experts."""
    parts = []
    for file, report in _reports():
        tried: dict[str, list[dict[str, float]]] = {}
        for row in report.get("bench", {}).get("backends", {}).get("rows", ()):
            if row.get("tiles"):
                tried.setdefault(f"{row['model']}, {row['quantization']}", []).append(row["tiles"])
        cells = [
            (
                layer,
                str(len(batches)),
                _span([tiles["ratio"] for tiles in batches]),
                _span([tiles["file_ratio"] for tiles in batches if "file_ratio" in tiles]),
            )
            for layer, batches in tried.items()
        ]
        if cells:
            about = f"{_link(document, file.stem, file)}, {_machine(report)}; times as fast as the rule:"
            parts += [about, _table(("layer", "batches", "best tiles found", "vLLM's own file"), cells)]
    return "\n\n".join(parts)


def _span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "none"


def conform_table(document: Path, _: Sequence[str]) -> str:
    """Return who answers what, and below it the wrong answers, with the line that repeats each."""
    cells, lines = [], []
    for file in sorted((ROOT / "reports" / "conform").glob("*.json")):
        report = _read(file)
        counts, answers = report["summary"], report["answers"]
        undefined = sum(bool(each["undefined"]) for each in answers)
        shown = [str(counts[name]) for name in ("right", "wrong", "crashed", "refused")]
        about = f"{report['package']} on {report['machine']}"
        cells.append((_link(document, file.stem, file), about, *shown, str(undefined)))
        for each in answers:
            if each["verdict"] in ("wrong", "crashed"):
                name = " ".join(filter(None, (each["variant"], each["question"])))
                why = [each["reason"], *(["documented: " + each["undefined"]] if each["undefined"] else [])]
                words = f"- {file.stem}, {name}: {each['verdict']}: {'; '.join(why)}"
                lines.append(f"{words}  \n  `{each['repeat']}`")
    head = ("implementation", "package and machine", "right", "wrong", "crashed", "refused", "undefined")
    return "\n\n".join([_table(head, cells), *(["\n".join(lines)] if lines else [])])


def reports_table(document: Path, _: Sequence[str]) -> str:
    """Return a row for each stored report in the document's folder."""
    cells = []
    for file in sorted(document.parent.glob("*.json")):
        report = _read(file)
        origin = report.get("origin") or {}
        command = re.sub(r" (--format json|-o \S+)", "", origin.get("command_line") or "")
        made = " ".join(
            part for part in (str(origin.get("date", ""))[:10], str(origin.get("commit", ""))[:7]) if part
        )
        made += ", and changes that were not committed" if origin.get("dirty") else ""
        cells.append(
            (_link(document, file.stem, file), f"`{command}`" if command else "", made, outcome(report))
        )
    return _table(("report", "command", "made", "outcome"), cells)


def outcome(report: Mapping[str, Any]) -> str:
    """Return what came out of a stored report, in a few words."""
    summary = report.get("summary") or {}
    reasons = summary.get("reasons") or ()
    rows = (report.get("bench") or {}).get("backends", {}).get("rows", ())
    verdicts: dict[str, list[str]] = {}
    for scenario in report.get("scenarios") or ():
        verdicts.setdefault(scenario["verdict"], []).append(scenario["id"])
    claims = Counter(claim.verdict for claim in _claims_of(report) if claim.verdict != "untested")
    words = [f"{verdict}: {', '.join(ids)}" for verdict, ids in verdicts.items()]
    words += [f"claims {verdict}: {count}" for verdict, count in claims.items()]
    words += (
        [f"{sum(bool(row.get('right')) for row in rows)} of {len(rows)} results are right"] if rows else []
    )
    cut = summary.get("interrupted") or any(reason.startswith("interrupted") for reason in reasons)
    return "; ".join(words or reasons[:1] or ["nothing found"]) + ("; cut before its end" if cut else "")


KINDS: Mapping[str, Callable[[Path, Sequence[str]], str]] = {
    "help": lambda document, words: help_text(),
    "failures": lambda document, words: failures(),
    "layers": lambda document, words: _table(*design_table.table()),
    "plugin": lambda document, words: plugin_table.table(plugin_table.evidence()),
    "claims": claims_table,
    "promises": promises_table,
    "kernels": kernels_table,
    "tiles": tiles_table,
    "reports": reports_table,
    "conform": conform_table,
    "answers": lambda document, words: answers_table(),
}


@functools.cache
def _claims() -> Sequence[Claim]:
    """Return what the stored reports say about each claim of the scenarios, in the scenarios' order.

    A claim that nobody tested has one row, with the reason of one report that looked at it.
    """
    answers: dict[tuple[str, str], list[Claim]] = {}
    for file, report in _reports():
        for claim in _claims_of(report):
            answers.setdefault((claim.id, claim.text), []).append(claim._replace(report=file))
    claims: list[Claim] = []
    for (id, text), document in _read_asked_claims().items():
        stored = answers.get((id, text), [])
        tested = [answer for answer in stored if answer.verdict != "untested"]
        about = _about(document)
        none = Claim(id, text, document.source, about, "untested", "not measured yet", "", None)
        claims += tested or stored[:1] or [none]
    return claims


@functools.cache
def _read_asked_claims() -> Mapping[tuple[str, str], ClaimDocument]:
    """Return the claims of others that the scenarios ask about, by the id of the failure and the text."""
    files = (ROOT / "scenarios").rglob("*.yaml")
    scenarios = sorted((yaml.safe_load(file.read_bytes()) for file in files), key=lambda data: data["id"])
    documents = [
        (scenario["id"], ClaimDocument.model_validate(claim))
        for scenario in scenarios
        for claim in scenario.get("claims") or ()
    ]
    return {(id, claim.text): claim for id, claim in documents if claim.source != "moedoctor"}


def _about(claim: ClaimDocument) -> str:
    return "; ".join(filter(None, (claim.subject, claim.conditions)))


def _claims_of(report: Mapping[str, Any]) -> Iterator[Claim]:
    """Give what a report says about the claims of others that are still asked.

    A report may be older than a claim's subject and conditions, so its verdict is qualified by them.
    """
    for scenario in report.get("scenarios") or ():
        for claim in scenario["claims"]:
            document = _read_asked_claims().get((scenario["id"], claim["text"]))
            if document is not None:
                gpu = report["environment"].get("gpu")
                verdict, figures = document.qualify(ClaimVerdict(claim["verdict"]), claim.get("reason"), gpu)
                words = (document.text, document.source, _about(document), verdict.value, figures or "")
                yield Claim(scenario["id"], *words, _machine(report), None)


@functools.cache
def _reports() -> Sequence[tuple[Path, Mapping[str, Any]]]:
    """Return the stored runs and benchmarks, those on a GPU and of the newest vLLM first."""
    files = (file for file in sorted((ROOT / "reports").glob("*/*.json")) if file.parent.name != "baselines")
    stored = [(file, report) for file in files if (report := _read(file)).get("command") in ("run", "bench")]

    def rank(item: tuple[Path, Mapping[str, Any]]) -> tuple[bool, Version]:
        facts = item[1]["environment"]
        return facts.get("gpu") is not None, Version(facts.get("vllm") or "0")

    return sorted(stored, key=rank, reverse=True)


@functools.cache
def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _machine(report: Mapping[str, Any]) -> str:
    """Return ``NVIDIA H200, vLLM 0.33.0``, or the release of torch if there is no vLLM."""
    facts = report["environment"]
    release = f"vLLM {facts['vllm']}" if facts.get("vllm") else f"torch {facts['torch']}"
    return f"{facts.get('gpu') or 'CPU'}, {release}"


def _issue(source: str) -> str:
    """Return the source of a claim, as a link if it is a thread."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", source)
    return f"[{source}](https://github.com/{match[1]}/issues/{match[2]})" if match else source


def _link(document: Path, text: str, report: Path | None) -> str:
    """Return `text` as a link to the Markdown of a report, or to its JSON if it has none."""
    if report is None:
        return text
    page = report.with_suffix(".md")
    return f"[{text}]({os.path.relpath(page if page.exists() else report, document.parent)})"


def _count_prompts(report: Any, place: str) -> str:
    """Return of how many prompts the tokens are the same; nothing for a value that is no share of prompts."""
    from promises import look_up  # evidence/promises.py

    if re.search(r"\.(?:tokens|reference)_of$", place) is None:
        return ""
    return f"{' of '.join(str(look_up(report, each)) for each in place.split(' / '))} prompts"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown; a sentence if it has no rows."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    if not lines:
        return "Nothing is stored here yet."
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])


OTHERS: Mapping[Path, Callable[[], str]] = {
    ROOT / "scenarios" / "schema.json": lambda: json.dumps(make_schema(), indent=2) + "\n",
    ROOT / "moedoctor" / "plugin" / "evidence.json": lambda: (
        json.dumps(plugin_table.evidence(), indent=1) + "\n"
    ),
}
"""Files that are made as a whole: the schema that editors read, and the data of `moedoctor check`."""


def main(arguments: Sequence[str]) -> int:
    """Check; with ``--write`` write what is not up to date."""
    stale = 0
    makers = {**OTHERS, **{file: functools.partial(with_blocks, file) for file in documents()}}
    for file, make in makers.items():
        try:
            made = make()
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        if not file.is_file() or made != file.read_text(encoding="utf-8"):
            if "--write" in arguments:
                file.write_text(made, encoding="utf-8")
            else:
                stale = 1
                what = "" if file in OTHERS else "a made block "
                print(f"{file.relative_to(ROOT)}: {what}is not up to date: make readme", file=sys.stderr)
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
