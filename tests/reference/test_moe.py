"""The reference of a MoE layer, against a loop over tokens in float64."""

import pytest
import torch

from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import MoeWeights, activate, dequantize_expert, forward
from moedoctor.reference.nvfp4 import quantize, round_trip

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 6, 32, 48, 7, 3


def tensors(activation: str = "silu") -> dict[str, torch.Tensor]:
    rows = INTERMEDIATE * (1 if activation == "relu2" else 2)
    return {
        "w13": torch.randn(EXPERTS, rows, HIDDEN) / HIDDEN**0.5,
        "w2": torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5,
    }


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    return torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, TOP_K), ids


def activated(up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "relu2":
        return up.clamp(min=0) ** 2
    gate, value = up.chunk(2)
    if activation == "gelu_tanh":
        tanh = torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
        return 0.5 * gate * (1 + tanh) * value
    return gate / (1 + torch.exp(-gate)) * value


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("scaled", [False, True])
def test_against_a_loop_over_tokens(activation: str, scaled: bool) -> None:
    weights, (x, topk_weights, ids) = tensors(activation), inputs()
    ids[2, 1] = -1
    ids[3] = -1
    ids[4] = 5
    if scaled:
        weights |= {"w13_scale": torch.rand(EXPERTS), "w2_scale": torch.rand(EXPERTS)}
        weights |= {f"{name}_bias": torch.randn(weights[name].shape[:2]) for name in ("w13", "w2")}
    wide = {name: tensor.double() for name, tensor in weights.items()}
    ones, zeros = torch.ones(EXPERTS), torch.zeros(EXPERTS)
    expected = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token, lane in (ids >= 0).nonzero().tolist():
        expert, hidden = int(ids[token, lane]), x[token].double()
        for name in ("w13", "w2"):
            scale, bias = wide.get(f"{name}_scale", ones)[expert], wide.get(f"{name}_bias", zeros)[expert]
            hidden = wide[name][expert] @ hidden * scale + bias
            hidden = activated(hidden, activation) if name == "w13" else hidden
        expected[token] += topk_weights[token, lane] * hidden
    got = forward(x, MoeWeights.from_tensors(weights, activation), topk_weights, ids)
    assert got.dtype is torch.float32
    assert not bool(got[3].count_nonzero())
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("bad", "activation", "message"),
    [
        (-2, "silu", "topk_ids: expected -1 to 5"),
        (EXPERTS, "silu", "topk_ids: expected -1 to 5"),
        (0, "swish", "expected silu, gelu, gelu_tanh, relu2"),
    ],
)
def test_an_id_out_of_range_and_an_unknown_activation_are_refused(bad, activation, message):
    x, topk_weights, ids = inputs()
    ids[0, 0] = bad
    with pytest.raises(ValueError, match=message):
        forward(x, MoeWeights.from_tensors(tensors(), activation), topk_weights, ids)


def test_quantized_weights_compute_with_their_dequantized_values() -> None:
    weights, (x, topk_weights, ids) = tensors(), inputs()
    scale = torch.rand(EXPERTS) + 0.5
    for quantise in (quantize, lambda weight: Fp8(weight.to(torch.float8_e4m3fn), scale)):
        w13, w2 = quantise(weights["w13"]), quantise(weights["w2"])
        plain = [torch.stack([dequantize_expert(weight, e) for e in range(EXPERTS)]) for weight in (w13, w2)]
        plain = forward(x, MoeWeights(*plain), topk_weights, ids)
        assert torch.equal(forward(x, MoeWeights(w13, w2), topk_weights, ids), plain)


def test_quantized_activations() -> None:
    weights, (x, topk_weights, _) = MoeWeights.from_tensors(tensors()), inputs()
    ids = torch.full((TOKENS, 1), 2)
    intermediates: list[torch.Tensor] = []

    def quantize_intermediate(values: torch.Tensor) -> torch.Tensor:
        intermediates.append(values)
        return round_trip(values, 0.01)

    got = forward(
        x,
        weights,
        topk_weights[:, :1],
        ids,
        quantize_input=lambda values: round_trip(values, 0.02),
        quantize_intermediate=quantize_intermediate,
    )
    middle = activate((round_trip(x, 0.02) @ weights.w13[2].T).bfloat16(), "silu").float()
    assert torch.equal(intermediates[0], middle)
    assert torch.allclose(got, round_trip(middle, 0.01) @ weights.w2[2].T * topk_weights[:, :1])
    assert not torch.allclose(got, forward(x, weights, topk_weights[:, :1], ids), rtol=1e-3)
