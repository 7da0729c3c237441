"""The models that the tests of the offloader offload."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moedoctor.fixes.offload.report import OffloadReport
from moedoctor.fixes.offloader import Offload, offload

WIDTH = 16


def pinned(memory: torch.Tensor) -> Callable[[], None]:
    """Pretend to pin memory, so that layers are prefetched."""
    return lambda: None


def offloaded(model: nn.Module, budget: int = 1 << 40, **options: Any) -> Offload:
    return offload(model, budget, **{"keep_below": 0, "pin": pinned, **options})


def assert_same_bits(model: nn.Module, *inputs: Any, budget: int = 1 << 40, **options: Any) -> OffloadReport:
    """Check that outputs and saved weights are those of before while `model` is offloaded, and after it."""
    expected = model(*inputs)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle = offloaded(model, budget, **options)
    report = handle.report()
    assert all(torch.equal(model(*inputs), expected) for _ in range(3))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    handle.restore()
    assert torch.equal(model(*inputs), expected)
    return report


def stack(layers: int = 4, kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(layers)))


def reasons(model: nn.Module) -> dict[str, str]:
    """Offload `model`; return why each parameter is where it is."""
    return {row.name: row.reason for row in offloaded(model).report().placements}
