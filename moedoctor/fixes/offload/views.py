"""Buffers that a module made of a weight: they keep the memory that the weight had then.

An offloader gives a weight other memory, in vLLM before the checkpoint is loaded. A view that the module took
when it was made, such as ``conv_weights`` of vLLM's `MambaMixer2`, then never gets what the checkpoint holds
(MD008).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class WeightView:
    """A buffer with the memory that the weight has, or had."""

    name: str
    buffer: torch.Tensor
    """Of any shape, with as many numbers as the weight."""
    weight: nn.Parameter


def find_views(module: nn.Module) -> list[WeightView]:
    """Return the buffers of `module` that are another form of a whole weight. Call it before offloading."""
    weights = {weight.data_ptr(): weight for weight in module.parameters() if weight.numel()}
    return [
        WeightView(name, buffer, weights[buffer.data_ptr()])
        for name, buffer in module.named_buffers()
        if buffer.data_ptr() in weights and buffer.numel() == weights[buffer.data_ptr()].numel()
    ]


@torch.no_grad()
def fill_views(views: Iterable[WeightView]) -> int:
    """Copy the weights into the buffers whose memory they left; return how many these are.

    The buffers stay where they are, on the GPU. A weight that was repacked is another one and is left out.
    Call it after the weights are loaded.
    """
    left = [
        view
        for view in views
        if view.buffer.data_ptr() != view.weight.data_ptr()
        and (view.buffer.numel(), view.buffer.dtype) == (view.weight.numel(), view.weight.dtype)
    ]
    for view in left:
        view.buffer.copy_(view.weight.reshape(view.buffer.shape))
    return len(left)
