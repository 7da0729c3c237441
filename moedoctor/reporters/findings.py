"""Findings of a command, in one shape: the formats for machines (SARIF, JUnit, GitHub) are made from it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

from moedoctor.entries import load_entries
from moedoctor.reporters.text import count_of
from moedoctor.results import VERDICTS, Report
from moedoctor.text import TextFileError, join_lines, list_names, read_text

if TYPE_CHECKING:
    from moedoctor.diagnose.check.records import CheckResult
    from moedoctor.diagnose.preflight.records import PreflightDocument
    from moedoctor.reporters.pages.audit import AuditDocument
    from moedoctor.reporters.pages.lint import LintDocument
    from moedoctor.reporters.pages.triage import TriageDocument

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
"""The worst first."""
ENVIRONMENT = "environment"
"""The rule, and the place, of what is wrong with a machine and in no entry."""
_PACKAGES = ("vllm", "flashinfer-python", "torch")
_PINNING = (
    "*requirements*.txt",
    "pyproject.toml",
    "setup.cfg",
    "environment.y*ml",
    "*Dockerfile*",
    "*compose*.y*ml",
)
"""Names of files that choose the packages of an environment."""
_MOST_PINNING = 1_000_000
_ID = re.compile(r"[A-Z]{2}\d{3}\b")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and where."""

    rule: str
    """The id of a known failure, or the name of a check."""
    level: Level
    title: str
    message: str
    """The observation, and what to do."""
    file: str
    """A path relative to the working directory, with ``/``."""
    line: int | None = None
    confidence: float | None = None
    """Above 0 and at most 1; None if it was reproduced or read."""
    key: tuple[str, ...] = ()
    """The finding's name, beside rule and file: the same in every run and if lines move."""
    logical: str = ""
    """The finding's subject if it is no file: the environment, a tensor."""
    item: str = ""
    """The thing that was looked at, as the findings' `passed` name it; empty for the rule."""


