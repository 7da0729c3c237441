"""What runs in the child for MD002: copies whose host memory is used again at once, or after an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from moedoctor.faults.late_device import LateDevice
from moedoctor.results import Observation, Tier

if TYPE_CHECKING:
    from moedoctor.faults.unpinned_copy import UnpinnedCopyParameters

_OLD, _NEW = 1, 2
"""Bytes that host memory holds before and after it is used again."""
_PRODUCTS = 100
"""Matrix products of 4096³ that make a queue busy: long enough for a host that others keep waiting."""


def observe(parameters: UnpinnedCopyParameters, tier: Tier, device: str, *, waits: bool) -> Observation:
    """The share of stale copies in each cell. `waits`: host memory is used again only after an event."""
    one_copy = _real(device) if tier is Tier.KERNEL else _simulated
    seen: dict[str, float | int] = {"copies_a_cell": parameters.copies}
    for memory in ("pinned", "pageable"):
        for queue in ("idle", "busy"):
            stale = sum(
                one_copy(parameters.direction, parameters.bytes, memory == "pinned", queue == "busy", waits)
                for _ in range(parameters.copies)
            )
            seen[f"{memory}_{queue}"] = stale / parameters.copies
    return Observation(seen)


OneCopy = Callable[[str, int, bool, bool, bool], bool]
"""(direction, bytes, pinned, busy, waits) -> whether old or overwritten bytes came out."""


def _simulated(direction: str, nbytes: int, pinned: bool, busy: bool, waits: bool) -> bool:
    device = LateDevice()
    host = torch.full((nbytes,), _OLD, dtype=torch.uint8)
    there = torch.zeros(nbytes, dtype=torch.uint8)
    work = torch.ones(8, 8)
    if busy:
        device.run(lambda: work @ work)
        device.fork()
    if direction == "h2d":
        (device.copy if pinned else device.copy_pageable)(there, host)
        if waits:
            device.wait(device.mark())
        host.fill_(_NEW)
        device.synchronize()
        return bool((there != _OLD).any())
    there.fill_(_NEW)
    (device.copy if pinned else device.fetch_pageable)(host, there)
    if waits:
        device.wait(device.mark())
    return bool((host.clone() != _NEW).any())


def _real(device: str) -> OneCopy:
    work = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def one(direction: str, nbytes: int, pinned: bool, busy: bool, waits: bool) -> bool:
        host = torch.full((nbytes,), _OLD, dtype=torch.uint8, pin_memory=pinned)
        value = _OLD if direction == "h2d" else _NEW
        there = torch.full((nbytes,), 0 if direction == "h2d" else value, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        if busy:
            for _ in range(_PRODUCTS):
                work @ work
        if direction == "h2d":
            there.copy_(host, non_blocking=True)
            if waits:
                _passed()
            host.fill_(_NEW)
            torch.cuda.synchronize()
            return bool((there != _OLD).any())
        host.copy_(there, non_blocking=True)
        if waits:
            _passed()
        stale = bool((host != _NEW).any())
        torch.cuda.synchronize()  # before the memory is given back
        return stale

    return one


def _passed() -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
