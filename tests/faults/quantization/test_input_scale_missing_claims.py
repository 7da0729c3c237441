"""MD015's claim on MARLIN, with engines that are not real."""

from __future__ import annotations

import pytest

from moedoctor.faults.quantization.input_scale_missing_claims import CLAIMS
from moedoctor.interfaces import Measurement
from moedoctor.results import ClaimVerdict, Crash, Death, Observation, Skip

SEEN = {
    "vllm": "0.21.0",
    "moe_backend": "MARLIN",
    "reference_error": None,
    "error": None,
    "allowed_difference": 0.25,
    "prompts": 3,
    "steps_compared": 24,
    "prompts_with_other_tokens": 0,
    "largest_logprob_difference": 0.0,
    "nonfinite_logprobs": 0,
}


@pytest.mark.parametrize(
    ("outcome", "verdict", "said"),
    [
        (Observation(SEEN), ClaimVerdict.CONFIRMED, "vLLM 0.21.0, MARLIN: 0 of 3 prompts with other tokens"),
        (Observation({**SEEN, "prompts_with_other_tokens": 1}), ClaimVerdict.REFUTED, "1 of 3 prompts"),
        (Observation({**SEEN, "error": "no scale"}), ClaimVerdict.REFUTED, "vLLM 0.21.0 stops: no scale"),
        (
            Observation({**SEEN, "reference_error": "x"}),
            ClaimVerdict.UNTESTED,
            "the reference engine failed: x",
        ),
        (Observation({**SEEN, "steps_compared": 0}), ClaimVerdict.UNTESTED, "no logprobs came back"),
        (Skip("vllm is not installed"), ClaimVerdict.UNTESTED, "vllm is not installed"),
        (Crash(Death.EXCEPTION, "late"), ClaimVerdict.UNTESTED, "the engines died"),
    ],
)
def test_engines_decide(outcome: Observation | Skip | Crash, verdict: ClaimVerdict, said: str) -> None:
    (claim,) = CLAIMS
    found = claim.judge([], [Measurement("", outcome)], {})
    assert found.verdict is verdict
    assert said in str(found.reason)
