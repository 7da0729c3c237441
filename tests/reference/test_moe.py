"""The reference of a MoE layer against a loop over tokens in float64, and the layers that are made for it."""

import pytest
import torch

from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference import fp8, moe_layer
from moedoctor.reference.agreement import agree, choose_bounds
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import MoeWeights, activate, dequantize_expert, forward
from moedoctor.reference.nvfp4 import Nvfp4, quantize, round_trip

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
    for quantizer in (quantize, lambda weight: Fp8(weight.to(torch.float8_e4m3fn), scale)):
        w13, w2 = quantizer(weights["w13"]), quantizer(weights["w2"])
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

    options = {"quantize_input": lambda values: round_trip(values, 0.02)}
    options["quantize_intermediate"] = quantize_intermediate
    got = forward(x, weights, topk_weights[:, :1], ids, **options)
    middle = activate((round_trip(x, 0.02) @ weights.w13[2].T).bfloat16(), "silu").float()
    assert torch.equal(intermediates[0], middle)
    assert torch.allclose(got, round_trip(middle, 0.01) @ weights.w2[2].T * topk_weights[:, :1])
    assert not torch.allclose(got, forward(x, weights, topk_weights[:, :1], ids), rtol=1e-3)


SHAPE = LayerShape(256, 128, 6, 2)


@pytest.mark.parametrize("quantization", ["nvfp4", "fp8", "fp8-block", "bf16"])
def test_weights_fit_into_bfloat16(quantization: str) -> None:
    layer = moe_layer.make_layer(SHAPE, quantization)
    for weight, size in ((layer.w13, (256, 256)), (layer.w2, (256, 128))):
        expert = dequantize_expert(weight, 3)
        assert expert.shape == size
        assert torch.equal(expert.bfloat16().float(), expert)


@pytest.mark.parametrize("activations", ["nvfp4", "fp8", "fp8_block"])
def test_inputs_lie_on_the_grid(activations: str) -> None:
    layer = moe_layer.make_layer(SHAPE, "nvfp4" if activations == "nvfp4" else "fp8")
    problem = moe_layer.make_problem(layer, 9, activations)
    quantizer = moe_layer.make_quantizer(activations, layer.input_scale)
    assert quantizer is not None
    assert torch.equal(quantizer(problem.x.float()), problem.x.float())
    assert 0.3 < float(problem.x.float().std()) < 2


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize(("quantization", "activations"), [("nvfp4", "nvfp4"), ("fp8", "fp8")])
def test_intermediates_do_not_saturate(activation: str, quantization: str, activations: str) -> None:
    shape = LayerShape(2048, 256, 4, 2, activation)
    layer = moe_layer.make_layer(shape, quantization)
    problem = moe_layer.make_problem(layer, 64, activations)
    middle = activate(problem.x.float() @ dequantize_expert(layer.w13, 0).T, activation)
    largest = {"nvfp4": 448 * 6, "fp8": 448}[activations] * layer.intermediate_scale
    assert float(middle.abs().max()) < largest


def test_scales_differ_from_block_to_block_and_from_expert_to_expert() -> None:
    layer = moe_layer.make_layer(LayerShape(256, 128, 32, 2), "nvfp4")
    assert isinstance(layer.w13, Nvfp4)
    assert len(layer.w13.block_scales[0].float().unique()) > 10
    assert len(layer.w13.global_scale.unique()) == 2


def test_fp8_blocks_have_scales_of_their_own_and_gate_and_up_share_none() -> None:
    layer = moe_layer.make_layer(LayerShape(320, 192, 3, 2), "fp8-block")
    assert isinstance(layer.w13, Fp8)
    assert isinstance(layer.w2, Fp8)
    assert layer.w13.scale.shape == (3, 4, 3)  # gate and up take two rows of blocks each, the last cut
    assert layer.w2.scale.shape == (3, 3, 2)
    assert len(layer.w13.scale.unique()) == 3
    weight, values = dequantize_expert(layer.w13, 1), layer.w13.values[1].float()
    assert torch.equal(weight[192:320, 256:], values[192:320, 256:] * layer.w13.scale[1, 2, 2])
    assert torch.equal(weight[128:192, :128], values[128:192, :128] * layer.w13.scale[1, 1, 0])


def test_groups_of_fp8_inputs_have_scales_of_their_own() -> None:
    x = moe_layer.make_input(moe_layer.make_layer(SHAPE, "bf16"), 9, "fp8_block")
    assert set(x.float().unflatten(1, (-1, 128)).amax(2).unique().tolist()) == {1.75, 3.5}


@pytest.mark.parametrize(("sizes", "name"), [((0, 1, 1, 1), "hidden"), ((1, 1, 2, 3), "top_k")])
def test_impossible_shapes_are_refused(sizes: tuple[int, int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        LayerShape(*sizes)


def add_up(x: torch.Tensor, weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return x [T, K] times weight [N, K] as Hopper sums FP8: 32 terms, cut below 2^-bits of the largest."""
    total = torch.zeros(len(x), len(weight))  # [T, N]
    for products in (x[:, None] * weight).split(32, 2):
        terms = torch.cat([total[..., None], products], 2)  # [T, N, 33]
        unit = torch.exp2(terms.abs().amax(2, keepdim=True).clamp(min=1e-9).log2().floor() - bits)
        total = ((terms / unit).trunc() * unit).sum(2)
    return total


@pytest.mark.parametrize(
    ("shape", "tokens", "seed", "bits"),
    [(LayerShape(128, 128, 1, 1), 150, 0, 40), (LayerShape(48, 16, 1, 1, "relu2"), 6, 91, 13)],
)
def test_a_backend_that_activates_in_float32_is_right(shape, tokens, seed, bits):
    """Also with sums cut at 13 bits; not with gate and up exchanged, or with scales 2 % too large."""
    problem = moe_layer.make_problem(moe_layer.make_layer(shape, "fp8", seed=seed), tokens, "fp8", seed=seed)
    w13, w2 = (dequantize_expert(each, 0) for each in (problem.layer.w13, problem.layer.w2))
    up = add_up(problem.x.float(), w13, bits).bfloat16().float()  # [T, 2I] or [T, I]
    swapped = up.roll(up.shape[1] // 2, 1)
    for first, right in ((up, True), (swapped, False), (up * 1.02, False)):
        middle = fp8.round_trip(activate(first, shape.activation), problem.layer.intermediate_scale)  # [T, I]
        output = add_up(middle, w2, bits)  # [T, H]
        near = moe_layer.compute_expected(problem, "fp8", output)
        assert agree(output, near, choose_bounds("fp8")).right == right
        by_vllm = moe_layer.compute_expected(problem, "fp8")
        assert not agree(output, by_vllm, choose_bounds("fp8")).right
