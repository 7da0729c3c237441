"""What `moedoctor check` found: plain records, made into text by `moedoctor.reporters.check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SEVERITIES = ("error", "warning", "note")
"""The worst first."""


@dataclass(frozen=True)
class Finding:
    """A catalogue entry that can strike here."""

    id: str
    name: str
    title: str
    severity: str
    """``error``, ``warning`` or ``note``, as `moedoctor.entries.rules.Severity` defines them."""
    confidence: float
    """How sure it is, above 0 and at most 1: an estimate."""
    why: str
    needs: str | None
    """What else it takes that cannot be seen from here."""
    evidence: Mapping[str, Any]
    """The facts that say so."""
    next_step: str
    line: int | None = None
    """No file was read: always None, and there because triage has it."""


@dataclass(frozen=True)
class Problem:
    """Something wrong here that is no entry of the catalogue."""

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
    """Notes: what only the checkpoint, the model or other code decides."""
    problems: tuple[Problem, ...] = ()
    version: str = ""
    """moedoctor's own."""

    @property
    def exit_code(self) -> int:
        """0 where nothing was found, else 1; what only a checkpoint can decide is not found."""
        return 1 if self.findings or self.problems else 0
