"""The judge of MD010's claim about engines with the fix `backend`."""

from __future__ import annotations

from typing import Any

import pytest
from fault_cases import by_rows

from moedoctor.faults.selection import backend_claims as claims
from moedoctor.results import ClaimVerdict

CONFIRMED, REFUTED, UNTESTED = ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED, ClaimVerdict.UNTESTED
MARLIN = {
    "asked": "MARLIN",
    "automatic": "HUMMING",
    "chosen": "MARLIN",
    "outcome": "same tokens",
    "detail": "same logprobs",
    "logprob_distance": 0.0,
    "distance_of_other": 0.2,
}
MARLEN = {"asked": "MARLEN", "reason": "unknown", "refused": True, "error": "vLLM is stopped: MARLEN"}
STARTED = {"asked": "MARLEN", "reason": "unknown", "refused": False, "detail": "started with HUMMING"}


@pytest.mark.parametrize(
    ("honoured", "refused", "verdict", "words"),
    [
        (MARLIN, MARLEN, CONFIRMED, "MARLIN: MARLIN in place of HUMMING, same tokens"),
        (MARLIN, STARTED, REFUTED, "MARLEN (unknown): started with HUMMING"),
        (MARLIN, {**MARLEN, "refused": False, "error": "no memory"}, REFUTED, "no memory"),
        ({**MARLIN, "chosen": "HUMMING"}, MARLEN, REFUTED, "HUMMING in place of HUMMING"),
        ({**MARLIN, "outcome": "other tokens"}, MARLEN, REFUTED, "other tokens"),
        ({**MARLIN, "logprob_distance": 0.1}, MARLEN, REFUTED, "MARLIN"),
        ({**MARLIN, "logprob_distance": "inf"}, MARLEN, REFUTED, "MARLIN"),
        ({"asked": "MARLIN", "error": "no memory"}, MARLEN, REFUTED, "MARLIN: no memory"),
        ({**MARLIN, "distance_of_other": 0.0}, MARLEN, UNTESTED, "both backends give the same logprobs"),
        ({**MARLIN, "distance_of_other": None}, MARLEN, UNTESTED, "--moe-backend did not run"),
        ({**MARLIN, "logprob_distance": None}, MARLEN, UNTESTED, "--moe-backend did not run"),
        (MARLEN, MARLEN, UNTESTED, "no engine ran"),
    ],
)
def test_backend_engine(
    honoured: dict[str, Any], refused: dict[str, Any], verdict: ClaimVerdict, words: str
) -> None:
    judgement = by_rows(claims.backend_engine, {}, honoured, refused)
    assert judgement.verdict is verdict
    assert words in judgement.reason
