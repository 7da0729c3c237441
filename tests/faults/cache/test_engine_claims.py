"""The judges of MD007's claims about the expert cache inside vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from fault_cases import by_rows

from moedoctor.faults.cache import engine_claims as claims
from moedoctor.interfaces import ClaimTest, Measurement
from moedoctor.results import ClaimVerdict, Crash, Death, Observation, Outcome, Skip

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
    "sequences": 3,
    "sequences_as_with_all": 3,
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
        (
            [PLANTED, {**CELL, "sequences": 1, "hits_first": None}],
            "one sequence: computed with TRITON in one call",
        ),
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


def padded(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of `engine_padding` if everything is right, but for `changes` by runner and graph."""
    counted = {"V1 4, padding counts": 71, "V2 4, padding counts": 70}
    asked = {"V1 3": 60, "V1 4": 60, "V2 3": 62, "V2 4": 62, **counted}
    return [
        {
            "runner": label[:2],
            "graph": label[3:],
            "runner_in_use": label[:2],
            "outcome": "same tokens",
            "lookups": lookups,
            **changes.get(label, {}),
        }
        for label, lookups in asked.items()
    ]


@pytest.mark.parametrize(
    ("label", "change", "expected"),
    [
        ("", {}, ClaimVerdict.CONFIRMED),
        ("V1 4", {"lookups": 61}, ClaimVerdict.REFUTED),
        ("V2 4", {"lookups": 61}, ClaimVerdict.REFUTED),
        ("V2 4", {"outcome": "other tokens"}, ClaimVerdict.REFUTED),
        ("V1 4, padding counts", {"lookups": 60}, ClaimVerdict.UNTESTED),
        ("V2 4, padding counts", {"lookups": 62}, ClaimVerdict.UNTESTED),
        ("V2 3", {"runner_in_use": "V1"}, ClaimVerdict.UNTESTED),
        ("V2 4", {"error": "died"}, ClaimVerdict.UNTESTED),
    ],
)
def test_padding_asks_for_nothing(label: str, change: dict[str, Any], expected: ClaimVerdict) -> None:
    judgement = by_rows(claims.engine_padding, {"max_more": 0}, *padded(**{label: change}))
    assert judgement.verdict is expected, judgement.reason


