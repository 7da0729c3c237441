"""The reference of a MoE layer over slots, against a loop over tokens and choices in float64."""

from __future__ import annotations

import pytest
import torch

from moedoctor.fixes.moe import forward as fixed
from moedoctor.reference.moe import ACTIVATIONS, moe_forward

SLOTS, HIDDEN, INNER, TOKENS, TOP_K = 5, 8, 6, 7, 3


def _by_hand(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    ids: torch.Tensor,
    shares: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    wide = {name: tensor.double() for name, tensor in weights.items()}
    for token in range(TOKENS):
        for lane in range(TOP_K):
            slot = int(ids[token, lane])
            if slot < 0:
                continue
            up = wide["w13"][slot] @ x[token].double() * wide["w13_scale"][slot] + wide["w13_bias"][slot]
            if activation == "silu":
                gate = up[:INNER]
                up = gate / (1 + torch.exp(-gate)) * up[INNER:]
            else:
                up = up.clamp(min=0) ** 2
            down = wide["w2"][slot] @ up * wide["w2_scale"][slot] + wide["w2_bias"][slot]
            out[token] += float(shares[token, lane]) * down
    return out


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_against_a_loop(activation: str) -> None:
    draw = torch.Generator().manual_seed(0)
    height = 2 * INNER if activation == "silu" else INNER
    weights = {
        "w13": torch.randn(SLOTS, height, HIDDEN, generator=draw),
        "w2": torch.randn(SLOTS, HIDDEN, INNER, generator=draw),
        "w13_scale": torch.rand(SLOTS, generator=draw),
        "w2_scale": torch.rand(SLOTS, generator=draw),
        "w13_bias": torch.randn(SLOTS, height, generator=draw),
        "w2_bias": torch.randn(SLOTS, HIDDEN, generator=draw),
    }
    x = torch.randn(TOKENS, HIDDEN, generator=draw)
    ids = torch.randint(-1, SLOTS, (TOKENS, TOP_K), generator=draw)
    shares = torch.rand(TOKENS, TOP_K, generator=draw)
    got = moe_forward(x, weights, ids, shares, activation=activation)
    assert got.dtype is torch.float32
    torch.testing.assert_close(
        got.double(), _by_hand(x, weights, ids, shares, activation), rtol=1e-5, atol=1e-5
    )


def test_tokens_without_experts_get_zeros() -> None:
    weights = {"w13": torch.randn(2, 4, 3), "w2": torch.randn(2, 3, 2)}
    out = moe_forward(torch.randn(2, 3), weights, torch.full((2, 2), -1), torch.ones(2, 2))
    assert torch.equal(out, torch.zeros(2, 3))


@pytest.mark.parametrize("activation", ["gelu_tanh", "relu", ""])
def test_an_unknown_activation_is_refused(activation: str) -> None:
    weights = {"w13": torch.randn(2, 4, 3), "w2": torch.randn(2, 3, 2)}
    with pytest.raises(ValueError, match=f"must be one of silu, relu2, got '{activation}'"):
        moe_forward(
            torch.randn(2, 3), weights, torch.full((2, 2), -1), torch.ones(2, 2), activation=activation
        )


def test_the_activations_are_those_of_the_kernels() -> None:
    assert fixed.ACTIVATIONS == ACTIVATIONS
