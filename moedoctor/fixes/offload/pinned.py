"""Host memory for weights, page-locked if possible, and views of it that a GPU reads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from moedoctor.kernels.device_guard import make_current
from moedoctor.kernels.host_address import PinError as PinError
from moedoctor.kernels.host_address import find_device_address

PAGE = 4096
_MAPPED_AND_PORTABLE = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""

Release = Callable[[], None]
Pin = Callable[[torch.Tensor], Release]
"""Page-locks the memory of a uint8 tensor [n] and returns what undoes it. Raises `PinError` on failure."""


@dataclass(eq=False)
class HostBlock:
    """Bytes on the host that hold one layer's weights."""

    bytes: torch.Tensor
    """uint8 [n], starts on a page."""
    pinned: bool
    release: Release | None = None

    def close(self) -> None:
        """Give up the page lock. No copy from the block may be in flight, and no thread may be capturing."""
        if self.release is not None:
            self.release()
            _unlock_waiting()
            self.release, self.pinned = None, False


def register(memory: torch.Tensor, device: torch.device | None = None) -> Release:
    """Page-lock the memory of a uint8 tensor [n] that starts and ends on a page, with `cudaHostRegister`.

    `device`: the GPU that will read it, by default the current one. No other GPU is touched: its first CUDA
    call would take some hundred MiB there. Every GPU may read the memory. torch's own pinned allocator rounds
    every size up to a power of two; this takes what is asked for. On WSL the driver locks only a part of the
    host's memory; if it refuses, this raises PinError.
    """
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    gpu = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    with make_current(gpu):
        code = int(runtime.cudaHostRegister(address, memory.numel(), _MAPPED_AND_PORTABLE))
        if code:
            _take_error()
    if code:
        raise PinError(f"cudaHostRegister of {memory.numel()} bytes failed with error {code}")

    def release() -> None:
        # A prefetch may still be reading: memory must not be unlocked, let alone freed, under a copy.
        for index in range(torch.cuda.device_count()):
            in_use = torch._C._cuda_hasPrimaryContext(index)  # type: ignore[attr-defined]
            if in_use:  # any of them may read
                torch.cuda.synchronize(index)
        with make_current(gpu):
            runtime.cudaHostUnregister(address)

    return release


def _take_error() -> None:
    """Let the runtime forget a failure that is handled: it would be raised at torch's next kernel launch."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")  # launches a kernel, and a launch takes the error


def allocate(nbytes: int, pin: Pin | None) -> tuple[HostBlock, str | None]:
    """Return a block of `nbytes`, and why it is not page-locked if `pin` was given and failed.

    Gives up locks of blocks that were dropped. No thread may be capturing a CUDA graph.
    """
    _unlock_waiting()
    whole = -(-nbytes // PAGE) * PAGE
    memory = torch.empty(whole + PAGE, dtype=torch.uint8)  # [whole + PAGE]
    start = -memory.data_ptr() % PAGE
    # A storage of its own: torch asks whether the beginning of a storage is pinned.
    pages = from_dlpack(memory[start : start + whole])  # [whole]
    if pin is None:
        return HostBlock(pages[:nbytes], pinned=False), None
    try:
        release = pin(pages)
    except (PinError, RuntimeError, MemoryError) as error:
        return HostBlock(pages[:nbytes], pinned=False), str(error).split("\n")[0]
    # Holds `memory`, so that it is unlocked before it is freed.
    last = weakref.finalize(pages.untyped_storage(), _unlock, release, memory)
    last.atexit = False  # the driver has gone by then; it unlocks what is left by itself
    return HostBlock(pages[:nbytes], pinned=True, release=last), None


_WAITING: list[tuple[Release, torch.Tensor]] = []
"""Locks that nobody needs any more, each with its memory."""


def _unlock(release: Release, memory: torch.Tensor) -> None:
    """Give up a lock, or leave that to the next `allocate` or `close`. Any thread may collect a block."""
    _WAITING.append((release, memory))
    if threading.active_count() == 1:  # a capture of another thread does not show in this one
        _unlock_waiting()


def _unlock_waiting() -> None:
    """Give up the locks that nobody needs, unless the current stream is captured.

    To give up a lock the host waits for the device, which voids a capture.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return
    with suppress(IndexError):  # another thread has given up the last one
        while _WAITING:
            release, memory = _WAITING.pop()
            try:
                release()
            except BaseException:
                _WAITING.append((release, memory))  # freed memory must not stay locked
                raise


def view_on_device(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return uint8 [n] on `device` over the pinned host bytes `memory`: kernels read over the bus.

    Nothing is copied. The address is the one that `find_device_address` gives, on WSL not the host's.
    Raises PinError if the memory is not pinned, was pinned for another GPU, or cannot be read by `device`.

    The view keeps `memory` alive. That is the difference to a view with a deleter that does nothing, whose
    memory the next allocation may get while a kernel still reads it (vllm#45528).
    """
    if not memory.is_pinned():
        raise PinError("a device view needs pinned memory, and this is not pinned")
    address = find_device_address(memory, device)
    with make_current(device):
        # torch copies, and says nothing, if the driver names another GPU for this address.
        probe = torch.as_tensor(_Mapped(address, 1, memory), device=device)  # [1]
        if probe.data_ptr() != address:
            raise PinError(
                f"a view on {device} needs memory that was pinned while {device} was the current GPU; "
                "for this memory it was another one"
            )
        return torch.as_tensor(_Mapped(address, memory.numel(), memory), device=device)


class _Mapped:
    """Bytes at a device address, for torch, which keeps this object, which keeps `memory`."""

    def __init__(self, address: int, count: int, memory: torch.Tensor) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = describe_bytes(address, count)


def describe_bytes(address: int, count: int) -> dict[str, Any]:
    """Describe `count` bytes at a device address, so that torch makes a device tensor over them."""
    return {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}
