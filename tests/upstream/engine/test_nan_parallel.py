"""Two data-parallel ranks: what each engine is told, and how what they saw is added up."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.results import Death, UnavailableError
from moedoctor.upstream.engine import nan_parallel
from moedoctor.upstream.engine.engine import EngineError, EngineRequest, EngineResult

SEEN = {
    "steps": 24,
    "steps_with_padding": 20,
    "nan_in_padding": 10,
    "inf_in_padding": 1,
    "mean_pad_tokens": 5.0,
    "nan_in_real": 0,
    "routers": [{"repeated": [0, 7, 0]}],
    "routers_watched": 4,
    "first_padding": {"what": "NaN", "point": "model.layers.0.self_attn.attn", "step": 2},
}


def result(rank: int, **changed: Any) -> EngineResult:
    return EngineResult(label=f"DP=2, rank {rank}", probe={**SEEN, **changed})


def test_the_engines_differ_in_rank_and_load_alone() -> None:
    first, second = nan_parallel.rank_requests(Path("model"), "DEP=2", {"enable_expert_parallel": True})
    assert first.arguments == second.arguments
    assert first.arguments["enable_expert_parallel"] is True
    assert first.arguments["compilation_config"]["cudagraph_mode"] == "PIECEWISE"
    assert first.arguments["distributed_executor_backend"] == "uni"
    assert first.arguments["async_scheduling"] is False
    differing = {key for key in first.environ if first.environ[key] != second.environ[key]}
    assert differing == {"VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL"}
    assert [one.environ["VLLM_DP_RANK"] for one in (first, second)] == ["0", "1"]
    assert first.environ["MOEDOCTOR_TRACE"] == "nan"
    assert len(first.prompts) > len(second.prompts) > 0
    assert first.max_tokens > second.max_tokens


def test_ports_that_somebody_listens_at_are_passed_over() -> None:
    first = nan_parallel.free_ports(4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 2))
        taken.listen()
        assert nan_parallel.free_ports(4) != first


def test_a_row_a_rank_and_one_for_both() -> None:
    second = result(1, steps=12, steps_with_padding=12, nan_in_padding=12, mean_pad_tokens=13.0)
    rows = nan_parallel.table_rows("DP=2", [result(0), second])
    assert [row["config"] for row in rows] == ["DP=2, rank 0", "DP=2, rank 1", "DP=2, both ranks"]
    assert [row["nan_share"] for row in rows] == [0.5, 1.0, round(22 / 32, 4)]
    both = rows[-1]
    assert (both["steps"], both["steps_with_padding"], both["nan_in_padding"]) == (36, 32, 22)
    assert both["mean_pad_tokens"] == 8.0  # (5 * 20 + 13 * 12) / 32
    assert [row["routers_watched"] for row in rows] == [4, 4, 8]
    assert both["rows_with_repeated_ids"] == 14


def test_a_rank_that_died_leaves_no_sum() -> None:
    died = EngineResult(label="DP=2, rank 1", error=EngineError("hang", "no answer", "process", Death.HANG))
    rows = nan_parallel.table_rows("DP=2", [result(0), died])
    assert [row.get("error") for row in rows] == [None, "process: hang: no answer"]


@pytest.mark.parametrize("gpus", [0, 1])
def test_two_ranks_need_two_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UnavailableError, match=f"need 2 GPUs; here are {gpus}"):
        nan_parallel.parallel_table({})


def test_both_ranks_run_side_by_side_for_each_config(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def run(requests: Sequence[EngineRequest], *, parallel: int) -> list[EngineResult]:
        started.append((parallel, [one.label for one in requests]))
        return [EngineResult(label=one.label, probe=SEEN) for one in requests]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nan_parallel, "run_engines", run)
    rows = nan_parallel.parallel_table({})
    assert started == [
        (2, ["DP=2, rank 0", "DP=2, rank 1"]),
        (2, ["DEP=2, rank 0", "DEP=2, rank 1"]),
    ]
    assert [row["config"] for row in rows][2::3] == ["DP=2, both ranks", "DEP=2, both ranks"]
