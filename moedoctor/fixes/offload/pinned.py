"""Host memory for weights, page-locked if possible, and views of it that a GPU reads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

PAGE = 4096
_MAPPED_AND_PORTABLE = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""

Release = Callable[[], None]
Pin = Callable[[torch.Tensor], Release]
"""Page-locks the memory of a uint8 tensor [n] and returns what undoes it. Raises `PinError` on failure."""


class PinError(RuntimeError):
    """Memory could not be page-locked."""


@dataclass(eq=False)
class HostBlock:
    """Bytes on the host that hold one layer's weights."""

    bytes: torch.Tensor
    """uint8 [n], starts on a page."""
    pinned: bool
    release: Release | None = None

    def close(self) -> None:
        """Give up the page lock. No copy from the block may be in flight."""
        if self.release is not None:
            self.release()
            self.release, self.pinned = None, False


def register(memory: torch.Tensor) -> Release:
    """Page-lock the memory of a uint8 tensor [n] that starts and ends on a page, with `cudaHostRegister`.

    torch's own pinned allocator rounds every size up to a power of two; this takes what is asked for.
    """
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, memory.numel(), _MAPPED_AND_PORTABLE))
    if code:
        _take_error()
        raise PinError(f"cudaHostRegister of {memory.numel()} bytes failed with error {code}")

    def release() -> None:
        # A prefetch may still be reading: memory must not be unlocked, let alone freed, under a copy.
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(address)

    return release


def _take_error() -> None:
    """Let the runtime forget a failure that is handled: it would be raised at torch's next kernel launch."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")  # launches a kernel, and a launch takes the error


def allocate(nbytes: int, pin: Pin | None) -> tuple[HostBlock, str | None]:
    """Return a block of `nbytes`, and why it is not page-locked if `pin` was given and failed."""
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
    _WAITING.append((release, memory))
    _unlock_waiting()


def _unlock_waiting(*_: object) -> None:
    """Give up the locks that nobody needs, or at a later collection if the current stream is captured.

    To give up a lock the host waits for the device, which voids a capture.
    """
    captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    while _WAITING and not captures:
        release, memory = _WAITING.pop()
        release()
        del memory  # only now
    if _unlock_waiting in gc.callbacks:
        gc.callbacks.remove(_unlock_waiting)
    if _WAITING:
        gc.callbacks.append(_unlock_waiting)


def array_interface(memory: torch.Tensor) -> dict[str, Any]:
    """Describe the host bytes `memory` so that torch makes a device tensor over them."""
    return {
        "shape": (memory.numel(),),
        "typestr": "|u1",
        "data": (memory.data_ptr(), False),
        "version": 3,
    }


def device_view(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """uint8 [n] on `device` over the pinned host bytes `memory`: kernels read over the bus.

    The view keeps `memory` alive. That is the difference to a view with a deleter that does nothing, whose
    memory the next allocation may get while a kernel still reads it (vllm#45528).
    """
    if not memory.is_pinned():
        raise PinError("a device view needs pinned memory, and this is not pinned")
    # torch keeps the object, and the object keeps the memory.
    mapped = SimpleNamespace(__cuda_array_interface__=array_interface(memory), memory=memory)
    return torch.as_tensor(mapped, device=device)
