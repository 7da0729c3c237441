"""The page of `moedoctor triage`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from moedoctor.diagnose.triage.cause import Cause
from moedoctor.diagnose.triage.settings_in_text import Settings
from moedoctor.diagnose.triage.triage import Finding, Grade, NearMiss, Triage
from moedoctor.entries import load_entries
from moedoctor.entries.entry import record_hint
from moedoctor.reporters.page import Block, Heading, Item, Paragraph, Span, Step, Text
from moedoctor.reporters.text import count_of
from moedoctor.text import join_some

_MISSING = 3
_RELEASE_DECIDES = ("loading_names", "loading_shapes", "quantization", "backend", "installation", "unknown")
_GPU_DECIDES = ("quantization", "backend", "compile")
_TOLD = ("wrong_output", "speed", "requests", "draft", "question", "arguments")
_COMMAND_DECIDES = ("backend", "memory", "collective", "kernel_fault", "hang", "unknown", *_TOLD[:4])
"""Classes of errors that this fact makes surer."""

_KINDS = ("findings", "possible", "near_misses")
_UNDECIDED = "The text is not enough to tell. It may be one of these:"
_NOTHING = "No known failure in this text{}. `moedoctor list` shows the failures that are known."
_NO_ERROR = ", and no error that ended the server"


@dataclass(frozen=True)
class LookedAt:
    """The facts that were read from one input."""

    file: str | None = field(default=None, kw_only=True, metadata={"sparse": True})
    """Its name; None in reports of older releases."""
    bytes: int
    releases: str
    gpus: tuple[str, ...]
    moe_backends: tuple[str, ...]
    other_releases: str = field(default="", kw_only=True)
    settings: Settings = field(default_factory=Settings, kw_only=True)
    error: Cause | None = field(default=None, kw_only=True, metadata={"sparse": True})


@dataclass(frozen=True)
class TriageDocument:
    """The findings of all inputs, best first."""

    command: ClassVar[str] = "triage"
    findings: tuple[Finding, ...]
    possible: tuple[Finding, ...]
    near_misses: tuple[NearMiss, ...]
    looked_at: tuple[LookedAt, ...]

    @classmethod
    def from_results(cls, results: Sequence[tuple[str, Triage]]) -> TriageDocument:
        """Return the document of inputs by name; with several inputs each finding names its file."""
        rows: dict[str, Any] = {}
        for kind in _KINDS:
            named = ((name if len(results) > 1 else None, getattr(result, kind)) for name, result in results)
            found = [replace(each, file=file) for file, part in named for each in part]
            rows[kind] = tuple(sorted(found, key=lambda each: -getattr(each, "confidence", 0)))
        looked_at = tuple(
            LookedAt(
                each.bytes_read,
                each.releases,
                each.gpus,
                each.backends,
                other_releases=each.other_releases,
                settings=each.settings,
                error=each.error,
                file=name,
            )
            for name, each in results
        )
        return cls(**rows, looked_at=looked_at)

    def split(self) -> list[TriageDocument]:
        """Return a document of each input."""
        if len(self.looked_at) < 2:
            return [self]
        parts = []
        for each in self.looked_at:
            rows = {kind: [row for row in getattr(self, kind) if row.file == each.file] for kind in _KINDS}
            parts.append(TriageDocument(**{kind: tuple(rows[kind]) for kind in _KINDS}, looked_at=(each,)))
        return parts

    @property
    def file(self) -> str:
        """The name of the first input."""
        return self.looked_at[0].file or "the text"


def triage_page(document: TriageDocument) -> list[Block]:
    """Return what each text shows: findings, then what is possible, then what was looked at."""
    page: list[Block] = []
    for part in document.split():
        if len(document.looked_at) > 1:
            page.append(Heading(part.file))
        page += _make_page(part, part.looked_at[0])
    page.append(Paragraph(f"{count_line(document)}."))
    if document.findings:
        page.append(Step(_explain(document.findings[0].id)))
    return page


def _make_page(part: TriageDocument, read: LookedAt) -> list[Block]:
    page: list[Block] = [_show_finding(finding, read.error) for finding in part.findings]
    if read.error and all(finding.line != read.error.line for finding in part.findings):
        page.insert(0, _show_cause(read.error))
    if not part.findings:
        nothing = _NOTHING.format("" if read.error else _NO_ERROR)
        page.append(Paragraph(_UNDECIDED if part.possible else nothing))
    page += [_show_finding(finding) for finding in part.possible]
    if not part.findings:
        for miss in part.near_misses:
            title = f"not it, line {miss.line}: {load_entries()[miss.id].title}"
            page.append(Item(miss.id, title, [("", miss.reason)]))
    parts = [f"{count_of(read.bytes, 'byte')} were read", _describe_releases(read)]
    parts.append(f"GPU: {join_some(read.gpus, 4)}" if read.gpus else "no GPU")
    backends = join_some(read.moe_backends, 4)
    parts.append(f"MoE backend: {backends}" if backends else "no MoE backend of vLLM")
    parts += _describe_settings(read.settings)
    page.append(Paragraph(f"Looked at: {'; '.join(parts)}."))
    if lacking := _list_lacking(part, read):
        page.append(Step(f"to be sure, paste more: {', '.join(lacking)}."))
    return page


def _show_cause(cause: Cause) -> Item:
    lines = [("", Span(cause.excerpt, "code")), *_list_place(cause), *_list_steps(cause.next_step)]
    return Item("asked" if cause.kind == "question" else "error", f"line {cause.line}: {cause.says}", lines)


def _list_place(cause: Cause, says: str = "") -> list[tuple[str, Text]]:
    """Return the class of an error, where it was raised, and what of it not to believe."""
    place = f"{cause.place}{f' ({cause.owner})' if cause.owner else ''}" if cause.place else ""
    return [row for row in (("error", says), ("raised in", place), ("but", cause.note)) if row[1]]


def _list_steps(next_step: str) -> list[tuple[str, Text]]:
    return [("also" if at else "do", step) for at, step in enumerate(next_step.splitlines())]


def _describe_releases(read: LookedAt) -> str:
    if read.releases:
        return f"the text names {read.releases}"
    if read.other_releases:
        return f"the text names {read.other_releases}, but not as the release that failed"
    return "the text names no release"


def _describe_settings(settings: Settings) -> list[str]:
    """Return what the text tells of the server's start, in a few words each."""
    flags = [f"--{name} {value}".strip() for name, value in settings.flags.items()]
    variables = [f"{name}={value}" for name, value in settings.variables.items()]
    libraries = [f"{name} {version}" for name, version in settings.libraries.items()]
    known = [*libraries, *(["WSL"] if settings.wsl else [])]
    named = (("flags", flags), ("variables", variables))
    parts = [", ".join(known), *(f"{name}: {join_some(values, 6)}" for name, values in named if values)]
    return [part for part in parts if part]


