"""What the tests of the offloader offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moedoctor.fixes.offloader import Offload, offload

WIDTH = 16


def pinned(memory: torch.Tensor) -> Callable[[], None]:
    """Pretend to pin memory, so that layers are prefetched."""
    return lambda: None


def offloaded(model: nn.Module, budget: int = 1 << 40, **options: Any) -> Offload:
    return offload(model, budget, **{"keep_below": 0, "pin": pinned, **options})


def stack(layers: int = 4, kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(layers)))


def reasons(model: nn.Module) -> dict[str, str]:
    """Offload `model`; return why each parameter is where it is."""
    return {row.name: row.reason for row in offloaded(model).report().placements}
