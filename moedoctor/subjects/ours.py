"""`faulty`, the failing algorithm restated, and `fixed`, our implementation: always there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moedoctor.environment import explain_missing_gpu
from moedoctor.interfaces import Fault, Sources
from moedoctor.results import Tier
from moedoctor.subjects.base import OwnSubject


class _Ours(OwnSubject):
    """Always there, but a tier may need a GPU or a real engine."""

    def unavailable(
        self, fault: Fault, name: str, tier: Tier, sources: Sources, environment: Mapping[str, Any]
    ) -> str | None:
        if tier is Tier.ENGINE and not environment.get("vllm"):
            return "needs a real engine, and vllm is not installed here"
        return explain_missing_gpu(environment) if tier in (Tier.KERNEL, Tier.ENGINE) else None


class FaultySubject(_Ours):
    """The positive control: without it no fix counts."""

    kind = "faulty"
    rank = 0


class FixedSubject(_Ours):
    """Ours, from `moedoctor.fixes`."""

    kind = "fixed"
    rank = 1
