"""Host blocks are aligned, have the requested size, and are unlocked before they are freed."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from moedoctor.fixes.offload.pinned import _WAITING, PAGE, PinError, allocate, register, view_on_device


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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs the tests, no other thread can be capturing a graph."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def test_a_block_is_unlocked_once_when_its_last_view_is_freed(alone: None) -> None:
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
    block, failure = allocate(10, Mock(side_effect=error))
    assert (block.pinned, failure) == (False, "limit")
    block.bytes.fill_(1)


def test_a_device_view_of_pageable_memory_is_refused() -> None:
    block, _ = allocate(10, None)
    with pytest.raises(PinError, match="needs pinned memory"):
        view_on_device(block.bytes, torch.device("cuda", 0))


def test_a_driver_error_is_not_raised_again_by_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "ones", launch)
    block, failure = allocate(10, register)
    assert (block.pinned, failure) == (False, "cudaHostRegister of 4096 bytes failed with error 2")
    torch.ones(1, device="cuda")


def test_a_block_that_is_dropped_in_a_capture_is_unlocked_after_it(alone, monkeypatch):
    """Unlocking waits for the device, which would void the capture."""
    released: list[str] = []
    dropped, _ = allocate(10, lambda memory: lambda: released.append("dropped"))
    closed, _ = allocate(10, lambda memory: lambda: released.append("closed"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        del dropped
        closed.close()
        gc.collect()
        assert released == []
    allocate(10, None)
    assert sorted(released) == ["closed", "dropped"]


def test_a_block_that_another_thread_drops_waits_for_the_next_allocation() -> None:
    """That thread does not see whether this one is capturing a graph, which unlocking would void."""
    released: list[str] = []
    blocks = [allocate(10, lambda memory: lambda: released.append("released"))[0]]
    thread = threading.Thread(target=lambda: (blocks.clear(), gc.collect()))
    thread.start()
    thread.join()
    assert (blocks, released) == ([], [])
    allocate(10, None)
    assert released == ["released"]


def test_memory_whose_lock_cannot_be_given_up_yet_is_not_freed(alone: None) -> None:
    refuse = Mock(side_effect=RuntimeError("the device cannot be waited for"))
    block, _ = allocate(10, lambda memory: refuse)
    with pytest.raises(RuntimeError, match="cannot be waited for"):
        block.close()
    assert block.pinned
    assert [release for release, _ in _WAITING] == [refuse]
    _WAITING.clear()


class TwoGpus:
    """Replaces torch's and CUDA's calls: which of two GPUs was current in each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: int = 0, moved: int = 0) -> None:
        self.current, self.calls = 0, []
        self._refuses, self._moved = refuses, moved
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda index: self._call(f"synchronize {index}"))
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 1, raising=False)
        monkeypatch.setattr("moedoctor.kernels.host_address._load_runtime", lambda: self)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def _call(self, name: str) -> int:
        self.calls.append((name, self.current))
        return 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  the runtime's
        return self._call("register")

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return self._call("unregister")

    def cudaHostGetDevicePointer(self, to: Any, host: Any, flags: Any) -> int:  # noqa: N802
        to._obj.value = host.value + self._moved
        self._call("address")
        return self._refuses

    def cudaGetLastError(self) -> int:  # noqa: N802
        return self._call("error taken")


GPU_1 = torch.device("cuda", 1)


def test_memory_is_registered_and_unregistered_on_the_gpu_that_reads_it(monkeypatch):
    """Whatever GPU is current; and no call wakes a GPU that is not in use."""
    gpus = TwoGpus(monkeypatch)
    block, failure = allocate(10, partial(register, device=GPU_1))
    assert failure is None
    block.close()
    assert gpus.calls == [("register", 1), ("synchronize 1", 0), ("unregister", 1)]


def test_a_device_view_asks_for_the_address_and_never_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On WSL a GPU reads registered memory at another address than the host."""
    gpus = TwoGpus(monkeypatch, moved=1 << 40)
    block, _ = allocate(10, None)
    mapped: list[tuple[int, int]] = []

    def as_tensor(data: Any, device: torch.device, *, copies: bool = False) -> Any:
        address, _ = data.__cuda_array_interface__["data"]
        mapped.append((address - block.bytes.data_ptr(), data.__cuda_array_interface__["shape"][0]))
        return SimpleNamespace(data_ptr=lambda: 0 if copies else address)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    view_on_device(block.bytes, GPU_1)
    assert gpus.calls == [("address", 1)]
    assert mapped == [(1 << 40, 1), (1 << 40, 10)]
    mapped.clear()
    monkeypatch.setattr(torch, "as_tensor", partial(as_tensor, copies=True))
    with pytest.raises(PinError, match="a view on cuda:1 needs memory that was pinned while cuda:1 was"):
        view_on_device(block.bytes, GPU_1)
    assert mapped == [(1 << 40, 1)], "one byte was copied to find out, not all of them"


def test_a_refused_address_says_what_to_do_on_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = TwoGpus(monkeypatch, refuses=801)
    block, _ = allocate(10, None)
    with pytest.raises(PinError, match=r"cuda:1 cannot read 10 bytes .* error 801.* WSL .*use access='copy'"):
        view_on_device(block.bytes, GPU_1)
    assert gpus.calls == [("address", 1), ("error taken", 1)], "torch's next launch must not raise it"
