"""What is measured for the claims about expert caches: what needs no GPU, and each measurement on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moedoctor.bench.cache import claims as cache_claims
from moedoctor.bench.cache import groups as expert_cache_groups
from moedoctor.bench.cache.decode import Model
from moedoctor.bench.timing import Comparison, compare_rounds
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.results import UnavailableError

SMALL = Model(layers=1, experts=16, top_k=2, hidden=64, inner=32, host_layers=1)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_the_maps_of_the_groups_hold_every_expert_once(groups: int) -> None:
    maps = torch.stack(cache_claims._expert_maps(32, groups, "cpu"))
    assert torch.equal(maps.amax(0), torch.arange(32, dtype=torch.int32))
    assert ((maps >= 0).sum(0) == 1).all()
    assert ((maps >= 0).sum(1) == 32 // groups).all()


def test_routing_is_of_distinct_experts_with_weights_that_sum_up() -> None:
    shares, ids = cache_claims._routing(32, 64, "cpu")
    assert torch.allclose(shares.sum(1), torch.ones(64))
    assert all(len(set(row)) == 8 for row in ids.tolist())


def _fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """What vLLM's computes: experts that the map sends to -1 add nothing."""
    kept = ids if expert_map is None else expert_map[ids.long()]  # [T, K]
    return moe_forward(x, {"w13": w13, "w2": w2}, kept, weights).bfloat16()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graph replays take longer the later a name stands, eager calls run; the names that graphs timed."""
    timed: list[str] = []

    def times(calls: Any, *, baseline: str, launches: int) -> Comparison:
        timed.extend(calls)
        found: dict[str, Callable[[], float]] = {
            name: lambda name=name: 100.0 * len(calls) * (1 + list(calls).index(name)) for name in calls
        }
        return compare_rounds(found, baseline=baseline, rounds=1)

    monkeypatch.setattr(expert_cache_groups, "compare_times", times)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("moedoctor.upstream.moe_backends.modular_moe.fused_experts", _fused_experts)
    return timed


def test_both_kernels_are_timed_by_one_method_on_one_layer(no_gpu: list[str]) -> None:
    theirs = cache_claims.upstream_groups("cpu", tokens=9, model=SMALL)
    assert no_gpu == ["1", "2", "4", "8"]
    ours = cache_claims.our_groups("cpu", tokens=9, model=SMALL)
    assert no_gpu[4:] == ["1", "2", "2 in turn", "4", "4 in turn", "8", "8 in turn"]
    assert (theirs["experts"], theirs["tokens"]) == (ours["experts"], ours["tokens"]) == (16, 9)
    for found in (theirs, ours):
        assert [row["groups"] for row in found["rows"]] == [2, 4, 8]
        assert found["one_call_us_eager_wall_clock"] > 0
        for row in found["rows"]:
            assert row["us_eager_wall_clock"] > 0
            eager = row["us_eager_wall_clock"] - found["one_call_us_eager_wall_clock"]
            assert row["us_a_further_group_eager_wall_clock"] == pytest.approx(eager / (row["groups"] - 1))
    assert [row["us"] for row in theirs["rows"]] == [800.0, 1200.0, 1600.0]
    assert [row["overhead"] for row in theirs["rows"]] == [1.0, 2.0, 3.0]
    assert [row["us_a_further_group"] for row in theirs["rows"]] == [400.0, 800 / 3, 1200 / 7]


def test_without_a_word_both_have_the_shape_of_qwen3(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int, int]] = []

    def made(device: str, *, tokens: int, model: Model | None = None) -> Any:
        model = model or Model(host_layers=1)
        asked.append((tokens, model.experts, model.hidden, model.inner))
        raise LookupError("seen")

    monkeypatch.setattr(expert_cache_groups.ResidentLayer, "make", made)
    for measure in (cache_claims.upstream_groups, cache_claims.our_groups):
        with pytest.raises(LookupError, match="seen"):
            measure("cpu")
    assert asked == [(1024, 128, cache_claims.HIDDEN, cache_claims.INTERMEDIATE)] * 2


def test_groups_of_vllm_that_lose_one_are_not_timed(
    no_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_the_last(*of: Any) -> torch.Tensor:
        *rest, expert_map = of
        last = expert_map is not None and int(expert_map[-1]) >= 0
        return _fused_experts(*rest, expert_map) * (0.0 if last else 1.0)

    monkeypatch.setattr("moedoctor.upstream.moe_backends.modular_moe.fused_experts", without_the_last)
    with pytest.raises(RuntimeError, match=r"groups \(2\) differ from one call"):
        cache_claims.upstream_groups("cpu", tokens=64, model=SMALL)
    assert no_gpu == []


@pytest.mark.gpu
def test_a_cold_swap_moves_its_bytes_no_faster_than_the_bus() -> None:
    seen = cache_claims.cold_swap("cuda:0", rounds=3)
    assert len(seen["rows"]) == 6
    for row in seen["rows"]:
        assert 0 < row["transfer_share"] < 1.1
        assert row["gigabytes_per_second"] < 1.1 * seen["pinned_gigabytes_per_second"]


@pytest.mark.gpu
def test_groups_of_ours_give_what_one_call_gives() -> None:
    seen = cache_claims.our_groups("cuda:0")
    assert [row["groups"] for row in seen["rows"]] == [2, 4, 8]
    assert all(row["largest_difference"] < 1e-5 for row in seen["rows"])


@pytest.mark.gpu
@pytest.mark.upstream
def test_groups_of_vllm_give_what_one_call_gives_within_bfloat16() -> None:
    try:
        seen = cache_claims.upstream_groups("cuda:0")
    except UnavailableError as error:
        pytest.skip(str(error))
    assert all(row["largest_difference"] < 0.02 for row in seen["rows"])


@pytest.mark.gpu
def test_decode_under_both_policies_is_timed() -> None:
    seen = cache_claims.policy_speed("cuda:0", steps=8, rounds=2)
    assert [row["slots"] for row in seen["rows"]] == [8, 16]
    for row in seen["rows"]:
        assert row["lfru_tokens_per_second"] > 0
        assert row["lru_wrong"] == 0
    assert seen["rows"][0]["lfru_wrong"] > 0
