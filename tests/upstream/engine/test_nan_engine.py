"""What the engines of the NaN experiments give, where some of them died."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moedoctor.faults.routing.nan_routing import end_to_end, padding_holds_nan
from moedoctor.interfaces import Measurement
from moedoctor.results import ClaimVerdict, Death, Observation, UnavailableError
from moedoctor.upstream.engine import nan_padding_engines as nan_engine
from moedoctor.upstream.engine.engine import EngineError, EngineRequest, EngineResult

SEEN = {
    "steps": 24,
    "steps_with_padding": 20,
    "nan_in_padding": 20,
    "inf_in_padding": 0,
    "mean_pad_tokens": 5.0,
    "nan_in_real": 0,
    "routers_watched": 2,
    "first_padding": None,
    "first_real": None,
}


def run(monkeypatch: pytest.MonkeyPatch, *dead: str) -> None:
    """Engines of these labels die; the others run, and the old top-k repeats experts."""

    def engines(requests: Sequence[EngineRequest], *, parallel: int) -> list[EngineResult]:
        died = EngineError("hang", "no answer", "process", Death.HANG)
        return [
            EngineResult(label=one.label, error=died)
            if one.label in dead
            else EngineResult(
                label=one.label,
                probe={**SEEN, "routers": [{"repeated": [0, 7, 0]}] if one.label == nan_engine.OLD else []},
                tokens=[[1, 2]] * 3,
            )
            for one in requests
        ]

    monkeypatch.setattr(nan_engine, "run_engines", engines)
    monkeypatch.setattr(nan_engine, "shared_object", lambda path: path)
    monkeypatch.setattr(nan_engine, "write_qwen3_moe", lambda folder, **options: Path("model"))


def verdict(judge: Any, rows: list[dict[str, Any]], limits: dict[str, float]) -> ClaimVerdict:
    found: ClaimVerdict = judge((), [Measurement("installed", Observation({"rows": rows}))], limits).verdict
    return found


@pytest.mark.parametrize(
    ("dead", "expected"),
    [
        ((), ClaimVerdict.CONFIRMED),
        (("untouched",), ClaimVerdict.UNTESTED),
        ((nan_engine.OWN,), ClaimVerdict.UNTESTED),
        ((nan_engine.OLD,), ClaimVerdict.UNTESTED),
    ],
)
def test_an_engine_that_died_decides_nothing_end_to_end(
    monkeypatch: pytest.MonkeyPatch, dead: tuple[str, ...], expected: ClaimVerdict
) -> None:
    run(monkeypatch, *dead)
    rows = nan_engine.end_to_end({"vllm@0.19.1": "wheel"})
    limits = {"min_share": 1.0, "max_rows": 0, "min_old_rows": 1}
    assert verdict(end_to_end.judge, rows, limits) is expected
    same = {row["engine"]: row.get("prompts_with_the_same_tokens") for row in rows}
    if "untouched" in dead:
        assert set(same.values()) == {None}
    else:
        assert same["untouched"] == 3


@pytest.mark.parametrize(
    ("dead", "expected"),
    [
        ((), ClaimVerdict.CONFIRMED),
        (("1 GPU, FLASH_ATTN",), ClaimVerdict.UNTESTED),
        ((nan_engine.POISONED,), ClaimVerdict.CONFIRMED),
    ],
)
def test_an_engine_that_died_confirms_nothing_of_padding(
    monkeypatch: pytest.MonkeyPatch, dead: tuple[str, ...], expected: ClaimVerdict
) -> None:
    run(monkeypatch, *dead)
    rows = nan_engine.padding_table({})
    assert verdict(padding_holds_nan.judge, rows, {"min_share": 0.95}) is expected
    assert rows[-1]["config"] == "DP=2"
    assert "error" not in rows[-1]


def test_where_no_engine_ran_there_is_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "1 GPU, TRITON_ATTN", "1 GPU, FLASH_ATTN", nan_engine.POISONED)
    with pytest.raises(UnavailableError, match="no engine ran: process: hang: no answer"):
        nan_engine.padding_table({})
