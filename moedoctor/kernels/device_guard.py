"""The place where kernels run: on the GPU of a tensor, or in Triton's interpreter. Imports no Triton."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

_NOTHING_TO_CHANGE = nullcontext()


def make_current(where: torch.Tensor | torch.device) -> AbstractContextManager[Any]:
    """Make the GPU of a tensor, or a GPU itself, current inside a `with` block.

    Triton and the CUDA runtime work on the current GPU, whatever GPU their arguments are on. Nothing happens
    if that GPU is current already, or for a CPU; then it takes less than half the time of
    `torch.cuda.device_of`.
    """
    if isinstance(where, torch.Tensor):
        index = where.get_device() if where.is_cuda else -1
    else:
        index = where.index if where.type == "cuda" and where.index is not None else -1
    if index < 0 or index == torch.cuda.current_device():
        return _NOTHING_TO_CHANGE
    return torch.cuda.device(index)


@cache
def has_kernels(device: torch.device) -> bool:
    """Return True if kernels can be compiled for a device: a GPU, and Triton is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def interprets() -> bool:
    """Return whether Triton runs kernels in its interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
