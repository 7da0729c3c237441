"""What the expert cache is given wrongly, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moedoctor.fixes.expert_cache import ExpertCache
from tests.fixes.cache.test_expert_cache import WEIGHTS


@pytest.mark.parametrize("ids", [[[3, 10]], [[-2, 1]]])
def test_ids_out_of_range_are_refused(ids: list[list[int]]) -> None:
    cache = ExpertCache(WEIGHTS, 4, engine="host", device="cpu")
    with pytest.raises(ValueError, match="ids"):
        cache.acquire(torch.tensor(ids))
    with pytest.raises(TypeError, match=r"int32 or int64, got torch\.float32"):
        cache.acquire(torch.tensor(ids).float())
    for call in (cache.acquire, cache.prefetch, cache.seed, lambda one: next(cache.groups(one))):
        with pytest.raises(ValueError, match=r"ids: (expert 10 of 10|-2 is no expert)"):
            call(torch.tensor(ids))
        with pytest.raises(TypeError, match="ids must be an int32 or int64 tensor, got list"):
            call(ids)
    assert cache.resident() == [-1] * 4


@pytest.mark.parametrize("shape", [(), (4,), (1, 1, 1, 1)])
def test_seeding_takes_calls_or_tokens(shape: tuple[int, ...]) -> None:
    cache = ExpertCache(WEIGHTS, 4, engine="host", device="cpu")
    with pytest.raises(ValueError, match=r"ids must be \[T, K\] or \[calls, T, K\], got"):
        cache.seed(torch.zeros(shape, dtype=torch.int64))
    assert cache.resident() == [-1] * 4


def test_a_machine_that_cannot_unpack_is_told_what_to_do() -> None:
    weights = {"w": torch.randn(12, 64, 256, generator=torch.Generator().manual_seed(4)).bfloat16()}
    for engine in ("auto", "host"):
        with pytest.raises(ValueError, match="cannot unpack: leave out packed"):
            ExpertCache(weights, 4, engine=engine, device="cpu", packed=True)
    assert ExpertCache(weights, 12, device="cpu", packed=True).engine == "resident"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"capacity": 0}, ValueError, "capacity must be at least 1 slot, got 0"),
        ({"capacity": True}, TypeError, "capacity must be an int, got bool"),
        ({"policy": "belady"}, ValueError, "policy must be one of lru, lfu, lfru, aging, got 'belady'"),
        ({"engine": "gpu"}, ValueError, "engine must be one of auto, device, host, resident, got 'gpu'"),
        ({"engine": "resident"}, ValueError, "needs a slot for each of 10 experts, got 4"),
        ({"engine": "device"}, RuntimeError, "needs a CUDA device, got cpu: use engine='host'"),
        ({"weights": {}}, ValueError, "weights is empty"),
        (
            {"weights": {"a": torch.zeros(2), "b": torch.zeros(3)}},
            ValueError,
            "agree on the number of experts",
        ),
        ({"weights": {"a": torch.zeros(2, device="meta")}}, ValueError, "must be a host tensor"),
        ({"weights": [torch.zeros(2)]}, TypeError, "weights must be a mapping of names .* got list"),
        ({"weights": {"a": [1, 2]}}, TypeError, r"weights\['a'\] must be a tensor .* got list"),
        ({"weights": {"a": torch.tensor(1.0)}}, ValueError, r"weights\['a'\] .* without dimensions"),
        (
            {"weights": {"a": torch.tensor(1.0)}, "packed": True},
            ValueError,
            r"weights\['a'\] .* without dimensions",
        ),
        ({"weights": [torch.zeros(2)], "packed": True}, TypeError, "weights must be a mapping"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ExpertCache(**({"weights": WEIGHTS, "capacity": 4, "device": "cpu"} | options))
