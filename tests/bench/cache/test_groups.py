"""The measurements for the claims about groups and loads, without and with a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moedoctor.bench.cache import groups as bench
from moedoctor.bench.cache.model import Model
from moedoctor.bench.timing import Comparison, compare_rounds
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.results import UnavailableError

SMALL = Model(layers=1, experts=16, top_k=2, hidden_size=64, intermediate_size=32)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_the_maps_of_the_groups_hold_every_expert_once(groups: int) -> None:
    maps = torch.stack(bench._make_expert_maps(32, groups, "cpu"))
    assert torch.equal(maps.amax(0), torch.arange(32, dtype=torch.int32))
    assert ((maps >= 0).sum(0) == 1).all()
    assert ((maps >= 0).sum(1) == 32 // groups).all()


def _fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """Compute as vLLM's kernel does: experts that are mapped to -1 add nothing."""
    local = ids if expert_map is None else expert_map[ids.long()]  # [T, K]
    return moe_forward(x, {"w13": w13, "w2": w2}, local, topk_weights).bfloat16()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were timed as graphs. Each later name gets a longer time; eager calls run."""
    names: list[str] = []

    def times(calls: Any, *, baseline: str, launches: int) -> Comparison:
        names.extend(calls)
        measures: dict[str, Callable[[], float]] = {
            name: lambda name=name: 100.0 * len(calls) * (1 + list(calls).index(name)) for name in calls
        }
        return compare_rounds(measures, baseline=baseline, rounds=1)

    monkeypatch.setattr(bench, "compare_times", times)
    monkeypatch.setattr("moedoctor.upstream.moe_backends.modular_moe.call_fused_experts", _fused_experts)
    return names


def test_graphs_and_eager_calls_are_timed_and_set_beside_one_call(timed: list[str]) -> None:
    cost = bench.compare_upstream_groups("cpu", tokens=9, model=SMALL)
    assert timed == ["1", "2", "4", "8"]
    assert (cost["experts"], cost["tokens"]) == (16, 9)
    assert [row["groups"] for row in cost["rows"]] == [2, 4, 8]
    assert cost["one_call_us_eager_wall_clock"] > 0
    for row in cost["rows"]:
        assert row["us_eager_wall_clock"] > 0
        eager = row["us_eager_wall_clock"] - cost["one_call_us_eager_wall_clock"]
        assert row["us_a_further_group_eager_wall_clock"] == pytest.approx(eager / (row["groups"] - 1))
    assert [row["us"] for row in cost["rows"]] == [800.0, 1200.0, 1600.0]
    assert [row["overhead"] for row in cost["rows"]] == [1.0, 2.0, 3.0]
    assert [row["us_a_further_group"] for row in cost["rows"]] == [400.0, 800 / 3, 1200 / 7]


def test_groups_of_vllm_are_not_timed_if_they_lose_an_expert(timed, monkeypatch):
    def without_the_last(*arguments: Any) -> torch.Tensor:
        *rest, expert_map = arguments
        last = expert_map is not None and int(expert_map[-1]) >= 0
        return _fused_experts(*rest, expert_map) * (0.0 if last else 1.0)

    monkeypatch.setattr("moedoctor.upstream.moe_backends.modular_moe.call_fused_experts", without_the_last)
    with pytest.raises(RuntimeError, match=r"groups \(2\) differ from one call"):
        bench.compare_upstream_groups("cpu", tokens=64, model=SMALL)
    assert timed == []


@pytest.mark.gpu
def test_a_cold_swap_moves_its_bytes_no_faster_than_the_bus() -> None:
    swap = bench.measure_cold_swap("cuda:0", rounds=3)
    assert len(swap["rows"]) == 6
    for row in swap["rows"]:
        assert 0 < row["transfer_share"] < 1.1
        assert row["gigabytes_per_second"] < 1.1 * swap["pinned_gigabytes_per_second"]


@pytest.mark.gpu
@pytest.mark.upstream
def test_groups_of_vllm_give_the_result_of_one_call_within_bfloat16() -> None:
    try:
        cost = bench.compare_upstream_groups("cuda:0")
    except UnavailableError as error:
        pytest.skip(str(error))
    assert all(row["largest_difference"] < 0.02 for row in cost["rows"])


@pytest.mark.gpu
def test_decode_under_both_policies_is_timed() -> None:
    speed = bench.compare_policies("cuda:0", steps=8, rounds=2)
    assert [row["slots"] for row in speed["rows"]] == [8, 16]
    for row in speed["rows"]:
        assert row["lfru_tokens_per_second"] > 0
        assert row["lru_wrong"] == 0
    assert speed["rows"][0]["lfru_wrong"] > 0
