"""An entry of the catalogue: a Markdown file with a head in YAML, between two lines ``---``.

The head has the fields of `Entry` up to `affects`, whose rules say on which machines the failure can strike;
`moedoctor check` reads them. What it says about releases are data under `releases`, each range with the
stored reports that it rests on. What was only read is a question to the source, under `questions`. The body
has the sections of `SECTIONS`, each once and in this order.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from moedoctor.text import TextFileError, check_printable, parse_yaml, validate

SECTIONS = ("What happens", "Who is affected", "How to see it", "Fix", "Links")
"""The headings of an entry."""

Severity = Literal["error", "warning", "note"]
"""``error``: a crash or a wrong result by default, in the use that `needs` names; ``warning``: it takes a
flag that is off by default, or the evidence is weaker; ``note``: it takes a flag and is rarer or less sure,
or the checkpoint, the model or other code decides."""

_FENCE = "---"
_FILE = r"^(vllm|flashinfer)/[\w/]+\.(py|cuh)$"
_LINK = re.compile(r"- (https://[^\s<>\"'`]+) (\S.*)")


def _check_specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(
            f"'{text}' is not a version range, expected one such as '>=0.17.1,<0.20.0'"
        ) from None
    return text


Line = Annotated[str, Field(min_length=1, max_length=300)]
Range = Annotated[str, Field(min_length=1), AfterValidator(_check_specifier)]
"""Releases, as `packaging` reads them."""
Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")]
Release = Annotated[str, Field(pattern=r"^\d+(\.\d+)+(\.post\d+)?$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Condition(_Strict):
    """The facts that must hold on a machine: all that are given. An unknown fact does not hold."""

    packages: dict[Name, Range] = {}
    """Distribution -> its releases; ``>=0`` for any."""
    capability: Range | None = None
    """Compute capability of a GPU that CUDA programs see here, ``>=12.0,<13.0``."""
    cuda: Range | None = None
    """The CUDA toolkit that would compile; without one, the release that torch was built for."""
    wsl: bool | None = None
    uva: bool | None = None
    """True if vLLM's CPU offload maps host memory into the GPU, False if it copies in every forward."""
    pins: bool | None = None
    """True if vLLM's CPU offload uses pinned memory."""
    variables: dict[Name, str] = {}
    """Environment variables that have exactly this value."""
    variables_not: dict[Name, str] = {}
    """Environment variables that must not have this value."""
    any_set: list[Name] = []
    """At least one of these variables is set, to any value."""
    file: Line | None = None
    """A file of an installed package, ``vllm/envs.py``."""

    @model_validator(mode="after")
    def _names_something(self) -> Condition:
        if not self.packages and not self.any_set and self.file is None:
            raise ValueError("must name packages, any_set or file: a failure needs something to fail")
        return self


class Rule(_Strict):
    """One way in which the failure can strike. Rules are tried in order, and the first that fits decides."""

    severity: Severity
    confidence: float = Field(gt=0, le=1)
    """The chance that the use named under `needs` fails here: an estimate."""
    when: Condition
    needs: Line | None = None
    """A condition that the machine does not show: a flag, a kind of model."""
    why: Line
    next: Line
    """The next step on such a machine; left out, the entry's own."""


class Evidence(_Strict):
    """Marks in the code of a place. All that are given must hold; comments and docstrings do not count."""

    code: tuple[Annotated[str, Field(min_length=1, max_length=400)], ...] = ()
    """Expressions or statements that the place holds, in any layout."""
    text: tuple[Line, ...] = ()
    """Words within one of its strings."""
    without: tuple[Line, ...] = ()
    """Words that neither its names nor its strings contain, in any case of letters."""
    files: dict[Annotated[str, Field(pattern=_FILE)], bool] = {}
    """File of the package -> whether it must be there."""

    @model_validator(mode="after")
    def _names_something(self) -> Evidence:
        if not (self.code or self.text or self.without or self.files):
            raise ValueError("must have code, text, without or files")
        return self


