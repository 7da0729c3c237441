"""PARITY: whether MoE backends compute what the reference computes.

No failure of upstream's is restated here. The control is the comparison itself: faults are planted in a right
computation, and each of them must be noticed before any verdict on a backend counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from moedoctor.bench.moe.backends import UPSTREAM
from moedoctor.faults.base import Explanation, Fault, Judgement, Parameters, list_tiers
from moedoctor.reference.moe_backend import Variant
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Tier


class BackendParityParameters(Parameters):
    backend: str = Field("MARLIN", max_length=40, description="vLLM's own name of the backend")
    quantization: Literal["nvfp4", "fp8", "fp8-block", "bf16"] = "nvfp4"
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    tokens: int = Field(17, ge=1, le=4096)
    hidden: int = Field(256, ge=128, le=8192, multiple_of=128)
    intermediate: int = Field(128, ge=128, le=8192, multiple_of=128)
    experts: int = Field(8, ge=2, le=512)
    top_k: int = Field(2, ge=1, le=16)
    ids: Literal["distinct", "duplicates", "empty", "fewer"] = Field(
        "distinct",
        description="duplicates: an expert twice in a row; empty: slots of -1, in some tokens all of them; "
        "fewer: slots of -1 beside an expert",
    )
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        if self.top_k >= self.experts:
            yield f"top_k: {self.top_k} must be less than experts {self.experts}"
        if self.ids in ("duplicates", "fewer") and self.top_k < 2:
            yield f"top_k: {self.ids} needs at least 2"
        if self.ids in ("empty", "fewer") and self.tokens < 3:
            yield "tokens: empty slots need at least 3, as the first and the last token have none"
        known = [variant.name for variant in UPSTREAM if variant.quantization == self.quantization]
        if self.backend not in known:
            yield f"backend: {self.quantization} has {', '.join(known)}; got {self.backend}"

    @property
    def variant(self) -> Variant:
        """The backend with what it does to activations."""
        return next(
            variant
            for variant in UPSTREAM
            if (variant.name, variant.quantization) == (self.backend, self.quantization)
        )


class BackendParity(Fault):
    """The same weights and inputs through every backend."""

    id = "PARITY"
    together = 4
    name = "backend_parity"
    title = "an MoE backend that computes something else than the reference"
    parameters = BackendParityParameters
    tiers = list_tiers(Tier.MODEL, installed=Tier.KERNEL)
    explanation = Explanation(
        mechanism="Backends lay out weights and scales each in its own way, and a wrong layout gives finite "
        "numbers and no error. A comparison that averages over tokens or allows an absolute error passes "
        "outputs that are wrong in a few tokens, or all zero.",
        affected="Any backend, most of all after an upgrade or on a new GPU.",
        detection="`moedoctor run backend_parity`: inputs on the quantization grid, output and workspace "
        "poisoned before each call, every token compared by itself, and faults planted in the same run. The "
        "control `faulty` is reproduced if every planted fault was noticed.",
        fix="Choose a backend that is right (`moedoctor backends`); `fixed` is ours.",
    )

    lab = "moedoctor.faults.selection.backend_parity_lab"

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        planted, missed = len(evidence["controls"]), list(evidence["controls_missed"])
        noticed = f"{planted - len(missed)} of {planted} planted faults noticed"
        if case.subject == "faulty":
            if missed:
                return Judgement(CaseVerdict.CLEAN, f"{noticed}; missed {', '.join(missed)}")
            if evidence["reason"] is not None:
                return Judgement(CaseVerdict.CLEAN, f"a right result was refused: {evidence['reason']}")
            return Judgement(CaseVerdict.REPRODUCED, noticed)
        if missed:  # says nothing of a backend: it fails the scenario, and convicts no installed one
            untrusted = f"the comparison did not notice {', '.join(missed)}"
            if case.subject == "fixed":
                return Judgement(CaseVerdict.REPRODUCED, f"{noticed}: {untrusted}")
            return Judgement(CaseVerdict.ERROR, noticed, untrusted)
        tokens = evidence["tokens"]
        if evidence["reason"] is not None:
            wrong = f"{evidence['wrong_tokens']} of {tokens} tokens wrong: {evidence['reason']}"
            return Judgement(CaseVerdict.REPRODUCED, wrong)
        repeat = "" if evidence["deterministic"] else ", not the same bits in every call"
        return Judgement(CaseVerdict.CLEAN, f"{tokens} tokens right, cosine {evidence['cosine']:.5f}{repeat}")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Name the installed backends that were right, wrong, and not run."""
        keys = {CaseVerdict.CLEAN: "right", CaseVerdict.REPRODUCED: "wrong", CaseVerdict.SKIPPED: "not_run"}
        labels: dict[str, set[str]] = {key: set() for key in keys.values()}
        for case in results:
            if case.subject == "installed" and case.verdict in keys:
                parameters = case.parameters
                label = f"{parameters['backend']} {parameters['quantization']} {parameters['activation']}"
                label += "" if parameters["ids"] == "distinct" else f" {parameters['ids']}"
                labels[keys[case.verdict]].add(label)
        return {key: sorted(names) for key, names in labels.items() if names}