def _list_lacking(part: TriageDocument, read: LookedAt) -> list[str]:
    """Return the facts that would change the answer, and that the text does not have."""
    kind = read.error.kind if read.error else ""
    if any(finding.grade is Grade.CERTAIN for finding in part.findings):
        return []
    undecided = bool(part.findings or part.possible)
    started = bool(read.settings.shown or read.releases or read.gpus)
    lacking = {
        "the release (`vllm --version`)": not read.releases and (undecided or kind in _RELEASE_DECIDES),
        "the GPU": not read.gpus and (bool(part.possible) or kind in _GPU_DECIDES),
        "the whole command line": not read.settings.shown and (undecided or kind in _COMMAND_DECIDES),
        "the 30 lines before the error": read.error is not None and not (read.error.place or kind in _TOLD),
        "the log up to its last line": read.error is None and started and not undecided,
    }
    return [fact for fact, is_lacking in lacking.items() if is_lacking]


def _show_finding(finding: Finding, error: Cause | None = None) -> Item:
    """Return a failure with its reasons; if the text does not decide, with what would decide it."""
    entry, level = load_entries()[finding.id], "error" if finding.grade is Grade.CERTAIN else "warning"
    title = f"{finding.grade.value}, line {finding.line}: {entry.title}"
    do = _list_steps(finding.next_step)
    more = ("more", _explain(finding.id))
    lines: list[tuple[str, Text]] = [("", Span(finding.excerpt, "code"))]
    if finding.grade is Grade.POSSIBLE:
        missing = [*finding.missing[:_MISSING], *("…" for _ in finding.missing[_MISSING : _MISSING + 1])]
        lines += [("likely if", "; ".join(missing))] if missing else []
        return Item(finding.id, title, [*lines, *do, more])
    why = "; ".join(("the line above", *finding.why)) if finding.why else "the line above alone"
    if error and error.line == finding.line:
        lines += _list_place(error, error.says if error.kind != "unknown" else "")
    lines += [("why", why), ("releases", finding.releases), *do]
    if hint := record_hint(entry):
        lines.append(("record", hint))
    return Item(finding.id, f"{title} (confidence {finding.confidence:.2f})", [*lines, more], level)


def _explain(id: str) -> str:
    return f"`moedoctor explain {id}`"


def describe_findings(document: TriageDocument) -> list[str]:
    """Return a line for each certain or likely failure: what it is, how sure, and where."""
    entries = load_entries()
    return [
        f"{part.file}, line {each.line}: {each.id} is {each.grade.value}: {entries[each.id].title}"
        for part in document.split()
        for each in part.findings
    ]


def count_line(document: TriageDocument) -> str:
    """Return ``2 known failures found, 1 possible``."""
    found = {finding.id for finding in document.findings}
    possible = {finding.id for finding in document.possible} - found
    more = f", {len(possible)} possible" if possible else ""
    return f"{count_of(len(found), 'known failure')} found{more}"