class Question(_Strict):
    """A question to the source of vLLM or FlashInfer, Python or CUDA, which is read and not run."""

    name: Name
    file: Annotated[str, Field(pattern=_FILE)]
    place: Annotated[str, Field(pattern=r"^(\w+(\.\w+)*)?$")] = ""
    """The function, ``Class.method``, class or variable to read; empty for the whole file."""
    affected: Evidence
    """The marks of the failure."""
    clean: tuple[Evidence, ...] = ()
    """Ways in which the source shows that the failure is absent; without any, the answer is never "clean"."""
    decides: bool = True
    """False if no build is judged by it: only words of the entry rest on it."""

    @property
    def package(self) -> Literal["vllm", "flashinfer"]:
        return "vllm" if self.file.startswith("vllm/") else "flashinfer"

    @model_validator(mode="after")
    def _is_code(self) -> Question:
        marks = [code for each in (self.affected, *self.clean) for code in each.code]
        for code in marks if self.file.endswith(".py") else ():
            if len(ast.parse(code).body) != 1:
                raise ValueError(f"{code!r} is not one expression or statement")
        return self


class Run(_Strict):
    """A release that was run, and the stored report that says what came out."""

    release: Release
    tier: Literal["model", "library", "kernel", "engine"]
    report: Annotated[str, Field(pattern=r"^\w[\w.-]*/\w[\w.-]*$")]
    """A JSON report in the folder of reports, without its suffix: ``nvidia-h200/nan_routing``."""
    strikes: bool = True
    """True if the failure was reproduced there."""
    cases: dict[Name, str | int | float | bool] = {}
    """Parameters of the cases that are meant; empty for all of the tier."""


class Affected(_Strict):
    """A range of releases of one package that the failure strikes."""

    package: Literal["vllm", "flashinfer", "torch"]
    first: Release
    last: Release
    """The last that it strikes, or the newest that was looked at."""
    fixed: Release | None = None
    """The first release after `last` without it; None if there is none."""
    note: Line | None = None
    """Another condition, in a few words."""
    question: Name | None = None
    """The question of the entry whose answers give this range."""
    runs: tuple[Run, ...] = ()
    """Releases that were run; what is not run was read in the source."""

    @property
    def basis(self) -> Literal["run", "read"]:
        """Return ``run`` if both ends of the range were run."""
        struck = {run.release for run in self.runs if run.strikes}
        return "run" if {self.first, self.last} <= struck else "read"

    @property
    def range(self) -> str:
        """Return ``vLLM 0.17.1 to 0.19.1, hybrid models``."""
        name = PACKAGES[self.package]
        span = self.first if self.first == self.last else f"{self.first} to {self.last}"
        return f"{name} {span}{f', {self.note}' if self.note else ''}"

    @property
    def evidence(self) -> str:
        """Return in words which releases were run, how, and what was only read."""
        parts = []
        for strikes, word in ((True, "run in"), (False, "gone in")):
            runs = [run for run in self.runs if run.strikes is strikes]
            releases = list(dict.fromkeys(f"{run.release} ({run.tier})" for run in runs))
            if releases:
                parts.append(f"{word} {', '.join(releases)}")
        if self.basis == "read":
            parts.append("the rest was read in the source" if parts else "read in the source, not run")
        return "; ".join(parts)


PACKAGES = {"vllm": "vLLM", "flashinfer": "FlashInfer", "torch": "torch"}
"""Packages as people write them."""


@dataclass(frozen=True)
class Link:
    """A page that says more about a failure."""

    url: str
    text: str
    """The content of the page, in a few words."""


Family = Literal["routing", "offload", "cache", "quantization", "selection", "loading", "parallel"]
"""The subject of a failure, which is also its folder in `moedoctor.faults`."""


class Entry(_Strict):
    """One known failure in words, in Markdown."""

    id: Annotated[str, Field(pattern=r"^MD\d{3}$")]
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*(?:_[a-z0-9]+)*$")]
    title: Line
    """The failure in one line."""
    family: Family
    releases: tuple[Affected, ...] = ()
    """The releases that it strikes; empty if it is not up to a release."""
    questions: tuple[Question, ...] = ()
    """Questions to the source of a vLLM that is no known release; the ranges above rest on them."""
    unread: Line | None = None
    """The reason why the source does not decide `releases`, if there are no questions."""
    where: Line
    """The software that it strikes, in a few words; left out, made from `releases`."""
    fixed: Line
    """The first release without it, or ``no``; left out, made from `releases`."""
    next: Line
    """The next step if a log or an issue shows it."""
    record: Literal["nan", "mismatch=0.01"] | None = None
    """The value of MOEDOCTOR_RECORD_WHEN that catches it in a running engine; None if no call shows it."""
    affects: Annotated[list[Rule], Field(min_length=1)]
    mechanism: str
    affected: str
    """Releases, GPUs and settings."""
    detection: str
    fix: str
    """The fix, and the place where it landed."""
    links: tuple[Link, ...]


