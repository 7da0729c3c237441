"""How a layer's output is judged: one token that parts from the reference is a failure."""

from __future__ import annotations

from moedoctor.interfaces import Judgement
from moedoctor.results import CaseVerdict, Evidence


def judge_layer(seen: Evidence) -> Judgement:
    """The verdict on figures of `moedoctor.reference.agreement.Agreement`."""
    if seen["reason"] is None:
        return Judgement(CaseVerdict.CLEAN, f"{seen['tokens']} tokens right, cosine {seen['cosine']:.5f}")
    return Judgement(
        CaseVerdict.REPRODUCED,
        f"{seen['wrong_tokens']} of {seen['tokens']} tokens wrong: {seen['reason']}",
    )
