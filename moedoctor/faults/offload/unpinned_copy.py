"""MD002: asynchronous copies whose memory is used again too early, with pinned memory and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moedoctor.faults.offload.unpinned_copy_claims import CLAIMS
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier

CELLS = ("pinned_idle", "pinned_busy", "pageable_idle", "pageable_busy")
"""Columns of the hazard matrix: kind of host memory, and whether work is queued before the copy."""


class UnpinnedCopyParameters(BaseModel):
    """One point of the matrix; each measures all of `CELLS`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    direction: Literal["h2d", "d2h"] = "h2d"
    bytes: int = Field(65_536, ge=64, le=1 << 28, description="of one copy")
    copies: int = Field(16, ge=1, le=1000, description="copies a cell")


class UnpinnedCopy(Fault):
    """Host memory that is overwritten, or read, right after an asynchronous copy was asked for."""

    id = "MD002"
    parameters = UnpinnedCopyParameters
    tiers = {
        "faulty": (Tier.MODEL, Tier.KERNEL),
        "fixed": (Tier.MODEL, Tier.KERNEL),
    }
    claims = CLAIMS

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        """A simulated copy is late whatever its size."""
        return tier is not Tier.MODEL or int(parameters["bytes"] or 0) <= 65_536

    def faulty(self, case: Case) -> Any:
        """Bare copies."""
        self._need_gpu(case)
        return False

    def fixed(self, case: Case) -> Any:
        """The copies of our offloader."""
        self._need_gpu(case)
        return True

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.offload.unpinned_copy_lab import observe

        return observe(
            self.parameters.model_validate(case.parameters), case.tier, case.device, ours=implementation
        )

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        stale = {name: seen[name] for name in CELLS if seen[name] > 0}
        if stale:
            said = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in stale.items())
            return Judgement(CaseVerdict.REPRODUCED, f"stale: {said}")
        return Judgement(CaseVerdict.CLEAN, "no stale copy in any cell")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """The hazard matrix: share of stale copies by direction, size and cell, of the control."""
        rows = [
            {
                "tier": one.tier.value,
                "direction": one.parameters["direction"],
                "bytes": one.parameters["bytes"],
                **{name: one.evidence[name] for name in CELLS},
            }
            for one in results
            if one.subject == "faulty" and "pinned_busy" in one.evidence
        ]
        return {"hazards_without_waiting": rows} if rows else {}

    def describe(self, parameters: Any) -> str:
        return f"{parameters['direction']} of {parameters['bytes']} bytes"

    @staticmethod
    def _need_gpu(case: Case) -> None:
        if case.tier is not Tier.KERNEL:
            return
        import torch

        from moedoctor.results import UnavailableError

        if not torch.cuda.is_available():
            raise UnavailableError("needs an NVIDIA GPU that torch can use")
