"""`faulty`, the failing algorithm restated, and `fixed`, our implementation: always there."""

from __future__ import annotations

from typing import Any

from moedoctor.faults.base import Fault
from moedoctor.results import Case
from moedoctor.subjects.base import Sources, SubjectProvider


class FaultySubject(SubjectProvider):
    """The positive control: without it no fix counts."""

    kind = "faulty"
    rank = 0

    def implementation(self, fault: Fault, case: Case, sources: Sources) -> Any:
        return fault.faulty(case)


class FixedSubject(SubjectProvider):
    """Ours, from `moedoctor.fixes`."""

    kind = "fixed"
    rank = 1

    def implementation(self, fault: Fault, case: Case, sources: Sources) -> Any:
        return fault.fixed(case)
