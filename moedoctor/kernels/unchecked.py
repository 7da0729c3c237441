"""A kernel that reads any address, as backends without a device check do, and a kernel that checks it.

Shapes: count float32 values, a multiple of 1024; a program reads BLOCK (1024) of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moedoctor.kernels.device_guard import make_current

_BLOCK = 1024


@triton.jit
def _read(address: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    # Triton checks its tensor arguments. It does not check a number in device memory.
    source = tl.load(address).to(tl.pointer_type(tl.float32))
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(out + offsets, tl.load(source + offsets))


def read_address(address: int, count: int, device: str) -> torch.Tensor:
    """Return float32 [count] read from `address`, whose memory may be anywhere.

    For memory that the GPU cannot reach, the next synchronization raises `CUDA error: an illegal memory
    access was encountered`, and the process can no longer use the GPU. Raises ValueError for another `count`.
    """
    if count < _BLOCK or count % _BLOCK:
        raise ValueError(f"count must be a positive multiple of {_BLOCK}, got {count}")
    out = torch.empty(count, device=device)  # [count]
    pointer = torch.tensor([address], dtype=torch.int64, device=device)  # [1]
    with make_current(out):
        _read[(count // _BLOCK,)](pointer, out, BLOCK=_BLOCK)
    return out


@triton.jit
def _copy(source: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(out + offsets, tl.load(source + offsets))


def read_tensor(source: torch.Tensor, device: str) -> torch.Tensor:
    """Return float32 [count] read from `source`; Triton raises ValueError if the GPU cannot reach it."""
    count = source.numel()
    if count < _BLOCK or count % _BLOCK:
        raise ValueError(f"count must be a positive multiple of {_BLOCK}, got {count}")
    out = torch.empty(count, device=device)  # [count]
    with make_current(out):
        _copy[(count // _BLOCK,)](source, out, BLOCK=_BLOCK)
    return out