def streamed(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of `engine_stream` if everything is right, but for `changes` by backend and cache."""
    rows = []
    for backend, chosen in (("BF16 TRITON", "TRITON"), ("NVFP4 MARLIN", "MARLIN")):
        for cache, planted in (("6", False), ("6:stream=0", False), ("6", True)):
            label = f"{chosen} {'planted' if planted else cache}"
            row = {
                "backend": backend,
                "runner": "V2",
                "mode": "CUDA graphs",
                "cache": cache,
                "planted": planted,
                "asked": chosen,
                "chosen": chosen,
                "runner_in_use": "V2",
                "engine": "device",
                "stream_bytes": 0 if "stream=0" in cache else 64,
                "lookups": 90 if "stream=0" in cache else 40,
                "outcome": "other tokens" if planted else "same tokens",
                "detail": "x of 12 clear prompts",
                "clear_prompts": 12,
                "same_prompts": 6 if planted else 12,
                "same_logprobs": 12,
            }
            rows.append({**row, **changes.get(label, {})})
    return rows


NOT_COMPARED = {"outcome": "not compared", "detail": "RuntimeError: died"}
NO_REFERENCE = {"outcome": "not compared", "detail": "no reference: died"}


@pytest.mark.parametrize(
    ("label", "change", "expected"),
    [
        ("", {}, ClaimVerdict.CONFIRMED),
        ("TRITON 6", {"outcome": "other tokens", "same_prompts": 11}, ClaimVerdict.REFUTED),
        ("MARLIN 6:stream=0", {"outcome": "other tokens", "same_prompts": 11}, ClaimVerdict.CONFIRMED),
        ("MARLIN 6", NOT_COMPARED, ClaimVerdict.REFUTED),
        ("MARLIN 6", NO_REFERENCE, ClaimVerdict.UNTESTED),
        ("TRITON 6", {"clear_prompts": 7, "same_prompts": 7}, ClaimVerdict.UNTESTED),
        ("TRITON 6", {"chosen": "MARLIN"}, ClaimVerdict.UNTESTED),
        ("TRITON 6", {"runner_in_use": "V1"}, ClaimVerdict.UNTESTED),
        ("TRITON 6", {"engine": "host"}, ClaimVerdict.UNTESTED),
        ("TRITON 6", {"stream_bytes": 0}, ClaimVerdict.UNTESTED),
        ("TRITON 6", {"lookups": 90}, ClaimVerdict.UNTESTED),
        ("TRITON 6:stream=0", {"lookups": 40}, ClaimVerdict.UNTESTED),
        (
            "TRITON 6:stream=0",
            {**NOT_COMPARED, "cache": "died:stream=0", "runner": "V1"},
            ClaimVerdict.UNTESTED,
        ),
        ("MARLIN planted", {"same_prompts": 7}, ClaimVerdict.UNTESTED),
        ("MARLIN planted", {**NOT_COMPARED, "same_prompts": None}, ClaimVerdict.UNTESTED),
    ],
)
def test_streamed_prompts_give_the_same_tokens(
    label: str, change: dict[str, Any], expected: ClaimVerdict
) -> None:
    rows = [
        {key: value for key, value in row.items() if value is not None} for row in streamed(**{label: change})
    ]
    judgement = judged(claims.engine_stream, *rows)
    assert judgement.verdict is expected, judgement.reason


def test_no_streaming_engine_confirms_nothing() -> None:
    assert verdict(claims.engine_stream) is ClaimVerdict.UNTESTED


def test_the_profile_must_find_what_is_saved() -> None:
    little = {**WITH, "kv_cache_bytes": WITHOUT["kv_cache_bytes"] + (9 << 26)}
    nothing = {**WITH, "saved_bytes": 0}
    assert verdict(claims.engine_memory, WITHOUT, WITH, limit=0.95) is ClaimVerdict.CONFIRMED
    assert verdict(claims.engine_memory, WITHOUT, little, limit=0.95) is ClaimVerdict.REFUTED
    assert verdict(claims.engine_memory, WITHOUT, nothing, limit=0.95) is ClaimVerdict.REFUTED
    split = by_rows(
        claims.engine_memory, {"min_share": 0.95}, WITHOUT, {**little, "unreleased_bytes": 7 << 26}
    )
    assert split.reason is not None
    assert split.reason.endswith("that the caches save; torch cannot release 0.438 GiB more")
    died = {"slots": 8, "error": "died"}
    assert verdict(claims.engine_memory, WITHOUT, died, limit=0.95) is ClaimVerdict.UNTESTED


@pytest.mark.parametrize("change", [{"sequences_as_with_all": 2}, {"engine": "host"}])
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


def verdict_of(claim: ClaimTest, rows: list[dict[str, Any]], **limits: float) -> ClaimVerdict:
    return by_rows(claim, limits, *rows).verdict


PUBLISHED = {
    "model": "gemma",
    "scheme": "bf16",
    "engine": "device",
    "gigabytes": 8.0,
    "published_gigabytes": 8.6,
    "tokens_per_second": 16.0,
    "published_tokens_per_second": 14.8,
    "drawn_tokens": 26,
    "distinct_tokens": 26,
}
GAIN = {
    "cache": "16",
    "slots": 16,
    "batch": 1,
    "tokens_per_second": 30.0,
    "rounds": [25.0, 35.0],
    "gpu_rounds": [26.0, 36.0],
    "times_before": 1.5,
    "gpu_times_before": 1.6,
    "bus_bound_tokens_per_second": 33.0,
    "bus_bound_rounds": [28.0, 38.0],
    "sequences": 3,
    "sequences_as_before": 3,
    "control_changes_tokens": True,
    "prompt_tokens": 256,
    "first_reply_tokens_per_second": 27.0,
    "repeated_reply_tokens_per_second": 29.0,
    "gpu_replies": [28.0, 30.0],
}


def gains(**change: Any) -> list[dict[str, Any]]:
    """Rows of 16, 32 and 64 slots for one sequence and for eight; `change` is for 16 slots, one sequence."""
    single = [{**GAIN, "slots": slots, "cache": str(slots)} for slots in (16, 32, 64)]
    single[0] |= change
    eight = {"batch": 8, "rounds": [25.0, 25.0], "gpu_rounds": [26.0, 26.0]}
    return [*single, *({**row, **eight} for row in single)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ClaimVerdict.CONFIRMED),
        ({"times_before": 1.1, "gpu_times_before": 1.1}, ClaimVerdict.REFUTED),
        ({"times_before": 1.1}, ClaimVerdict.UNTESTED),
        ({"gpu_times_before": 1.1}, ClaimVerdict.UNTESTED),
        ({"sequences_as_before": 2}, ClaimVerdict.REFUTED),
        ({"control_changes_tokens": False}, ClaimVerdict.UNTESTED),
    ],
)
def test_new_defaults_are_faster_with_the_same_tokens(change: dict[str, Any], expected: ClaimVerdict) -> None:
    limits = {"min_gain": 1.2}
    assert verdict_of(claims.engine_gain, gains(**change), **limits) is expected
    slow = {**GAIN, "slots": 64, "cache": "64:overlap=1", "times_before": 0.5, "sequences_as_before": 0}
    shown = by_rows(claims.engine_gain, limits, *gains(**change), slow)
    assert (shown.verdict, "64:overlap=1: 0.50 times" in shown.reason) == (expected, True)
    few = by_rows(claims.engine_gain, limits, *(row for row in gains() if row["slots"] != 16))
    assert (few.verdict, "no time for [16] slots" in few.reason) == (ClaimVerdict.UNTESTED, True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ClaimVerdict.CONFIRMED),
        ({"rounds": [25.1, 35.0]}, ClaimVerdict.UNTESTED),
        ({"rounds": [25.1, 35.0], "gpu_rounds": [26.1, 36.0]}, ClaimVerdict.REFUTED),
        ({"rounds": [25.1, 35.0], "gpu_rounds": None}, ClaimVerdict.REFUTED),
    ],
)
def test_eight_sequences_beside_one(change: dict[str, Any], expected: ClaimVerdict) -> None:
    judgement = by_rows(claims.engine_gain_batch, {"min_share": 1.0}, *gains(**change))
    assert judgement.verdict is expected
    assert "32 slots: 25.0 tokens/s with 8 sequences, 25.0 with one, 1.00 times; the bus allows 28.0" in str(
        judgement.reason
    )
    assert {name: judgement.evidence["rows"][-1][name] for name in ("slots", "batch")} == {
        "slots": 64,
        "batch": 8,
    }
    single = by_rows(claims.engine_gain_batch, {"min_share": 1.0}, *gains()[:5])
    assert (single.verdict, "no time for [64] slots" in str(single.reason)) == (ClaimVerdict.UNTESTED, True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ClaimVerdict.CONFIRMED),
        ({"first_reply_tokens_per_second": 26.0}, ClaimVerdict.UNTESTED),
        ({"first_reply_tokens_per_second": 26.0, "gpu_replies": [26.0, 30.0]}, ClaimVerdict.REFUTED),
    ],
)
def test_a_first_reply_beside_the_same_once_more(change: dict[str, Any], expected: ClaimVerdict) -> None:
    judgement = by_rows(claims.engine_gain_reply, {"min_reply": 0.9}, *gains(**change))
    assert judgement.verdict is expected
    assert "64 slots, 256 tokens: first reply 27.0 tokens/s, once more 29.0" in str(judgement.reason)
    few = [{name: row[name] for name in row if row["slots"] != 64 or "reply" not in name} for row in gains()]
    unanswered = by_rows(claims.engine_gain_reply, {"min_reply": 0.9}, *few)
    assert unanswered.verdict is ClaimVerdict.UNTESTED
    assert "no time for [64] slots" in str(unanswered.reason)


CUT = {"cut": "process: hang: no answer within 420 s"}


@pytest.mark.parametrize(
    ("rows", "expected", "words"),
    [
        (
            gains(**CUT),
            ClaimVerdict.CONFIRMED,
            "the bus allows 33.0; the engine was cut: process: hang: no answer",
        ),
        (gains(**CUT, times_before=1.0, gpu_times_before=1.0), ClaimVerdict.REFUTED, "the engine was cut"),
        (
            [{**row, **CUT} for row in gains() if row["slots"] == 32],
            ClaimVerdict.UNTESTED,
            "32 slots: 30.0 tokens/s, 1.50 times the old defaults' (1.60 by GPU events); new text "
            "25.0, the same again 35.0; the bus allows 33.0; the engine was cut",
        ),
        (
            [{"cache": "32:policy=lfru", "slots": 32, "batch": 1, "tokens_per_second": 20.0, **CUT}],
            ClaimVerdict.UNTESTED,
            "32:policy=lfru: 20.0 tokens/s; the engine was cut: process: hang: no answer within 420 s; "
            "no time for [16, 32, 64] slots",
        ),
    ],
)
def test_rows_of_an_engine_that_was_cut_decide_if_they_are_enough(
    rows: list[dict[str, Any]], expected: ClaimVerdict, words: str
) -> None:
    judgement = by_rows(claims.engine_gain, {"min_gain": 1.2}, *rows)
    assert (judgement.verdict, words in judgement.reason) == (expected, True)
    assert judgement.evidence["rows"] == rows


def test_a_cut_engine_is_named_beside_its_speeds() -> None:
    judgement = judged(claims.engine_speed, {**SPEED, **CUT}, {**SPEED, **EIGHT})
    assert judgement.verdict is ClaimVerdict.UNTESTED
    assert "hit rate 10% of at most 25%; the engine was cut: process: hang" in judgement.reason


@pytest.mark.parametrize("lost", [Skip("interrupted before it finished"), Crash(Death.HANG, "no answer")])
@pytest.mark.parametrize(
    ("claim", "limits", "figure"),
    [
        (claims.engine_nvfp4, {"min_gain": 2.0}, "nvfp4, 8 slots: 21.0 tokens/s; bf16: "),
        (
            claims.engine_published_gemma,
            {"min_speed": 1.0, "max_memory": 1.15},
            "gemma, nvfp4: 8.0 GB (8.6 published), 21.0 tokens/s (14.8 published); bf16: ",
        ),
    ],
)
def test_a_format_that_finished_is_kept_if_the_other_did_not(
    claim: ClaimTest, limits: dict[str, float], figure: str, lost: Outcome
) -> None:
    assert set(claim.units([])) == {"nvfp4", "bf16"}
    row = {**PUBLISHED, "scheme": "nvfp4", "tokens_per_second": 21.0, "slots": 8, "batch": 1}
    units = [Measurement("nvfp4", Observation({"rows": [row]})), Measurement("bf16", lost)]
    judgement = claim.judge((), units, limits)
    assert (judgement.verdict, judgement.evidence) == (ClaimVerdict.UNTESTED, {"rows": [row]})
    why = lost.reason if isinstance(lost, Skip) else "no answer"
    assert judgement.reason is not None
    assert judgement.reason.startswith(figure + why)


def test_nvfp4_is_compared_at_the_same_slots() -> None:
    def rows(rate: float, slots: tuple[int, ...] = (8, 16)) -> list[dict[str, Any]]:
        return [
            {"scheme": scheme, "slots": count, "batch": 1, "tokens_per_second": speed}
            for count in slots
            for scheme, speed in (("nvfp4", rate), ("bf16", 10.0))
        ]

    assert verdict_of(claims.engine_nvfp4, rows(21.0), min_gain=2.0) is ClaimVerdict.CONFIRMED
    assert verdict_of(claims.engine_nvfp4, rows(19.0), min_gain=2.0) is ClaimVerdict.REFUTED
    assert verdict_of(claims.engine_nvfp4, rows(21.0, (8,)), min_gain=2.0) is ClaimVerdict.UNTESTED
    assert verdict_of(claims.engine_nvfp4, [], min_gain=2.0) is ClaimVerdict.UNTESTED


@pytest.mark.parametrize("claim", [claims.engine_published_nemotron, claims.engine_published_gemma])
def test_the_published_table_is_shown_beside(claim: ClaimTest) -> None:
    row, other = PUBLISHED, {**PUBLISHED, "scheme": "nvfp4"}
    limits = {"min_speed": 1.0, "max_memory": 1.15}
    assert verdict_of(claim, [row, other], **limits) is ClaimVerdict.CONFIRMED
    for change in ({"gigabytes": 10.0}, {"tokens_per_second": 14.0}, {"engine": "host"}):
        assert verdict_of(claim, [row, {**other, **change}], **limits) is ClaimVerdict.REFUTED
    missing = [row, {**other, "error": "no backend"}]
    assert verdict_of(claim, missing, **limits) is ClaimVerdict.UNTESTED
    assert verdict_of(claim, [row], **limits) is ClaimVerdict.UNTESTED


@pytest.mark.parametrize("claim", [claims.engine_published_nemotron, claims.engine_published_gemma])
def test_a_model_that_repeats_its_token_proves_no_speed(claim: ClaimTest) -> None:
    rows = [PUBLISHED, {**PUBLISHED, "scheme": "nvfp4", "distinct_tokens": 1}]
    judgement = by_rows(claim, {"min_speed": 1.0, "max_memory": 1.15}, *rows)
    assert judgement.verdict is ClaimVerdict.UNTESTED
    assert str(judgement.reason).endswith("nvfp4: 1 different tokens of 26")
