"""A kernel that reads an address without asking where it is, as backends without a device check do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _read(address: tl.tensor, out: tl.tensor, count: tl.constexpr) -> None:
    # Triton checks the tensors that it is given; a number in device memory is not checked.
    source = tl.load(address).to(tl.pointer_type(tl.float32))
    offsets = tl.program_id(0) * count + tl.arange(0, count)
    tl.store(out + offsets, tl.load(source + offsets))


def read_address(address: int, count: int, device: str) -> torch.Tensor:
    """float32 [count] read from `address`, whose memory may be anywhere; `count` a multiple of 1024.

    Memory that the GPU cannot reach ends in `CUDA error: an illegal memory access was encountered`, at the
    next synchronisation, and the process can use the GPU no more. Raises ValueError for another `count`.
    """
    if count < _BLOCK or count % _BLOCK:
        raise ValueError(f"count must be a positive multiple of {_BLOCK}, got {count}")
    out = torch.empty(count, device=device)  # [count]
    where = torch.tensor([address], dtype=torch.int64, device=device)  # [1]
    with torch.cuda.device(device):
        _read[(count // _BLOCK,)](where, out, count=_BLOCK)
    return out


@triton.jit
def _copy(source: tl.tensor, out: tl.tensor, count: tl.constexpr) -> None:
    offsets = tl.program_id(0) * count + tl.arange(0, count)
    tl.store(out + offsets, tl.load(source + offsets))


def read_tensor(source: torch.Tensor, device: str) -> torch.Tensor:
    """float32 [count] read from the tensor `source`, which Triton checks; `count` a multiple of 1024.

    Triton raises ValueError for memory that the GPU cannot reach.
    """
    count = source.numel()
    if count < _BLOCK or count % _BLOCK:
        raise ValueError(f"count must be a positive multiple of {_BLOCK}, got {count}")
    out = torch.empty(count, device=device)  # [count]
    with torch.cuda.device(device):
        _copy[(count // _BLOCK,)](source, out, count=_BLOCK)
    return out
