"""What is measured for the claims about expert caches: what needs no GPU, and each measurement on one."""

from __future__ import annotations

import pytest
import torch

from moedoctor.bench import cache_claims
from moedoctor.subjects.base import UnavailableError


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
    assert seen["worst_difference"] < 0.1


@pytest.mark.gpu
def test_decode_under_both_policies_is_timed() -> None:
    seen = cache_claims.policy_speed("cuda:0", steps=8, rounds=2)
    assert [row["slots"] for row in seen["rows"]] == [8, 16]
    for row in seen["rows"]:
        assert row["lfru_tokens_per_second"] > 0
        assert row["lru_wrong"] == 0
    assert seen["rows"][0]["lfru_wrong"] > 0
