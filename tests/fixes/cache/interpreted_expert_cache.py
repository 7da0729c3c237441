"""The engine ``device`` when a call fails or another call comes between, as a script.

Triton decides at import whether it interprets, so this needs a process of its own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from moedoctor.fixes.cache import device
from moedoctor.fixes.cache.engine import predict_table
from moedoctor.fixes.eviction import ONLINE_POLICIES
from moedoctor.fixes.expert_cache import ExpertCache, choose_followed
from moedoctor.fixes.layer_stream import LayerStream
from moedoctor.kernels.cache.transfer import Transfer
from tests.fixes.cache.checks import assert_consistent, assert_holds

EXPERTS, SLOTS = 12, 4
WEIGHTS = {
    "w": torch.randn(EXPERTS, 8, generator=torch.Generator().manual_seed(0)),
    "bias": torch.randn(EXPERTS, 3, generator=torch.Generator().manual_seed(1)).bfloat16(),
}
WEIGHTS_ONLY = {"bias": WEIGHTS["bias"]}
IDS = torch.tensor([[1, 2, 3]])
MANY = torch.tensor([[0, 1, 2, 3, 4, 5]])
CALLS: dict[str, Callable[[ExpertCache], Any]] = {
    "acquire": lambda cache: cache.acquire(IDS),
    "groups": lambda cache: list(cache.groups(MANY)),
    "overlap": lambda cache: list(cache.groups(IDS, overlap=True)),
    "prefetch": lambda cache: cache.prefetch(IDS),
    "seed": lambda cache: cache.seed(IDS),
}


def new(policy: str = "lfru", engine: str = "device") -> ExpertCache:
    cache = ExpertCache(WEIGHTS, SLOTS, policy=policy, engine=engine, device="cpu")
    cache.acquire(torch.tensor([[9, 1]]))
    return cache


class Breaking:
    """Raises `error` instead of call number `at`, or right after that call."""

    def __init__(self, wrapped: Callable[..., Any], error: BaseException, at: int, after: bool) -> None:
        self._wrapped, self._error, self._left, self._after = wrapped, error, at, after

    def __call__(self, *given: Any, **named: Any) -> None:
        self._left -= 1
        if self._left or self._after:
            self._wrapped(*given, **named)
        if not self._left:
            raise self._error


def broken() -> None:
    """After a call that fails at any step, the state is right and the next call uses the right experts."""
    kinds = (torch.OutOfMemoryError("out of memory"), KeyboardInterrupt())
    for how, error, after, where in product(CALLS, kinds, (False, True), ("copies", "lookup")):
        if (how, where) == ("seed", "lookup"):
            continue  # it has none
        for at in (1, 2) if how == "groups" else (1,):
            cache = new()
            owner, name = (Transfer, "launch") if where == "copies" else (device, "launch_lookup")
            real = cache._engine._transfer.launch if where == "copies" else device.launch_lookup
            with (
                mock.patch.object(owner, name, Breaking(real, error, at, after)),
                pytest.raises(type(error)) as caught,
            ):
                CALLS[how](cache)
            assert caught.value is error
            assert_consistent(cache, WEIGHTS)
            assert_holds(IDS, cache.acquire(IDS), WEIGHTS)


def broken_twice() -> None:
    """If the reset fails too, the next call or the next read of the state repeats it."""
    for look in (lambda cache: cache.acquire(IDS), lambda cache: cache.resident()):
        for second in (RuntimeError("the context is broken"), KeyboardInterrupt()):
            cache = new()
            engine = cache._engine
            first = torch.OutOfMemoryError("out of memory")
            with (
                mock.patch.object(Transfer, "launch", mock.Mock(side_effect=first)),
                mock.patch.object(engine, "_forget_all", mock.Mock(side_effect=second)),
                pytest.raises(KeyboardInterrupt if type(second) is KeyboardInterrupt else type(first)),
            ):
                cache.acquire(IDS)
            look(cache)
            assert_consistent(cache, WEIGHTS)
            assert_holds(IDS, cache.acquire(IDS), WEIGHTS)


def policies() -> None:
    """After a reset the kernel decides as a table with the same state does."""
    draw = torch.Generator().manual_seed(2)
    for policy in ONLINE_POLICIES:
        cache = new(policy)
        with (
            mock.patch.object(Transfer, "launch", mock.Mock(side_effect=MemoryError)),
            pytest.raises(MemoryError),
        ):
            cache.acquire(IDS)
        for _ in range(12):
            ids = torch.randint(0, EXPERTS, (1, 3), generator=draw)  # [T, K]
            table = cache._engine.read_table()
            table.step(sorted(set(ids.flatten().tolist())))
            assert_holds(ids, cache.acquire(ids), WEIGHTS)
            assert cache.resident() == table.expert_of
            assert_consistent(cache, WEIGHTS)


def between() -> None:
    """A call between two groups is right or an error; no group lacks experts."""
    others: dict[str, Callable[[ExpertCache], Any]] = {
        **CALLS,
        "begun groups": lambda cache: next(cache.groups(MANY + 6)),
        "begun overlap": lambda cache: next(cache.groups(IDS + 6, overlap=True)),
    }
    for engine in ("device", "host"):
        for how, other in others.items():
            cache = new(engine=engine)
            parts = cache.groups(MANY)
            first = next(parts)
            assert_holds(MANY, first, WEIGHTS)
            computed = (first.slot_ids >= 0).int()  # [T, K]
            other(cache)
            if engine == "device" and how in ("groups", "begun groups"):
                with pytest.raises(RuntimeError, match=r"another groups\(\) of this cache has begun"):
                    next(parts)
            else:
                for part in parts:
                    assert_holds(MANY, part, WEIGHTS)
                    computed += part.slot_ids >= 0
                assert bool((computed == 1).all()), (engine, how)
            assert_consistent(cache, WEIGHTS)
    for other in others.values():
        cache = new()
        hits_and_misses = cache.groups(IDS, overlap=True)
        next(hits_and_misses)
        other(cache)
        with pytest.raises(RuntimeError, match="may have evicted the second group's experts"):
            next(hits_and_misses)
        assert_consistent(cache, WEIGHTS)


def seeded() -> None:
    """After a prompt the engine has the state and the bytes that the host's bookkeeping gives; no counts."""
    draw = torch.Generator().manual_seed(3)
    for policy in ONLINE_POLICIES:
        cache = new(policy)
        before = cache.stats
        for tokens, top_k in (
            (1, 3),
            (5, 3),
            (60, 3),
            (150, 3),
            (5, 2 * SLOTS + 1),
        ):  # the last goes in groups
            ids = torch.randint(-1, EXPERTS, (tokens, top_k), generator=draw, dtype=torch.int32)  # [T, K]
            cache.seed_from(ids, WEIGHTS)
            expected = predict_table(choose_followed(ids), EXPERTS, SLOTS, policy)
            got = cache._engine.read_table()
            assert (got.expert_of, got.uses, got.clock) == (expected.expert_of, expected.uses, expected.clock)
            assert_consistent(cache, WEIGHTS)
            assert cache.stats == before
            later = torch.randint(0, EXPERTS, (1, 3), generator=draw)  # [T, K]
            expected.step(sorted(set(later.flatten().tolist())))
            assert_holds(later, cache.acquire(later), WEIGHTS)
            assert cache.resident() == expected.expert_of
            before = cache.stats


def streamed() -> None:
    """Buffers hold every expert of their layer, packed or not, in any order of layers."""
    shape = (EXPERTS, 60, 256)  # more than one packed block, the last of them padded
    layers = [
        {"w": torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16(), **WEIGHTS_ONLY}
        for seed in range(3)
    ]
    for layer in layers:
        layer["w"][:, -1, -1] = 1.0  # padding repeats it
    for packed in (False, True):
        caches = [ExpertCache(layer, SLOTS, engine="device", device="cpu", packed=packed) for layer in layers]
        assert all(cache.packed is packed for cache in caches)
        stream = LayerStream(caches)
        for number in (0, 1, 2, 0, 2, 2, 1):
            with stream.fetch(number) as weights:
                for name, tensor in layers[number].items():
                    assert torch.equal(weights[name].view(torch.uint8), tensor.view(torch.uint8)), name
                caches[number].seed_from(torch.tensor([[number, 5], [7, 11]]), weights)
            assert_consistent(caches[number], layers[number])


if __name__ == "__main__":
    for check in (broken, broken_twice, policies, between, seeded, streamed):
        check()
