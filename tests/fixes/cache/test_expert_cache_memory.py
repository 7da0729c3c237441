"""The memory of the expert cache on the host and on the device, and its report."""

import gc
import threading

import pytest
import torch

from moedoctor.fixes.expert_cache import ExpertCache, ExpertStore
from moedoctor.fixes.offload.pinned import PAGE, PinError, Release
from tests.fixes.cache.checks import EXPERTS, WEIGHTS, assert_holds


class Locks:
    """Replaces the driver: records each lock and fails from number `fail_at` on."""

    def __init__(self, fail_at: int = 0) -> None:
        self.sizes: list[int] = []
        self.released = 0
        self._fail_at = fail_at

    def register(self, memory: torch.Tensor) -> Release:
        if len(self.sizes) + 1 == self._fail_at:
            raise PinError("the limit on locked memory is reached")
        self.sizes.append(memory.numel())
        return self._release

    def _release(self) -> None:
        self.released += 1


def _pin(store: ExpertStore, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread that another test left would put off what is given back until the next allocation.
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.Tensor, "is_pinned", lambda self: False)
        patch.setattr("moedoctor.fixes.cache.store.register", locks.register)
        store._pin()


def test_a_pinning_failure_is_reported_and_copies_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks(2)
    store = ExpertStore(WEIGHTS, pin=False)
    _pin(store, locks, monkeypatch)
    gc.collect()
    assert not store.pinned
    assert store.reason == "the limit on locked memory is reached"
    assert (len(locks.sizes), locks.released) == (1, 1), "what was locked before the failure is given back"
    assert all(store.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in WEIGHTS.items())
    cache = ExpertCache(store, 4, device="cpu")
    ids = torch.tensor([[1, 8]])
    assert_holds(ids, cache.acquire(ids))
    assert (cache.engine, cache.memory.pinned) == ("host", 0)
    assert cache.pin_failure == store.reason


@pytest.mark.parametrize("packed", [False, True])
def test_pinned_memory_has_the_size_of_the_weights(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole pages; torch's allocator would use up to twice as much."""
    draw = torch.Generator().manual_seed(4)
    weights = {
        "w13": torch.randn(5, 112, 128, generator=draw).bfloat16(),
        "w2": torch.randn(5, 3, 7, generator=draw),
    }
    store = ExpertStore(weights, pin=False, packed=packed)
    assert set(store.packed) == ({"w13"} if packed else set())
    blocks = {name: weight.blocks.clone() for name, weight in store.packed.items()}
    nbytes, locks = store.nbytes, Locks()
    _pin(store, locks, monkeypatch)
    assert store.pinned
    assert store.reason is None
    assert store.nbytes == nbytes <= sum(locks.sizes) < nbytes + len(locks.sizes) * PAGE
    for name, tensor in store.tensors.items():
        assert tensor.data_ptr() != weights[name].data_ptr()
        assert torch.equal(tensor, weights[name])
    assert all(torch.equal(weight.blocks, blocks[name]) for name, weight in store.packed.items())
    view = store.tensors["w2"][3]
    del store, tensor
    gc.collect()
    assert locks.released == 1, "a view keeps its own block"
    assert torch.equal(view, weights["w2"][3])
    del view
    gc.collect()
    assert locks.released == 2


def test_memory_is_accounted_for() -> None:
    cache = ExpertCache(WEIGHTS, 4, engine="host", device="cpu")
    memory = cache.memory
    total = sum(tensor.nbytes for tensor in WEIGHTS.values())
    slots = sum(tensor.nbytes for tensor in cache.weights.values())
    assert slots == total * 4 // EXPERTS
    assert (memory.pinned, memory.pageable, memory.uncached) == (0, total, total)
    assert memory.device == slots + 4 * (2 * (EXPERTS + 1) + 4)
    assert memory.saved == total - memory.device
