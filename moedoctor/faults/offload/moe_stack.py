"""A stack of MoE layers in plain torch, whose experts MD002 and MD005 offload."""

from __future__ import annotations

import torch
from torch import nn

from moedoctor.models.layer_shape import LayerShape

NAMES = ("experts.w13_weight", "experts.w2_weight")
"""The parameters that go to the host."""


def _make_parameter(*size: int, device: str) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=torch.bfloat16, device=device))


class Experts(nn.Module):
    """SwiGLU experts run as two grouped products."""

    def __init__(self, shape: LayerShape, device: str) -> None:
        super().__init__()
        experts, hidden, width = shape.experts, shape.hidden, shape.intermediate
        self.w13_weight = _make_parameter(experts, 2 * width, hidden, device=device)  # [E, 2I, H]
        self.w2_weight = _make_parameter(experts, hidden, width, device=device)  # [E, H, I]

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        tokens, top_k = topk_ids.shape
        experts = self.w13_weight.shape[0]
        flat = topk_ids.flatten()  # [T*K]
        order = flat.argsort(stable=True)  # [T*K]
        every = torch.arange(experts, device=x.device)  # [E]
        ends = torch.searchsorted(flat[order], every, right=True).to(torch.int32)  # [E]
        rows = x[order // top_k]  # [T*K, H]
        gate, up = nn.functional.grouped_mm(rows, self.w13_weight.transpose(1, 2), offs=ends).chunk(2, dim=1)
        hidden = nn.functional.silu(gate) * up  # [T*K, I]
        out = nn.functional.grouped_mm(hidden, self.w2_weight.transpose(1, 2), offs=ends)  # [T*K, H]
        # Back by gathering: a sum by atomics would not come out the same twice.
        back = torch.empty_like(out).index_copy_(0, order, out).view(tokens, top_k, -1)  # [T, K, H]
        return (back * topk_weights[:, :, None].to(back.dtype)).sum(1)  # [T, H]


class MoeLayer(nn.Module):
    """A router that stays on the device, and experts, with a residual connection."""

    def __init__(self, shape: LayerShape, device: str) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.gate = _make_parameter(shape.hidden, shape.experts, device=device)  # [H, E]
        self.experts = Experts(shape, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ self.gate).float().softmax(dim=1)  # [T, E]
        topk_weights, topk_ids = scores.topk(self.top_k, dim=1)  # [T, K]
        normed = nn.functional.rms_norm(x, x.shape[1:])  # [T, H]
        mixed: torch.Tensor = self.experts(normed, topk_ids, topk_weights)  # [T, H]
        return x + mixed


def make_stack(shape: LayerShape, layers: int, device: str, seed: int = 0) -> nn.Sequential:
    """Return the stack in bfloat16 on `device`, with the same weights for the same seed."""
    stack = nn.Sequential(*(MoeLayer(shape, device) for _ in range(layers)))
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.normal_(std=0.02, generator=generator)
    return stack.requires_grad_(False)
