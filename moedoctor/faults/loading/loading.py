"""Failures of loading: the control restates a release's loader; `installed` is vLLM's own, without a GPU."""

from __future__ import annotations

from moedoctor.faults.base import Fault, Judgement, list_tiers
from moedoctor.results import Case, CaseVerdict, Observation, Tier
from moedoctor.text import shorten


class LoadingFault(Fault):
    """A loader that stops, or that leaves values wrong without an error."""

    tiers = list_tiers(Tier.MODEL, installed=Tier.LIBRARY)
    restated_on_cpu = True

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        if evidence["stopped"]:
            return Judgement(CaseVerdict.REPRODUCED, f"stops: {shorten(str(evidence['stopped']), 160)}")
        if evidence["wrong"]:
            return Judgement(CaseVerdict.REPRODUCED, f"no error, and {shorten(str(evidence['wrong']), 160)}")
        return Judgement(CaseVerdict.CLEAN, str(evidence["right"])[:160])
