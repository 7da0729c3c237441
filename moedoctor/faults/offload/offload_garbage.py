"""MD008: quantised MoE talks garbage with CPU offload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from moedoctor.faults.offload.parity_engines_judge import (
    ParityParameters,
    between_backends,
    garbage_seen,
    judge_model,
)
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier


class OffloadGarbageParameters(ParityParameters):
    """One point of the matrix: with `mode` it is about real engines, else about a weight in host memory."""

    bytes: int = Field(1 << 20, ge=1024, le=1 << 28, description="of the offloaded weight")
    seed: int = Field(0, ge=0)


class OffloadGarbage(Fault):
    """A mapped view of host memory that does not keep the memory: weights become whatever comes next."""

    id = "MD008"
    parameters = OffloadGarbageParameters
    tiers = {
        "faulty": (Tier.MODEL, Tier.KERNEL),
        "fixed": (Tier.MODEL, Tier.KERNEL),
        "installed": (Tier.ENGINE,),
    }

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        return (parameters["mode"] is not None) == (tier is Tier.ENGINE)

    def faulty(self, case: Case) -> Any:
        from moedoctor.faults.offload.offload_garbage_lab import memory_for

        return memory_for(case.tier, case.device, keeps=False)

    def fixed(self, case: Case) -> Any:
        from moedoctor.faults.offload.offload_garbage_lab import memory_for

        return memory_for(case.tier, case.device, keeps=True)

    def installed(self, case: Case) -> Any:
        """The installed vLLM, in processes of its own."""
        return None

    def observe(self, case: Case, implementation: Any) -> Observation:
        if case.tier is Tier.ENGINE:
            from moedoctor.faults.offload import parity_engines as offload_parity_engine

            return offload_parity_engine.observe(self.parameters.model_validate(case.parameters))
        from moedoctor.faults.offload.offload_garbage_lab import observe

        return observe(self.parameters.model_validate(case.parameters), implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        if case.tier is Tier.ENGINE:
            from moedoctor.upstream.engine.offload_engine import judge

            return judge(seen) if case.parameters["model"] is None else judge_model(seen)
        if seen["weights_changed"]:
            figure = (
                f"{seen['weights_changed']:.0%} of the weights became another buffer's, without any error"
            )
            return Judgement(CaseVerdict.REPRODUCED, figure)
        if not seen["same_bits"]:
            return Judgement(CaseVerdict.REPRODUCED, "the weights are right and the result is not")
        return Judgement(CaseVerdict.CLEAN, "the view keeps its memory: the same bits")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Whether garbage was seen, and where backends part without any offload."""
        return {**garbage_seen(results), **between_backends(results)}

    def describe(self, parameters: Any) -> str:
        if parameters["mode"] is not None:
            model = parameters["model"] or "tiny checkpoints"
            return (
                f"{model}, {parameters['mode']}, {parameters['moe_backend']}, {parameters['access']},"
                f" fixes: {parameters['fixes']}"
            )
        return f"a weight of {parameters['bytes']} bytes"
