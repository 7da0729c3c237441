"""Failures that a checkpoint can carry: measured on its tensors, or by real engines that load it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moedoctor.faults.base import EngineFault, Judgement, list_tiers
from moedoctor.results import Case, CaseVerdict, Evidence, Observation, Tier

MoeBackend = Annotated[
    Literal["marlin", "humming", "emulation"] | None,
    Field(description="run real engines with this backend on the damaged checkpoint instead"),
]


class CheckpointFault(EngineFault):
    """A point with a `moe_backend` is for real engines, which load the damaged or the repaired checkpoint."""

    tiers = list_tiers(Tier.MODEL, Tier.ENGINE)
    engine_by = "moe_backend"
    engine_summary = "vLLM with {moe_backend}"

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        if case.tier is Tier.ENGINE:
            return self.judge_engines(evidence)
        if self.id not in evidence.get("lint", (self.id,)):  # what lint finds, if it knows the failure
            return Judgement(
                CaseVerdict.ERROR, "lint does not see it", f"lint does not name {self.id} in this checkpoint"
            )
        return self.judge_tensors(evidence)

    def judge_tensors(self, evidence: Evidence) -> Judgement:
        """Judge a point without an engine, by default on the figures of `token_agreement.Agreement`.

        One wrong token is a failure.
        """
        if evidence["reason"] is None:
            cosine = f"cosine {evidence['cosine']:.5f}"
            return Judgement(CaseVerdict.CLEAN, f"{evidence['tokens']} tokens right, {cosine}")
        figure = f"{evidence['wrong_tokens']} of {evidence['tokens']} tokens wrong: {evidence['reason']}"
        return Judgement(CaseVerdict.REPRODUCED, figure)

    def judge_engines(self, evidence: Evidence) -> Judgement:
        """Judge what `checkpoint_lab.compare_engines` gave: the two engines must agree to within rounding."""
        version = f"vLLM {evidence['vllm']}"
        if evidence["reference_error"]:
            reason = str(evidence["reference_error"])
            return Judgement(CaseVerdict.ERROR, "the reference engine failed", reason)
        if evidence["error"]:
            return Judgement(CaseVerdict.REPRODUCED, f"{version} stops: {str(evidence['error'])[:120]}")
        if not evidence["steps_compared"]:
            return Judgement(CaseVerdict.ERROR, "no logprobs came back", "there is nothing to compare")
        difference = evidence["largest_logprob_difference"]
        others = evidence["prompts_with_other_tokens"]
        figure = (
            f"{others} of {evidence['prompts']} prompts with other tokens, logprobs differ by {difference:g}"
        )
        if evidence["nonfinite_logprobs"]:
            figure += f", {evidence['nonfinite_logprobs']} not finite"
        wrong = others or evidence["nonfinite_logprobs"] or difference > evidence["allowed_difference"]
        return Judgement(CaseVerdict.REPRODUCED if wrong else CaseVerdict.CLEAN, figure)