@dataclass(frozen=True)
class Findings:
    """Everything that a command looked at: what it found, what passed, and what it could not look at."""

    command: str
    found: Sequence[Finding] = ()
    passed: Sequence[str] = ()
    """Names of checks that found nothing."""
    skipped: Sequence[tuple[str, str]] = ()
    """(name of a check, why it was not decided)."""
    summary: str = ""
    titles: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Rule -> (title, what it does), for rules that are in no entry."""


def make_relative(path: str | os.PathLike[str]) -> str:
    """Return a path as a report may name it: below the working directory, else only its last part."""
    text = os.fspath(path)
    here = os.path.normpath(text)
    if os.path.isabs(here):
        try:
            here = os.path.relpath(here)
        except (OSError, ValueError):  # the working directory is gone, or on another drive
            here = ".."
    parts = PurePath(here).parts
    if not parts or parts[0] == ".." or os.path.isabs(here):
        return PurePath(text).name or "."
    return "/".join(parts)


def find_in_run(report: Report) -> Findings:
    """Return the scenarios that are found, failed or broken, and what is worse than the baseline."""
    found = []
    for scenario in report.scenarios:
        look = VERDICTS[scenario.verdict]
        if look.wrong and look.sarif:
            why = scenario.reason or f"the scenario is {scenario.verdict.value}"
            step = (
                f"`moedoctor explain {scenario.id}` says what to do" if scenario.id in load_entries() else ""
            )
            message = f"{scenario.verdict.value}: {why}. {step}"
            file = make_relative(scenario.file)
            line, name = scenario.line, (scenario.name,)
            found.append(Finding(scenario.id, look.sarif, scenario.title, message, file, line, key=name))
    places = {scenario.id: make_relative(scenario.file) for scenario in report.scenarios}
    for text in report.findings:
        match = _ID.match(text)
        rule = match[0] if match else "baseline"
        file = places.get(rule, "scenarios")
        # The figures differ from run to run, and the regression is the same.
        key = ("baseline", _NUMBER.sub("#", text))
        title = "worse than the baseline"
        found.append(Finding(rule, "error", title, f"worse than the baseline: {text}", file, key=key))
    titles = {scenario.id: (scenario.title, "") for scenario in report.scenarios}
    titles["baseline"] = ("worse than the baseline", "A verdict or a figure is worse than in the baseline.")
    return Findings("run", found, titles=titles)


def find_pin(package: str) -> tuple[str, int | None]:
    """Return the file and line below the working directory that choose a package, or `ENVIRONMENT`."""
    name = re.escape(package)
    chosen = re.compile(
        rf"(?<![\w./#-]){name}(?:\[[^\]]{{0,200}}\])?\s*(?:[=<>~!]=|[<>@])|{name}/{name}-\w+:"
    )
    for pattern in _PINNING:
        with contextlib.suppress(TextFileError, OSError):  # the working directory may be gone
            for file in list_names(Path(), pattern):
                lines = read_text(Path(file), _MOST_PINNING).splitlines()
                for number, line in enumerate(lines, 1):
                    if chosen.search(line):
                        return file, number
    return ENVIRONMENT, None


def find_in_check(result: CheckResult, summary: str) -> Findings:
    """Return the failures that can strike an environment, and its problems, at the lines that choose it."""
    first_words = (each.what.split()[0] for each in result.problems)
    packages = dict.fromkeys((*_PACKAGES, *first_words))
    pins = {name: pin for name in packages if (pin := find_pin(name))[1] is not None}

    def locate(facts: Iterable[str]) -> tuple[str, int | None]:
        return next((pins[name] for name in (*facts, *_PACKAGES) if name in pins), (ENVIRONMENT, None))

    found = []
    about = result.target
    for finding in result.findings:
        level, message = _choose_level(finding.severity), f"{finding.why}. {finding.next_step}"
        place, sure = locate(finding.evidence), finding.confidence
        found.append(Finding(finding.id, level, finding.title, message, *place, sure, logical=about))
    for problem in result.problems:
        what, level = problem.what, _choose_level(problem.severity)
        message = f"{what}: {problem.why}. {problem.next_step}"
        place, key = locate(what.split()), (_NUMBER.sub("#", what),)
        found.append(Finding(ENVIRONMENT, level, what, message, *place, key=key, logical=about))
    skipped = [(_name(note.id), note.needs or note.why) for note in result.conditional]
    skipped += [(f"{each.id} {each.title}", f"ignored: {each.reason}") for each in result.ignored]
    decided = {finding.id for finding in (*result.findings, *result.conditional)}
    decided |= {each.id for each in result.ignored}
    passed = [_name(id) for id in load_entries() if id not in decided]
    if result.without_vllm:
        skipped += [(name, result.without_vllm) for name in passed]
        passed = []
    titles = {ENVIRONMENT: ("packages or settings that do not fit together", "Wrong here, and in no entry.")}
    return Findings("check", found, passed, skipped, summary, titles)


def find_in_lint(document: LintDocument, summary: str) -> Findings:
    """Return the damage of a checkpoint, by the document of a lint: each check at the first of its places."""
    from moedoctor.diagnose.checkpoint.findings import CHECKS, Place

    found = []
    for finding in document.findings:
        name, evidence = finding.check, finding.evidence
        first = evidence.places[0] if evidence.places else Place("", "", "")
        value = f": {first.tensor} = {first.value}" if first.tensor else ""
        places = f"{count_of(evidence.count, 'place')}{value}"
        level: Level = "note" if evidence.remark else _choose_level(finding.level)
        message = f"{evidence.what} ({places}). {evidence.effect}. {finding.next_step}"
        file = make_relative(os.path.join(document.checkpoint, first.shard))
        line, sure, about = finding.line, finding.confidence, first.tensor
        found.append(
            Finding(finding.id, level, evidence.what, message, file, line, sure, key=(name,), logical=about)
        )
    skipped = [
        *document.not_run.items(),
        *((each.id, f"ignored: {each.reason}") for each in document.ignored),
    ]
    decided = {each.check for each in document.findings} | {name for name, _ in skipped}
    passed = [name for name, check in CHECKS.items() if decided.isdisjoint((name, check.id))]
    titles = {name: (check.what, check.effect) for name, check in CHECKS.items()}
    return Findings("lint", found, passed, skipped, summary, titles)


def find_in_triage(document: TriageDocument, summary: str) -> Findings:
    """Return the known failures that texts show; what is only possible is a note."""
    found = []
    levels: tuple[tuple[str, Level], ...] = (("findings", "error"), ("possible", "note"))
    for part in document.split():
        for kind, level in levels:
            for finding in getattr(part, kind):
                message = f"{finding.excerpt}. {finding.next_step}"
                place, line, sure = make_relative(part.file), finding.line, finding.confidence
                title = load_entries()[finding.id].title
                found.append(Finding(finding.id, level, title, message, place, line, sure))
    return Findings("triage", found, summary=summary)


def find_in_audit(document: AuditDocument, summary: str) -> Findings:
    """Return the files that a GPU cannot use."""
    from moedoctor.reporters.pages.audit import describe_verdict

    found = []
    for item in document.wrong:
        file, title = make_relative(item.path), load_entries()["MD004"].title
        message = f"{file}: {describe_verdict(item)}"
        found.append(Finding("MD004", "error", title, message, file, key=(item.module or "",)))
    return Findings("audit", found, summary=summary)


def find_in_preflight(document: PreflightDocument, summary: str) -> Findings:
    """Return what is wrong with a start; the same start in other releases and sizes are other items."""
    from moedoctor.diagnose.preflight.records import RULES, Verdict

    model = document.model  # a config.json alone and a pack of headers are files
    config = model if os.path.isfile(model) else os.path.join(model, "config.json")
    place = make_relative(config)
    found, passed, skipped = [], [], []
    for answer in document.answers:
        start = f"vLLM {answer.release}: vllm serve {' '.join(answer.words)}"
        if answer.verdict is Verdict.STARTS:
            passed.append(start)
        elif answer.verdict is Verdict.CANNOT_SAY:
            skipped.append((start, answer.reason))
        # A start that passed or was not decided is an item already.
        is_listed = answer.verdict in (Verdict.STARTS, Verdict.CANNOT_SAY)
        for number, finding in enumerate(answer.findings):
            title, level = RULES[finding.rule][1], _choose_level(finding.level)
            message = f"{finding.message.rstrip('.')}. {finding.next_step}"
            line = find_field(config, finding.message)
            key, about = (answer.release, *answer.words[1:], finding.tensor), finding.tensor or start
            item = f"{start}: {finding.rule}" if number or is_listed else start
            found.append(
                Finding(finding.rule, level, title, message, place, line, key=key, logical=about, item=item)
            )
    titles = {name: (title, "") for name, (_, title) in RULES.items()}
    return Findings("preflight", found, passed, skipped, summary, titles)


def find_field(config: str, message: str) -> int | None:
    """Return the line of the first field of a config.json that a message is about; None if there is none."""
    lines: list[str] = []
    with contextlib.suppress(TextFileError, OSError):
        lines = read_text(Path(config), _MOST_PINNING).splitlines()
    topics = (
        ("quantiz", "quantization_config"),
        ("rchitecture", "architectures"),
        ("model type", "model_type"),
    )
    words = set(re.findall(r"\w+", message)) | {field for topic, field in topics if topic in message}
    named = (re.match(r'\s*"(\w+)"\s*:', line) for line in lines)
    return next((number for number, field in enumerate(named, 1) if field and field[1] in words), None)


def _choose_level(severity: str) -> Level:
    return next((level for level in LEVELS if level == severity), "note")


def _name(id: str) -> str:
    return f"{id} {load_entries()[id].name}"


def shorten_line(text: str, most: int) -> str:
    """Return `text` on one line of 1 to `most` characters."""
    line = join_lines(text) or "no text"
    return line if len(line) <= most else f"{line[: most - 1]}…"