def record_hint(entry: Entry) -> str:
    """Return how to record the wrong call and judge it, in Markdown; empty if no call shows the failure."""
    if entry.record is None:
        return ""
    when = "" if entry.record == "nan" else f" --when {entry.record}"
    return (
        f"`moedoctor record -o DIR{when} -- vllm serve …` keeps the wrong call; "
        "`moedoctor replay DIR/*.moecapsule` names what is wrong with it"
    )


def parse_entry(text: str) -> Entry:
    """Return the entry that `text` holds. Raises TextFileError, with the line, for anything else."""
    check_printable(text)
    lines = text.splitlines()
    if not lines or lines[0] != _FENCE or _FENCE not in lines[1:]:
        raise TextFileError(1, f"has no head, expected it between two lines {_FENCE}")
    end = lines.index(_FENCE, 1)
    head = parse_yaml(
        "\n".join(["", *lines[1:end]])
    )  # an empty line for the fence, so that lines count alike
    sections = _split_sections(lines, end + 1)
    mechanism, affected, detection, fix = (sections[name][1] for name in SECTIONS[:4])
    return validate(
        Entry,
        head,
        inner={"affects": Rule, "when": Condition, "releases": Affected, "runs": Run, "questions": Question},
        **_make_words(head.data),
        **_complete_rules(head.data),
        mechanism=mechanism,
        affected=affected,
        detection=detection,
        fix=fix,
        links=_read_links(*sections["Links"]),
    )


def _make_words(head: object) -> dict[str, Any]:
    """Make ``where`` and ``fixed`` from the releases, if the head leaves them out."""
    if not isinstance(head, dict):
        return {}
    try:
        ranges = [Affected.model_validate_json(json.dumps(item)) for item in head.get("releases") or ()]
    except (TypeError, ValueError):
        return {}  # the entry as a whole is refused, with the line
    if not ranges:
        return {}
    fixes = [f"{PACKAGES[each.package]} {each.fixed}" if each.fixed else "no" for each in ranges]
    made = {"where": "; ".join(each.range for each in ranges), "fixed": "; ".join(dict.fromkeys(fixes))}
    return {name: text for name, text in made.items() if name not in head}


def _complete_rules(head: object) -> dict[str, Any]:
    """Give each rule of a head a ``next``, its own or the entry's."""
    if not isinstance(head, dict) or not isinstance(head.get("affects"), list) or "next" not in head:
        return {}
    rules = head["affects"]
    return {"affects": [{"next": head["next"], **rule} if isinstance(rule, dict) else rule for rule in rules]}


def _split_sections(lines: list[str], start: int) -> dict[str, tuple[int, str]]:
    """Return heading -> (line of its text, its text); `start` is the first index behind the head."""
    headings = [index for index in range(start, len(lines)) if lines[index].startswith("## ")]
    named = tuple(lines[index][3:] for index in headings)
    if named != SECTIONS:
        line = headings[0] + 1 if headings else len(lines)
        raise TextFileError(line, f"has the sections {', '.join(named)}, expected {', '.join(SECTIONS)}")
    if any(line.strip() for line in lines[start : headings[0]]):
        raise TextFileError(start + 1, "has text before its first section")
    sections = {}
    for name, begin, end in zip(named, headings, [*headings[1:], len(lines)], strict=True):
        text = "\n".join(lines[begin + 1 : end]).strip()
        if not text:
            raise TextFileError(begin + 1, f"the section {name} is empty")
        sections[name] = (begin + 2, text)
    return sections


def _read_links(first: int, text: str) -> list[dict[str, str]]:
    links = []
    for number, line in enumerate(text.splitlines(), start=first):
        match = _LINK.fullmatch(line)
        if match is None:
            raise TextFileError(number, f"'{line}', expected '- https://… what is there'")
        links.append({"url": match[1], "text": match[2]})
    return links
