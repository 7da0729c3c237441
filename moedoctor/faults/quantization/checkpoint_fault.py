"""What the failures share that a checkpoint can carry: measured on tensors, or by real engines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseVerdict, Evidence, Observation, Scalar, Tier


class CheckpointFault(Fault):
    """A point with a `moe_backend` is for real engines, which load the checkpoint as it is or repaired."""

    tiers: Mapping[str, tuple[Tier, ...]] = {
        "faulty": (Tier.MODEL, Tier.ENGINE),
        "fixed": (Tier.MODEL, Tier.ENGINE),
    }
    lints: ClassVar[bool] = True
    """Whether `moedoctor lint` names it; a layout cannot be read off a checkpoint."""

    @abstractmethod
    def damaged(self, case: Case) -> Any:
        """The failing algorithm on tensors. Runs in the child."""

    @abstractmethod
    def repaired(self, case: Case) -> Any:
        """Our fix on tensors. Runs in the child."""

    @abstractmethod
    def measure(self, case: Case, implementation: Any) -> Observation:
        """Run a point without an engine. Runs in the child.

        Where `lints`, the evidence lists under ``lint`` what lint finds.
        """

    @abstractmethod
    def judge_tensors(self, seen: Evidence) -> Judgement:
        """What the figures of a point without an engine mean. Pure."""

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        return (parameters["moe_backend"] is not None) == (tier is Tier.ENGINE)

    def faulty(self, case: Case) -> Any:
        return False if case.tier is Tier.ENGINE else self.damaged(case)  # engines: whether it is repaired

    def fixed(self, case: Case) -> Any:
        return True if case.tier is Tier.ENGINE else self.repaired(case)

    def observe(self, case: Case, implementation: Any) -> Observation:
        if case.tier is Tier.ENGINE:
            return self.ask_engines(str(case.parameters["moe_backend"]), implementation)
        return self.measure(case, implementation)

    def ask_engines(self, moe_backend: str, repaired: bool) -> Observation:
        """Run a point of tier `engine`. Runs in the child."""
        from moedoctor.faults.quantization.checkpoint_engine import observe

        return observe(self.id, moe_backend, repaired)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        if case.tier is Tier.ENGINE:
            return self.judge_engines(seen)
        if self.lints and self.id not in seen["lint"]:
            return Judgement(
                CaseVerdict.ERROR, "lint does not see it", "the checkpoint is not what was meant"
            )
        return self.judge_tensors(seen)

    def judge_engines(self, seen: Evidence) -> Judgement:
        """What the figures of a point of tier `engine` mean. Pure."""
        from moedoctor.faults.quantization.checkpoint_engine import judge

        return judge(seen)
