"""The judges of MD007's claims about the expert cache inside vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from fault_cases import by_rows

from moedoctor.faults.cache import engine_claims as claims
from moedoctor.interfaces import ClaimTest
from moedoctor.results import ClaimVerdict

CELL = {
    "backend": "BF16 TRITON",
    "mode": "eager",
    "slots": 2,
    "outcome": "same tokens",
    "detail": "same logprobs",
    "misses": 5,
    "asked": "TRITON",
    "chosen": "TRITON",
    "engine": "device",
    "planted": False,
}
PLANTED = {**CELL, "planted": True, "outcome": "other tokens", "detail": "prompt 1"}
REFUSED = {"setting": "fewer slots", "refused": True, "said": "1 slots"}
WITHOUT = {"slots": None, "kv_cache_bytes": 10 << 30, "saved_bytes": 0}
WITH = {"slots": 8, "kv_cache_bytes": 11 << 30, "saved_bytes": 1 << 30}
SPEED = {
    "slots": 8,
    "batch": 1,
    "engine": "device",
    "tokens_per_second": 20.0,
    "torch_bytes": 9 << 30,
    "hit_rate": 0.1,
    "sequences_as_with_all": 1,
    "control_changes_tokens": True,
    "optimum_hit_rate": 0.25,
}
EIGHT = {"batch": 8, "sequences_as_with_all": 5}
EVERY = {"slots": 128, "engine": "resident", "hit_rate": None, "optimum_hit_rate": None}


def judged(claim: ClaimTest, *rows: dict[str, Any], limit: float = 1.0) -> Any:
    return by_rows(claim, {"min_share": limit}, *rows)


def verdict(claim: ClaimTest, *rows: dict[str, Any], limit: float = 1.0) -> ClaimVerdict:
    return by_rows(claim, {"min_share": limit}, *rows).verdict


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "other tokens", "detail": "prompt 1"},
        {"outcome": "crash", "misses": None},
        {"outcome": "no control", "misses": None},
        {"misses": 0},
        {"misses": None},
    ],
)
def test_an_engine_with_other_tokens_or_without_a_miss_refutes(change: dict[str, Any]) -> None:
    assert verdict(claims.engine_tokens, PLANTED, CELL, CELL) is ClaimVerdict.CONFIRMED
    assert verdict(claims.engine_tokens, PLANTED, CELL, {**CELL, **change}) is ClaimVerdict.REFUTED
    assert verdict(claims.engine_tokens, CELL, {**CELL, **change}) is ClaimVerdict.REFUTED


@pytest.mark.parametrize(
    ("rows", "doubt"),
    [
        ([CELL], "no planted fault was seen to change the tokens of BF16 TRITON"),
        ([{**CELL, "planted": True}, CELL], "no planted fault was seen"),
        ([{**PLANTED, "outcome": "crash", "misses": None}, CELL], "no planted fault was seen"),
        ([{**PLANTED, "chosen": "MARLIN"}, CELL], "no planted fault was seen"),
        ([PLANTED, CELL, {**CELL, "backend": "FP8 TRITON"}], "to change the tokens of FP8 TRITON"),
        ([PLANTED, {**CELL, "chosen": "MARLIN"}], "computed with MARLIN and the cache's engine device"),
        ([PLANTED, {**CELL, "chosen": "not logged"}], "computed with not logged"),
        ([PLANTED, {**CELL, "engine": "host"}], "computed with TRITON and the cache's engine host"),
    ],
)
def test_equal_tokens_count_only_if_a_planted_fault_shows(rows: list[dict[str, Any]], doubt: str) -> None:
    judgement = judged(claims.engine_tokens, *rows)
    assert judgement.verdict is ClaimVerdict.UNTESTED
    assert doubt in judgement.reason
    assert len(judgement.evidence["rows"]) == len(rows), "the planted ones are shown, too"


def test_rows_of_older_reports_can_still_be_judged() -> None:
    new = ("asked", "planted", "control_changes_tokens", "optimum_hit_rate")
    old = {key: value for key, value in CELL.items() if key not in new}
    assert verdict(claims.engine_tokens, old) is ClaimVerdict.UNTESTED


def test_the_figure_counts_equal_tokens_and_equal_logprobs() -> None:
    off = {**CELL, "detail": "logprobs differ by up to 0.01"}
    assert judged(claims.engine_tokens, PLANTED, CELL, off).reason.startswith(
        "2 of 2 engines give the tokens of the one without a cache, 1 its logprobs"
    )
    judgement = judged(claims.engine_tokens, {**CELL, "outcome": "no control"})
    assert judgement.verdict is ClaimVerdict.UNTESTED


def test_an_engine_that_starts_has_not_refused() -> None:
    not_run = {"setting": "expert parallel", "refused": None, "said": "not run"}
    assert verdict(claims.engine_refusals, REFUSED) is ClaimVerdict.CONFIRMED
    assert verdict(claims.engine_refusals, REFUSED, {**REFUSED, "refused": False}) is ClaimVerdict.REFUTED
    judgement = judged(claims.engine_refusals, REFUSED, not_run)
    assert (judgement.verdict, judgement.reason) == (
        ClaimVerdict.CONFIRMED,
        "1 of 1 refused with the reason; not run: expert parallel",
    )
    judgement = judged(claims.engine_refusals, not_run)
    assert (judgement.verdict, judgement.reason) == (
        ClaimVerdict.UNTESTED,
        "no engine was asked; not run: expert parallel",
    )
    assert verdict(claims.engine_refusals) is ClaimVerdict.UNTESTED


def test_the_profile_must_find_what_is_saved() -> None:
    little = {**WITH, "kv_cache_bytes": WITHOUT["kv_cache_bytes"] + (9 << 26)}
    nothing = {**WITH, "saved_bytes": 0}
    assert verdict(claims.engine_memory, WITHOUT, WITH, limit=0.95) is ClaimVerdict.CONFIRMED
    assert verdict(claims.engine_memory, WITHOUT, little, limit=0.95) is ClaimVerdict.REFUTED
    assert verdict(claims.engine_memory, WITHOUT, nothing, limit=0.95) is ClaimVerdict.REFUTED
    died = {"slots": 8, "error": "died"}
    assert verdict(claims.engine_memory, WITHOUT, died, limit=0.95) is ClaimVerdict.UNTESTED


@pytest.mark.parametrize("change", [{"sequences_as_with_all": 0}, {"engine": "host"}])
def test_a_single_sequence_draws_the_same_tokens(change: dict[str, Any]) -> None:
    more = [{**SPEED, "slots": slots, **batch} for slots in (16, 32, 64) for batch in ({}, EIGHT)]
    every = (*more, {**SPEED, **EVERY}, {**SPEED, **EVERY, **EIGHT})
    good = judged(claims.engine_speed, SPEED, {**SPEED, **EIGHT}, *every)
    assert good.verdict is ClaimVerdict.CONFIRMED
    assert (
        "8 slots: 20.0 tokens/s, 20.0 with 8 sequences, 9.0 GiB, hit rate 10% of at most 25%; 16 slots"
        in good.reason
    )
    bad = ({**SPEED, **change}, {**SPEED, **EIGHT})
    assert verdict(claims.engine_speed, *bad, *every) is ClaimVerdict.REFUTED
    assert verdict(claims.engine_speed, SPEED, {**SPEED, **EIGHT}, *every[2:]) is ClaimVerdict.UNTESTED
    unbounded = {**SPEED, "optimum_hit_rate": None}
    judgement = judged(claims.engine_speed, unbounded, {**SPEED, **EIGHT}, *every)
    assert "hit rate 10% (no bound is known); 16" in judgement.reason
    without = {key: value for key, value in SPEED.items() if key != "control_changes_tokens"}
    for blind in ({**SPEED, "control_changes_tokens": False}, without):
        judgement = judged(claims.engine_speed, blind, {**SPEED, **EIGHT}, *every)
        assert judgement.verdict is ClaimVerdict.UNTESTED
        assert "no planted fault was seen to change the tokens with [8] slots" in judgement.reason
    unseen = {**SPEED, **EVERY, "control_changes_tokens": False}
    rows = (SPEED, {**SPEED, **EIGHT}, *more, unseen, {**SPEED, **EVERY, **EIGHT})
    assert verdict(claims.engine_speed, *rows) is ClaimVerdict.UNTESTED
