"""The result of `moedoctor check`: plain records that `moedoctor.reporters.check` makes into text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moedoctor.entries.entry import Entry

SEVERITIES = ("error", "warning", "note")
"""The worst first."""


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
    """What else the failure needs and this machine does not show."""
    evidence: Mapping[str, Any]
    """The facts behind it."""
    next_step: str
    line: int | None = None
    """Always None; triage's findings have a line."""

    @classmethod
    def of(
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
        """Return a finding about `entry`."""
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
class CheckResult:
    """The whole answer."""

    environment: Mapping[str, Any]
    findings: tuple[Finding, ...] = ()
    """What can strike here by versions, GPU and settings, the worst first."""
    conditional: tuple[Finding, ...] = ()
    """Notes: only the checkpoint, the model or other code decides these."""
    problems: tuple[Problem, ...] = ()
    version: str = ""
    """moedoctor's version."""

    @property
    def exit_code(self) -> int:
        """1 if there are findings or problems, else 0. Notes do not count."""
        return 1 if self.findings or self.problems else 0
