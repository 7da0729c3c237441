"""Offloaded modules run forward only, and tests draw the same numbers each time."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 16)
