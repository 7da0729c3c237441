"""The small MoE language model that `train_trace_model.py` trains."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# T = tokens, B = sequences, S = length, D = width, E = experts, K = top_k, H = width of an expert


@dataclass(frozen=True)
class Settings:
    """What is trained, and what is recorded."""

    layers: int = 8
    experts: int = 128
    top_k: int = 8
    width: int = 512
    expert_width: int = 192
    heads: int = 8
    vocabulary: int = 8192
    length: int = 512
    batch: int = 48
    steps: int = 1500
    rate: float = 1.5e-3
    balance: float = 0.01
    """Weight of the load-balancing loss."""
    seed: int = 20261121
    prompt: int = 64
    """Tokens before the recorded ones, in each held-out sequence."""
    recorded: int = 256
    streams: int = 16
    seconds: float = 150.0
    """Training ends early after this long; the metadata says at which step."""


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )  # [B, heads, S, d] each
        y = functional.scaled_dot_product_attention(
            _rotate(q), _rotate(k), v, is_causal=True
        )  # [B, heads, S, d]
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def _rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half, device=x.device) / half)  # [d/2]
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed  # [S, d/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)  # [..., S, d]


class MoE(nn.Module):
    """SiLU-gated experts, softmax routing, weights of the chosen ones scaled to 1; no token is dropped."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        e, d, h = settings.experts, settings.width, settings.expert_width
        self.top_k = settings.top_k
        self.gate = nn.Linear(d, e, bias=False)
        self.w13 = nn.Parameter(torch.randn(e, d, 2 * h) / math.sqrt(d))
        self.w2 = nn.Parameter(torch.randn(e, h, d) / math.sqrt(h * 2 * settings.layers))
        self.ids = torch.empty(0)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        x = x.reshape(-1, width)  # [T, D]
        scores = functional.linear(x.float(), self.gate.weight.float()).softmax(-1)  # [T, E]
        weights, ids = scores.topk(self.top_k, dim=-1)  # [T, K]
        weights = weights / weights.sum(-1, keepdim=True)
        experts = scores.shape[1]
        load = torch.bincount(ids.flatten(), minlength=experts)  # [E]
        self.balance = experts * (load / ids.numel() * scores.mean(0)).sum()
        self.ids = ids
        # Each expert's rows, padded to the most that one expert has: two batched products do it all.
        most = int(load.max())
        order = ids.flatten().argsort(stable=True)  # [T*K] positions by expert
        expert = ids.flatten()[order]  # [T*K]
        place = torch.arange(order.numel(), device=x.device) - (load.cumsum(0) - load)[expert]  # [T*K]
        slot, token = expert * most + place, order // self.top_k  # [T*K] each
        rows = x.new_zeros(experts * most, width).index_copy(0, slot, x.index_select(0, token))
        gate, up = torch.bmm(rows.view(experts, most, width), self.w13.to(x.dtype)).chunk(
            2, -1
        )  # [E, most, H]
        out = torch.bmm(functional.silu(gate) * up, self.w2.to(x.dtype))  # [E, most, D]
        out = out.flatten(0, 1).index_select(0, slot) * weights.flatten()[order, None].to(x.dtype)  # [T*K, D]
        return torch.zeros_like(x).index_add(0, token, out).view(batch, length, width)


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(settings.width) for _ in range(2))
        self.attention = Attention(settings.width, settings.heads)
        self.moe = MoE(settings)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.moe(self.norms[1](x))


class Model(nn.Module):
    """Tokens in, logits of the next token out; the embedding is used for both."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocabulary, settings.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # [B, S, D]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)  # [B, S, V]
