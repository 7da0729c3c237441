from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from moedoctor.reference import fp8
from moedoctor.reference.experts import MoeWeights, activate, forward
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.nvfp4 import dequantize, quantize, round_trip

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 6, 32, 48, 7, 3


def layer(activation: str = "silu", *, shared: bool = False, scaling: float = 1.0) -> MoeWeights:
    rows = INTERMEDIATE * (1 if activation == "relu2" else 2)
    return MoeWeights(
        torch.randn(EXPERTS, rows, HIDDEN) / HIDDEN**0.5,
        torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5,
        activation,
        torch.randn(rows, HIDDEN) if shared else None,
        torch.randn(HIDDEN, INTERMEDIATE) if shared else None,
        scaling,
    )


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    return torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, TOP_K), ids


def one_token(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, activation: str) -> torch.Tensor:
    up = w13 @ x
    if activation == "relu2":
        return w2 @ (up.clamp(min=0) ** 2)
    half = len(up) // 2
    if activation == "gelu_tanh":
        inner = (2 / torch.pi) ** 0.5 * (up[:half] + 0.044715 * up[:half] ** 3)
        return w2 @ (0.5 * up[:half] * (1 + torch.tanh(inner)) * up[half:])
    return w2 @ (up[:half] * torch.sigmoid(up[:half]) * up[half:])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("shared", [False, True])
def test_against_a_loop_over_tokens(activation: str, shared: bool) -> None:
    weights, (x, scores, ids) = layer(activation, shared=shared, scaling=2.5), inputs()
    expected = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS):
        for slot in range(TOP_K):
            expert = int(ids[token, slot])
            out = one_token(x[token], weights.w13[expert], weights.w2[expert], activation)
            expected[token] += 2.5 * scores[token, slot] * out
        if shared:
            expected[token] += one_token(x[token], weights.shared_w13, weights.shared_w2, activation)
    assert torch.allclose(forward(x, weights, scores, ids), expected, rtol=1e-4, atol=1e-4)


def test_a_slot_of_minus_one_adds_nothing() -> None:
    weights, (x, scores, ids) = layer(), inputs()
    skipped = ids.clone()
    skipped[:, 1] = -1
    silent = scores.clone()
    silent[:, 1] = 0
    assert torch.allclose(forward(x, weights, scores, skipped), forward(x, weights, silent, ids), atol=1e-6)
    assert float(forward(x, weights, scores, torch.full_like(ids, -1)).abs().max()) == 0


def test_duplicates_are_summed() -> None:
    weights, (x, scores, ids) = layer(), inputs()
    ids = ids[:, :1].repeat(1, TOP_K)
    together = forward(x, weights, scores.sum(1, keepdim=True), ids[:, :1])
    assert torch.allclose(forward(x, weights, scores, ids), together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [-2, EXPERTS])
def test_an_id_out_of_range_is_refused(bad: int) -> None:
    weights, (x, scores, ids) = layer(), inputs()
    ids[0, 0] = bad
    with pytest.raises(ValueError, match="topk_ids: expected -1 to 5"):
        forward(x, weights, scores, ids)


def test_an_unknown_activation_is_refused() -> None:
    weights, (x, scores, ids) = layer(), inputs()
    with pytest.raises(ValueError, match="expected silu, gelu_tanh, relu2"):
        forward(x, MoeWeights(weights.w13, weights.w2, "swish"), scores, ids)


def test_nvfp4_weights_compute_with_their_dequantised_values() -> None:
    weights, (x, scores, ids) = layer(), inputs()
    w13, w2 = quantize(weights.w13), quantize(weights.w2)
    plain = MoeWeights(dequantize(w13), dequantize(w2))
    assert torch.equal(forward(x, MoeWeights(w13, w2), scores, ids), forward(x, plain, scores, ids))


def test_fp8_weights_compute_with_their_dequantised_values() -> None:
    weights, (x, scores, ids) = layer(), inputs()
    scale = torch.rand(EXPERTS) + 0.5
    w13, w2 = (Fp8(w.to(torch.float8_e4m3fn), scale) for w in (weights.w13, weights.w2))
    plain = MoeWeights(fp8.dequantize(w13), fp8.dequantize(w2))
    assert torch.equal(forward(x, MoeWeights(w13, w2), scores, ids), forward(x, plain, scores, ids))


def test_quantised_activations() -> None:
    weights, (x, scores, _) = layer(), inputs()
    ids = torch.full((TOKENS, 1), 2)
    seen: list[torch.Tensor] = []

    def quantise_intermediate(values: torch.Tensor) -> torch.Tensor:
        seen.append(values)
        return round_trip(values, 0.01)

    got = forward(
        x,
        weights,
        scores[:, :1],
        ids,
        quantise_input=lambda values: round_trip(values, 0.02),
        quantise_intermediate=quantise_intermediate,
    )
    middle = activate((round_trip(x, 0.02) @ weights.w13[2].T).bfloat16(), "silu").float()
    assert torch.equal(seen[0], middle)
    assert torch.allclose(got, round_trip(middle, 0.01) @ weights.w2[2].T * scores[:, :1])
    assert not torch.allclose(got, forward(x, weights, scores[:, :1], ids), rtol=1e-3)


def test_the_gate_is_the_first_half() -> None:
    up = torch.tensor([[1.0, 2.0]])
    assert torch.equal(activate(up, "silu"), functional.silu(torch.tensor([[1.0]])) * 2)


@pytest.mark.parametrize("missing", ["shared_w13", "shared_w2"])
def test_half_a_shared_expert_is_refused(missing: str) -> None:
    weights, (x, scores, ids) = replace(layer(shared=True), **{missing: None}), inputs()
    with pytest.raises(ValueError, match=f"^{missing}: expected both matrices"):
        forward(x, weights, scores, ids)
