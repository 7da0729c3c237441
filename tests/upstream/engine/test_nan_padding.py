"""Engines with the NaN trace: rows of engines that ran or died, and two data-parallel ranks added up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_stub import died

from moedoctor.faults.routing.nan_routing import NanRouting
from moedoctor.interfaces import Measurement
from moedoctor.results import ClaimVerdict, Death, Observation, UnavailableError
from moedoctor.upstream.engine import engine, nan_padding
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult
from moedoctor.upstream.engine.experiment import attach_controls

SEEN = {"steps": 24, "steps_with_padding": 20, "nan_in_padding": 20, "inf_in_padding": 0, "nan_in_real": 0}
SEEN |= dict.fromkeys(("first_padding", "first_real")) | {"mean_pad_tokens": 5.0}
SEEN |= {"routers": [], "routers_watched": 2}
DEAD = died("no answer", kind="hang", stage="process", death=Death.HANG)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Engines run here; `died_labels` of `run` die."""
    calls: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(engine, "need_engine", lambda: None)
    run(monkeypatch, calls)
    return calls


def run(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, list[str]]], *dead: str) -> None:
    """Engines of these labels die; the others run."""

    def run_engines(requests: Sequence[EngineRequest], *, parallel: int) -> list[EngineResult]:
        calls.append((parallel, [request.label for request in requests]))
        alive = EngineResult("", ((1, 2),) * 3, probe=SEEN)
        labels = [request.label for request in requests]
        return [replace(DEAD if label in dead else alive, label=label) for label in labels]

    monkeypatch.setattr(engine, "run_engines", run_engines)


def verdict(key: str, rows: list[dict[str, Any]], limits: dict[str, float]) -> ClaimVerdict:
    (claim,) = (claim for claim in NanRouting.claims if claim.key == key)
    return claim.judge((), [Measurement("installed", Observation({"rows": rows}))], limits).verdict


@pytest.mark.parametrize("dead", [(), ("1 GPU, FLASH_ATTN",)])
def test_an_engine_that_died_confirms_nothing_about_padding(started, monkeypatch, dead):
    run(monkeypatch, started, *dead)
    rows = nan_padding.measure_padding({})
    expected = ClaimVerdict.UNTESTED if dead else ClaimVerdict.CONFIRMED
    assert verdict("padding_holds_nan", rows, {"min_share": 0.95}) is expected
    assert rows[-1]["config"] == "DP=2"
    assert "error" not in rows[-1]


def test_if_no_engine_ran_there_is_no_table(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, started, "1 GPU, TRITON_ATTN", "1 GPU, FLASH_ATTN")
    with pytest.raises(UnavailableError, match="no engine ran: process: hang: no answer"):
        nan_padding.measure_padding({})


def test_the_ranks_differ_only_in_rank_and_load() -> None:
    trials = nan_padding.rank_trials("model", "DEP=2", {"enable_expert_parallel": True})
    first, second = (trial.request for trial in trials)
    assert first.arguments == second.arguments
    assert first.arguments["enable_expert_parallel"] is True
    assert first.arguments["compilation_config"]["cudagraph_mode"] == "PIECEWISE"
    assert first.arguments["distributed_executor_backend"] == "uni"
    assert first.arguments["async_scheduling"] is False
    differing = {key for key in first.environ if first.environ[key] != second.environ[key]}
    assert differing == {"VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL"}
    assert [request.environ["VLLM_DP_RANK"] for request in (first, second)] == ["0", "1"]
    assert first.environ["MOEDOCTOR_TRACE"] == "nan"
    assert len(first.prompts) > len(second.prompts) > 0
    assert first.max_tokens > second.max_tokens


def rank_rows(*results: EngineResult) -> list[dict[str, Any]]:
    trials = nan_padding.rank_trials("model", "DP=2", {})
    return nan_padding.rank_rows("DP=2", attach_controls(trials, results))


def test_the_table_has_a_row_per_rank_and_a_total() -> None:
    place = {"what": "NaN", "point": "model.layers.0.self_attn.attn", "step": 2}
    probe = {**SEEN, "nan_in_padding": 10, "routers": [{"repeated": [0, 7, 0]}], "first_padding": place}
    other = {**probe, "steps": 12, "steps_with_padding": 12, "nan_in_padding": 12, "mean_pad_tokens": 13.0}
    rows = rank_rows(EngineResult("", probe=probe), EngineResult("", probe=other))
    assert [row["config"] for row in rows] == ["DP=2, rank 0", "DP=2, rank 1", "DP=2, both ranks"]
    assert [row["nan_share"] for row in rows] == [0.5, 1.0, round(22 / 32, 4)]
    total = rows[-1]
    assert (total["steps"], total["steps_with_padding"], total["nan_in_padding"]) == (36, 32, 22)
    assert total["mean_pad_tokens"] == 8.0  # (5 * 20 + 13 * 12) / 32
    assert [row["routers_watched"] for row in rows] == [2, 2, 4]
    assert total["rows_with_repeated_ids"] == 14
    assert rows[0]["first_in_padding"] == "NaN at model.layers.0.self_attn.attn"
    alone = rank_rows(EngineResult("", probe=probe), DEAD)
    assert [row.get("error") for row in alone] == [None, "process: hang: no answer"]


@pytest.mark.parametrize(("gpus", "where"), [(1, " on one GPU"), (2, "")])
def test_both_ranks_run_side_by_side_for_each_config(started, monkeypatch, gpus, where):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    rows = nan_padding.measure_parallel_padding({})
    assert started == [
        (2, [f"DP=2{where}, rank 0", f"DP=2{where}, rank 1"]),
        (2, [f"DEP=2{where}, rank 0", f"DEP=2{where}, rank 1"]),
    ]
    assert [row["config"] for row in rows][2::3] == [f"DP=2{where}, both ranks", f"DEP=2{where}, both ranks"]
