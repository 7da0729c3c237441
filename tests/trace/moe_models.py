"""Models that are shaped like those of transformers, in its old and its stacked form, and small real ones."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

E, K, H, SIZE = 8, 2, 64, 32


class Router(nn.Module):
    """As in transformers from 5.0: returns logits, weights and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts = K, E
        self.weight = nn.Parameter(torch.randn(E, H) / H**0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x.reshape(-1, H) @ self.weight.T  # [T, E]
        weights, ids = logits.float().softmax(-1).topk(K)  # [T, K] each
        return logits, (weights / weights.sum(1, keepdim=True)).to(x.dtype), ids


class Experts(nn.Module):
    """Stacked, as in transformers from 5.0; computes every expert, so that nothing depends on data."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * SIZE, H) / H**0.5)
        self.down_proj = nn.Parameter(torch.randn(E, H, SIZE) / SIZE**0.5)
        self.act_fn = act or nn.SiLU()
        self.scale = 1.0

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        gate, up = torch.einsum("th,enh->ten", hidden_states, self.gate_up_proj).chunk(2, -1)
        out = torch.einsum("ten,ehn->teh", self.act_fn(gate) * up, self.down_proj)  # [T, E, H]
        spread = torch.zeros(len(out), E, dtype=out.dtype)
        spread = spread.scatter(1, top_k_index, top_k_weights.to(out.dtype))
        return torch.where(spread[..., None] > 0, out * spread[..., None], 0).sum(1) * self.scale


class Block(nn.Module):
    """As Mixtral's and Qwen3-MoE's in transformers from 5.0."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.gate, self.experts = Router(), Experts(**more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, H)
        _, weights, ids = self.gate(flat)
        return self.experts(flat, ids, weights).view(x.shape)


class Expert(nn.Module):
    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names = names
        for name, rows, columns in zip(names, (SIZE, SIZE, H), (H, H, SIZE), strict=True):
            self.add_module(name, nn.Linear(columns, rows, bias=False))
        self.act_fn = functional.silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class OldBlock(nn.Module):
    """As Mixtral's (w1, w3, w2) and Qwen3-MoE's in transformers 4: a list of experts, top-k in the block."""

    def __init__(self, names: tuple[str, str, str] = ("w1", "w3", "w2"), norm_topk_prob: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Expert(names) for _ in range(E))
        self.top_k, self.norm_topk_prob, self.scale = K, norm_topk_prob, 1.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, H)
        logits = self.gate(flat)
        weights, ids = logits.softmax(1, dtype=torch.float).topk(K)
        if self.norm_topk_prob:
            weights = weights / weights.sum(1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, lane = torch.where(ids == number)
            out.index_add_(0, row, expert(flat[row]) * weights.to(x.dtype)[row, lane, None])
        return (out * self.scale).view(x.shape), logits


def make_transformers_model(kind: str = "Qwen3Moe", **changes: Any) -> Any:
    """Return a model of random weights of the installed transformers; skip the test if it has none."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"needs a transformers with {kind}")
    sizes = {"vocab_size": 64, "hidden_size": H, "intermediate_size": SIZE, "moe_intermediate_size": SIZE}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    experts = {"num_experts": E, "num_local_experts": E, "num_experts_per_tok": K}
    config = getattr(transformers, f"{kind}Config")(**(sizes | heads | experts | changes))
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()
