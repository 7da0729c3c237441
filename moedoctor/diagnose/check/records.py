"""The result of `moedoctor check`: plain records that `moedoctor.reporters.pages.check` makes into text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from moedoctor.diagnose.ignores import SEVERITIES, Ignored, fails
from moedoctor.entries.entry import Entry


@dataclass(frozen=True)
class Finding:
    """A catalogue entry that can strike here."""

    id: str
    name: str
    title: str
    severity: str
    """``error``, ``warning`` or ``note``, as `moedoctor.entries.entry.Severity` defines them."""
    confidence: float
    """An estimate, above 0 and at most 1."""
    why: str
    needs: str | None
    """A condition of the failure that this machine does not show."""
    evidence: Mapping[str, Any]
    """The facts behind it."""
    next_step: str
    line: int | None = None
    """Always None; triage's findings have a line."""

    @classmethod
    def from_entry(
        cls,
        entry: Entry,
        severity: str,
        confidence: float,
        why: str,
        evidence: Mapping[str, Any],
        next_step: str,
        *,
        needs: str | None = None,
    ) -> Finding:
        names = (entry.id, entry.name, entry.title)
        return cls(*names, severity, confidence, why, needs, evidence, next_step)


@dataclass(frozen=True)
class Problem:
    """Something wrong here that is not in the catalogue."""

    what: str
    """``flashinfer-cubin 0.6.4 with flashinfer-python 0.6.6``."""
    severity: str
    why: str
    evidence: Mapping[str, Any]
    next_step: str


@dataclass(frozen=True)
class CheckSummary:
    """Findings by severity."""

    error: int
    warning: int
    problems: int
    conditional: int


@dataclass(frozen=True)
class CheckResult:
    """The whole answer."""

    command: ClassVar[str] = "check"
    findings: tuple[Finding, ...] = ()
    """Failures that can strike here by versions, GPU and settings, the worst first."""
    conditional: tuple[Finding, ...] = ()
    """Notes: only the checkpoint, the model or other code decides these."""
    problems: tuple[Problem, ...] = ()
    target: str = "this Python"
    """The environment that was checked, in words."""
    described: bool = field(default=False, metadata={"sparse": True})
    """True if that environment is only described, and nothing of it is on this machine."""
    not_looked_at: tuple[str, ...] = ()
    """The parts that this answer does not cover, each with the reason."""
    read: tuple[str, ...] = field(default=(), metadata={"sparse": True})
    """Facts read from the source of a vLLM or FlashInfer that is no known release, or that was changed."""
    unknown: tuple[str, ...] = field(default=(), metadata={"sparse": True})
    """Facts that are not known for this vLLM or FlashInfer, each with the reason."""
    ignored: tuple[Ignored, ...] = field(default=(), metadata={"sparse": True})
    """Findings and problems that `--ignore` leaves out."""
    fail_on: str = field(default="warning", metadata={"sparse": True})
    """The least severity that fails, or ``never``."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    version: str = field(default="", metadata={"alias": "moedoctor", "sparse": True})
    """moedoctor's version."""

    @property
    def summary(self) -> CheckSummary:
        error, warning = (sum(each.severity == name for each in self.findings) for name in SEVERITIES[:2])
        return CheckSummary(error, warning, len(self.problems), len(self.conditional))

    @property
    def without_vllm(self) -> str | None:
        """The line for an environment without vLLM; None if it is there."""
        if self.environment.get("vllm"):
            return None
        here = self.target.startswith("this Python")
        remedy = "install moedoctor beside it, or say" if here else "name the Python that has it with"
        return f"vLLM was not found in {self.target}: nothing about it was checked; {remedy} `--python PATH`"

    @property
    def exit_code(self) -> int:
        """1 if a finding or problem has a severity that fails, else 2 if a part is not known, else 0."""
        if any(fails(each.severity, self.fail_on) for each in self._all_found):
            return 1
        return 2 if self.without_vllm or self.unknown else 0

    @property
    def _all_found(self) -> tuple[Finding | Problem, ...]:
        return (*self.findings, *self.problems, *self.conditional)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons for an exit code that is not 0."""
        found = [
            f"{each.what if isinstance(each, Problem) else f'{each.id} {each.name}'}: {each.why}"
            for each in self._all_found
            if fails(each.severity, self.fail_on)
        ]
        unknown = [f"not known for this build: {text}" for text in self.unknown]
        return (*found, *((self.without_vllm,) if self.without_vllm else ()), *unknown)


def list_not_looked_at(result: CheckResult) -> tuple[str, ...]:
    """Return what the facts of a result do not cover, each with the reason."""
    facts, notes = result.environment, []
    if not facts.get("vllm"):
        notes.append(f"vLLM: not found in {result.target}")
    if not facts.get("flashinfer"):
        notes.append(f"FlashInfer: not found in {result.target}")
    if facts.get("torch") and facts.get("python"):
        notes.append("whether torch can be loaded: only its files were read; `python -c 'import torch'`")
    if not any(gpu.get("visible") for gpu in facts.get("gpus") or ()):
        notes.append("failures of a GPU: none is visible; name one: --sm 12.0")
    pinning = facts.get("pinned_memory") or {}
    if not pinning.get("tried"):
        notes.append(f"pinned memory: {pinning.get('reason') or 'not tried'}")
    for name, answer in (facts.get("collectors") or {}).items():
        if "error" in answer:
            notes.append(f"{name}'s own report: {answer['error']}")
    errors = facts.get("collector_errors") or {}
    notes += [f"{name}: {error}" for name, error in errors.items() if name not in ("vllm", "flashinfer")]
    notes.append("flags of the server: moedoctor backends -- vllm serve …")
    notes.append("the checkpoint: moedoctor lint CHECKPOINT")
    return tuple(notes)
