"""The judges of MD008's claims about MoE layers that moedoctor computes inside vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from fault_cases import by_rows

from moedoctor.faults.offload import moe_claims as claims
from moedoctor.results import ClaimVerdict

OURS = {
    "quantization": "NVFP4",
    "computer": "moedoctor",
    "mode": "eager",
    "outcome": "same tokens",
    "detail": "logprobs differ by up to 0.01",
    "logprob_distance": 0.01,
}
PLANTED = {**OURS, "computer": "experts exchanged", "outcome": "other tokens"}
THEIRS = {**OURS, "computer": "vLLM"}
GRAPHS = {**OURS, "mode": "CUDA graphs"}
THEIR_GRAPHS = {**THEIRS, "mode": "CUDA graphs", "logprob_distance": 0.5}
TIMED = {"quantization": "BF16", "backend": "TRITON", "batch": 1, "share": 0.96, "gpu_share": None}
CONFIRMED, REFUTED, UNTESTED = ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED, ClaimVerdict.UNTESTED


@pytest.mark.parametrize(
    ("rows", "verdict", "words"),
    [
        ([OURS, PLANTED], CONFIRMED, "1 of 1 engines"),
        (
            [{**GRAPHS, "logprob_distance": 0.7}, THEIR_GRAPHS, PLANTED],
            CONFIRMED,
            "graphs 0.7, vLLM's own 0.5",
        ),
        ([{**GRAPHS, "logprob_distance": 0.8}, THEIR_GRAPHS, PLANTED], REFUTED, "0 of 1 engines"),
        ([GRAPHS, PLANTED], UNTESTED, "no logprobs for NVFP4 CUDA graphs"),
        ([OURS], UNTESTED, "wrong experts changed no token of NVFP4"),
        ([OURS, {**PLANTED, "quantization": "BF16"}], UNTESTED, "no token of NVFP4"),
        ([OURS, {**PLANTED, "outcome": "same tokens"}], UNTESTED, "no token of NVFP4"),
        ([{**OURS, "outcome": "no control"}, PLANTED], UNTESTED, "no engine with the reference"),
        ([{**OURS, "logprob_distance": 0.016}, PLANTED], REFUTED, "0 of 1 engines"),
        ([{**OURS, "logprob_distance": float("nan")}, PLANTED], REFUTED, "0 of 1 engines"),
        ([OURS, {**OURS, "outcome": "other tokens", "logprob_distance": "inf"}, PLANTED], REFUTED, "1 of 2"),
        ([{**OURS, "outcome": "no fix"}, PLANTED], REFUTED, "NVFP4, eager: no fix"),
        ([{**OURS, "outcome": "crash", "logprob_distance": None}, PLANTED], REFUTED, "eager: crash"),
    ],
)
def test_tokens(rows: list[dict[str, Any]], verdict: ClaimVerdict, words: str) -> None:
    judgement = by_rows(claims.moe_tokens, {"max_ratio": 1.5}, THEIRS, *rows)
    assert judgement.verdict is verdict
    assert words in judgement.reason


def test_tokens_need_logprobs_of_vllms_own_backend() -> None:
    judgement = by_rows(claims.moe_tokens, {"max_ratio": 1.5}, OURS, PLANTED)
    assert judgement.verdict is UNTESTED
    assert "gave no logprobs for NVFP4" in judgement.reason


@pytest.mark.parametrize(
    ("rows", "verdict", "words"),
    [
        ([TIMED, {**TIMED, "batch": 8, "share": 1.1}], CONFIRMED, "BF16 beside TRITON, batch 8: 1.10"),
        ([TIMED, {**TIMED, "share": 0.94}], REFUTED, "0.94"),
        ([TIMED, {**TIMED, "share": 0.94, "gpu_share": 0.94}], REFUTED, "0.94 (0.94 by GPU events)"),
        ([TIMED, {**TIMED, "share": 0.94, "gpu_share": 0.98}], UNTESTED, "give different verdicts"),
        ([TIMED, {**TIMED, "gpu_share": 0.94}], UNTESTED, "measure again on an idle machine"),
        ([TIMED, {"quantization": "FP8", "error": "no memory"}], UNTESTED, "FP8: no memory"),
        ([{"quantization": "FP8", "error": "no memory"}], UNTESTED, "no memory"),
    ],
)
def test_speed(rows: list[dict[str, Any]], verdict: ClaimVerdict, words: str) -> None:
    judgement = by_rows(claims.moe_speed, {"min_share": 0.95}, *rows)
    assert judgement.verdict is verdict
    assert words in judgement.reason


GELU = {
    "model": "Gemma-4",
    "activation": "gated GELU",
    "quantization": "BF16",
    "computer": "moedoctor",
    "mode": "CUDA graphs",
    "outcome": "same tokens",
    "detail": "20 of 20 clear prompts",
    "clear_prompts": 20,
    "same_prompts": 20,
    "logprob_distance": 0.03,
}
THEIR_GELU = {**GELU, "computer": "vLLM", "logprob_distance": 0.02}
WRONG_GELU = {**GELU, "computer": "experts exchanged", "mode": "eager", "same_prompts": 10}
NOT_COMPARED = {key: value for key, value in GELU.items() if key not in ("clear_prompts", "same_prompts")}


@pytest.mark.parametrize(
    ("ours", "theirs", "planted", "verdict", "words"),
    [
        (GELU, THEIR_GELU, WRONG_GELU, CONFIRMED, "(gated GELU), BF16, CUDA graphs: 20 of 20 prompts"),
        ({**GELU, "same_prompts": 18}, THEIR_GELU, WRONG_GELU, CONFIRMED, "18 of 20 prompts, vLLM's own 20"),
        ({**GELU, "same_prompts": 17}, THEIR_GELU, WRONG_GELU, REFUTED, "17 of 20 prompts"),
        ({**GELU, "logprob_distance": 0.031}, THEIR_GELU, WRONG_GELU, REFUTED, "differ by 0.031"),
        ({**GELU, "logprob_distance": "nan"}, THEIR_GELU, WRONG_GELU, REFUTED, "differ by nan"),
        (GELU, THEIR_GELU, {**WRONG_GELU, "same_prompts": 11}, UNTESTED, "wrong experts changed too few"),
        (GELU, THEIR_GELU, {**NOT_COMPARED, "computer": "experts exchanged"}, UNTESTED, "changed too few"),
        (
            GELU,
            {**NOT_COMPARED, "computer": "vLLM", "detail": "no memory"},
            WRONG_GELU,
            UNTESTED,
            "no memory",
        ),
        ({**NOT_COMPARED, "detail": "no layer"}, THEIR_GELU, WRONG_GELU, REFUTED, "CUDA graphs: no layer"),
        (
            {**NOT_COMPARED, "detail": "unknown model"},
            {**NOT_COMPARED, "computer": "vLLM", "detail": "unknown model"},
            WRONG_GELU,
            UNTESTED,
            "unknown model; vLLM's own backend did not run either",
        ),
        ({**NOT_COMPARED, "detail": "no reference: dead"}, THEIR_GELU, WRONG_GELU, UNTESTED, "dead"),
        ({**GELU, "clear_prompts": 7}, THEIR_GELU, WRONG_GELU, UNTESTED, "7 prompts clearly, fewer than 8"),
        (THEIR_GELU, THEIR_GELU, WRONG_GELU, UNTESTED, "no engine ran"),
    ],
)
def test_activations(
    ours: dict[str, Any],
    theirs: dict[str, Any],
    planted: dict[str, Any],
    verdict: ClaimVerdict,
    words: str,
) -> None:
    limits = {"min_same": 0.9, "max_ratio": 1.5}
    judgement = by_rows(claims.moe_activations, limits, ours, theirs, planted)
    assert judgement.verdict is verdict
    assert words in judgement.reason


def test_one_failed_format_refutes_what_others_confirm() -> None:
    limits = {"min_same": 0.9, "max_ratio": 1.5}
    four = [{**row, "quantization": "NVFP4"} for row in (GELU, THEIR_GELU, WRONG_GELU)]
    four[0]["same_prompts"] = 3
    judgement = by_rows(claims.moe_activations, limits, GELU, THEIR_GELU, WRONG_GELU, *four)
    assert judgement.verdict is REFUTED
    assert "NVFP4, CUDA graphs: 3 of 20" in judgement.reason


def test_formats_are_compared_with_vllms_own_backend_in_the_same_mode() -> None:
    def rows(mode: str, ours: float, theirs: float) -> list[dict[str, Any]]:
        shared = {"quantization": "FP8 of ModelOpt", "mode": mode, "clear_prompts": 20, "detail": ""}
        return [
            {**shared, "computer": "moedoctor", "same_prompts": 20, "logprob_distance": ours},
            {**shared, "computer": "vLLM", "same_prompts": 18, "logprob_distance": theirs},
        ]

    limits = {"min_same": 0.9, "max_ratio": 1.0}
    eager, graphs = rows("eager", 0.1, 0.2), rows("CUDA graphs", 0.3, 0.4)
    wrong = {**eager[0], "computer": "experts exchanged", "same_prompts": 2}
    judgement = by_rows(claims.moe_formats, limits, *eager, *graphs, wrong)
    assert judgement.verdict is CONFIRMED
    assert "FP8 of ModelOpt, CUDA graphs: 20 of 20 prompts, vLLM's own 18" in judgement.reason
    graphs[0]["logprob_distance"] = 0.41
    assert by_rows(claims.moe_formats, limits, *eager, *graphs, wrong).verdict is REFUTED
