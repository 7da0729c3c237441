"""Launches a kernel again without all that Triton looks at each time."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from packaging.version import Version

_OLDEST = Version("3.6")
"""The Triton that this was seen to work with."""


class QuickLaunch:
    """A kernel whose compiled forms are kept under a key of the caller's.

    Triton finds the compiled form anew at each launch, from every argument, which takes longer than small
    kernels do and, outside of CUDA graphs, adds to each step. The key must hold all that Triton compiles for:
    types, constants, and for what it specialises on whether a number is 1 or a multiple of 16.
    `triton` is Triton's version: before 3.6 nothing is kept, for a compiled form took other arguments once.
    """

    def __init__(self, kernel: Any, triton: str) -> None:
        self._kernel = kernel
        self._keeps = Version(triton) >= _OLDEST
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: int, *arguments: Any, num_warps: int) -> None:
        """Launch `grid` programs; `arguments` are all of the kernel's, in its order."""
        known = self._compiled.get(key)
        if known is not None:
            known[(grid, 1, 1)](*arguments)
            return
        made = self._kernel[(grid,)](*arguments, num_warps=num_warps)
        if made is not None and self._keeps:  # Triton's interpreter compiles nothing
            self._compiled[key] = made


def aligned(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Which of them begin at a multiple of 16 bytes, for a key."""
    return tuple(one.data_ptr() % 16 == 0 for one in tensors)


def device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """`torch.cuda.device_of`, which takes longer than finding that there is nothing to change."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(x)
