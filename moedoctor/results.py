"""What a run found: frozen records, from one measurement up to the whole report.

Everything here is plain data that imports no torch. The JSON that `moedoctor.serialise` makes of a
`Report` is the only machine-readable output (schema_version 1); every format derives from these records.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1

Scalar = str | int | float | bool | None
"""One parameter value of a case."""

Evidence = Mapping[str, Any]
"""Measured figures and quoted text, by name. Values must survive JSON: no NaN, no tensors."""


class Tier(str, enum.Enum):
    """How real a run was."""

    MODEL = "model"
    """Restated algorithm, any machine."""
    LIBRARY = "library"
    """Real upstream Python code, no GPU."""
    KERNEL = "kernel"
    """Real kernels on a GPU."""
    ENGINE = "engine"
    """A real `vllm.LLM`."""


class CaseVerdict(str, enum.Enum):
    """What one case showed."""

    REPRODUCED = "reproduced"
    CLEAN = "clean"
    SKIPPED = "skipped"
    ERROR = "error"


class ScenarioVerdict(str, enum.Enum):
    """What the cases of one scenario show together."""

    PROVED = "proved"
    """The failure was seen in `faulty` and is gone in `fixed`, in this run."""
    FOUND = "found"
    """Proved, and `installed` shows the failure."""
    ABSENT = "absent"
    """The control did not reproduce, and the fault's own rule says from what it saw why it cannot here."""
    FAILED = "failed"
    """The control or the fix did not behave as expected."""
    SKIPPED = "skipped"
    ERROR = "error"


class ClaimVerdict(str, enum.Enum):
    """What this machine says about a statement made upstream."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    UNTESTED = "untested"


class Death(str, enum.Enum):
    """How a child process ended without delivering an observation."""

    ILLEGAL_MEMORY_ACCESS = "illegal_memory_access"
    ILLEGAL_INSTRUCTION = "illegal_instruction"
    DEVICE_ASSERT = "device_assert"
    NO_KERNEL_IMAGE = "no_kernel_image"
    OUT_OF_MEMORY = "out_of_memory"
    CUDA_ERROR = "cuda_error"
    """Any other error that CUDA reports."""
    EXCEPTION = "exception"
    """A Python exception that is none of the above."""
    SIGNAL = "signal"
    HANG = "hang"
    """No result within the time limit."""
    SILENT = "silent"
    """The process ended by itself and said nothing."""


@dataclass(frozen=True)
class Observation:
    """What was measured in one case: numbers and text, no opinion."""

    evidence: Evidence
    """Figures by name, e.g. ``{"rows": 128, "rows_with_duplicates": 13}``."""


@dataclass(frozen=True)
class Crash:
    """A child that died instead of answering."""

    death: Death
    message: str
    """One line: the exception, the signal's name, or the time limit."""
    stderr_tail: tuple[str, ...] = ()
    """The last lines the child wrote to stderr."""

    def to_evidence(self) -> dict[str, Any]:
        """The crash as evidence of a case."""
        return {"death": self.death.value, "message": self.message, "stderr_tail": list(self.stderr_tail)}


@dataclass(frozen=True)
class Skip:
    """A case or measurement that cannot run here."""

    reason: str


class UnavailableError(Exception):
    """Raised in a child where a subject or a case turns out not to be runnable: the case is skipped."""


@dataclass(frozen=True)
class Case:
    """One subject on one point of a scenario's matrix, before it runs."""

    scenario: str
    """Catalogue id, e.g. ``MD001``."""
    subject: str
    """``faulty``, ``fixed``, ``installed`` or a named release such as ``vllm@0.19.1``."""
    tier: Tier
    parameters: Mapping[str, Scalar]
    device: str = "cpu"
    """``cpu`` or ``cuda:N``."""


@dataclass(frozen=True)
class CaseResult:
    """One case, judged."""

    subject: str
    tier: Tier
    parameters: Mapping[str, Scalar]
    verdict: CaseVerdict
    evidence: Evidence = field(default_factory=dict)
    reason: str | None = None
    """Why it was skipped or went wrong; None for `reproduced` and `clean`."""
    seconds: float = 0.0
    """Wall time of the child, in seconds."""
    device: str = "cpu"
    figure: str = ""
    """The figure that decides the verdict, in words short enough for a table cell."""


@dataclass(frozen=True)
class ClaimResult:
    """A statement from upstream, and what this machine says about it."""

    text: str
    source: str
    """Where it was said, e.g. ``vllm-project/vllm#39593``."""
    verdict: ClaimVerdict
    evidence: Evidence = field(default_factory=dict)
    reason: str | None = None
    """Why it is untested, or in words what the figures say."""


@dataclass(frozen=True)
class ScenarioResult:
    """All cases and claims of one scenario, with the verdict they add up to."""

    id: str
    name: str
    title: str
    verdict: ScenarioVerdict
    file: str
    cases: tuple[CaseResult, ...] = ()
    claims: tuple[ClaimResult, ...] = ()
    reason: str | None = None
    """Why the verdict is not `proved`, in one line."""
    conclusions: Evidence = field(default_factory=dict)
    """What several cases say together, e.g. ``{"first_fixed_release": "0.20.0"}``."""
    line: int = 1
    """Where in `file` the scenario starts, for annotations."""


@dataclass(frozen=True)
class Summary:
    """Scenarios counted by verdict, and the exit code they mean."""

    proved: int = 0
    found: int = 0
    absent: int = 0
    failed: int = 0
    skipped: int = 0
    error: int = 0
    exit_code: int = 0
    cases: Mapping[str, int] = field(default_factory=dict)
    """Cases counted by verdict."""
    interrupted: bool = False
    """The run was stopped before every case had run."""


@dataclass(frozen=True)
class Report:
    """One run of one command."""

    command: str
    environment: Mapping[str, Any]
    scenarios: tuple[ScenarioResult, ...]
    summary: Summary
    version: str
    """moedoctor's own version."""
    findings: tuple[str, ...] = ()
    """Gate decisions in words: what regressed against the baseline, and where."""
    schema_version: int = SCHEMA_VERSION
