"""Host blocks are aligned, have the requested size, and are unlocked before they are freed."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from moedoctor.fixes.offload.pinned import PAGE, PinError, allocate, device_view, register


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 100_000])
def test_a_block_locks_whole_pages_and_has_the_requested_size(nbytes: int) -> None:
    locked: list[tuple[int, int]] = []

    def pin(memory: torch.Tensor) -> Callable[[], None]:
        locked.append((memory.data_ptr() % PAGE, memory.numel()))
        return lambda: None

    block, failure = allocate(nbytes, pin)
    assert failure is None
    assert block.pinned
    assert block.bytes.numel() == nbytes
    assert locked == [(0, -(-nbytes // PAGE) * PAGE)]
    # torch checks the start of the storage to find out whether memory is pinned
    assert block.bytes.untyped_storage().data_ptr() == block.bytes.data_ptr()


def test_a_block_is_unlocked_once_when_its_last_view_is_freed() -> None:
    released: list[str] = []
    block, _ = allocate(10, lambda memory: lambda: released.append("released"))
    view = block.bytes[3:]
    del block
    gc.collect()
    assert released == []
    del view
    gc.collect()
    assert released == ["released"]
    block, _ = allocate(10, lambda memory: lambda: released.append("again"))
    block.close()
    block.close()
    assert not block.pinned
    del block
    gc.collect()
    assert released == ["released", "again"]


@pytest.mark.parametrize("error", [PinError("limit"), RuntimeError("limit\nmore"), MemoryError("limit")])
def test_a_block_that_cannot_be_pinned_is_still_usable(error: Exception) -> None:
    def refuse(memory: torch.Tensor) -> Callable[[], None]:
        raise error

    block, failure = allocate(10, refuse)
    assert (block.pinned, failure) == (False, "limit")
    block.bytes.fill_(1)


def test_a_device_view_of_pageable_memory_is_refused() -> None:
    block, _ = allocate(10, None)
    with pytest.raises(PinError, match="needs pinned memory"):
        device_view(block.bytes, torch.device("cuda", 0))


def test_a_driver_error_is_not_raised_again_by_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The runtime keeps its last error until it is read; torch reads it after each kernel launch."""

    class Runtime:
        last = 0

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  the driver's
            self.last = 2
            return self.last

    runtime = Runtime()

    def launch(*_: object, **__: object) -> None:
        last, runtime.last = runtime.last, 0
        if last:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", launch)
    block, failure = allocate(10, register)
    assert (block.pinned, failure) == (False, "cudaHostRegister of 4096 bytes failed with error 2")
    torch.ones(1, device="cuda")


def test_a_block_that_is_dropped_in_a_capture_is_unlocked_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlocking waits for the device, which would void the capture."""
    released: list[str] = []
    dropped, _ = allocate(10, lambda memory: lambda: released.append("dropped"))
    closed, _ = allocate(10, lambda memory: lambda: released.append("closed"))
    callbacks = list(gc.callbacks)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        del dropped
        closed.close()
        gc.collect()
        assert released == []
    gc.collect()
    assert sorted(released) == ["closed", "dropped"]
    assert gc.callbacks == callbacks
