"""Random MoE layers and inputs on the quantization grid, so that it is known what a backend rounds.

Weights, and activations of backends that quantize them, are drawn as codes and scales: quantizing them is
exact, every global scale is a power of two, and a dequantized weight fits into bfloat16. Block scales
differ from block to block and global scales from expert to expert, because equal ones hide a wrong layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference import e2m1, fp8, nvfp4
from moedoctor.reference.moe import ROUNDINGS, MoeWeights, Quantize, Weight, forward_each

_Maker = Callable[[tuple[int, int, int], torch.Generator, str], Weight]
_AT_ONCE = 7  # roundings: their outputs take memory together
_SCALE_CODES = (0x30, 0x43)
"""E4M3 codes of block scales: 0.5 up to 2.5."""
_CODE_RMS = 2.93
"""Root mean square of the sixteen E2M1 values."""
_SCALE_RMS = 1.4
_FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale in ``fp8-block``, and values of an activation."""


@dataclass(frozen=True)
class Layer:
    """One layer's routed experts and the scales of its activations."""

    shape: LayerShape
    quantization: str
    """``nvfp4``, ``fp8``, ``fp8-block`` or ``bf16``"""
    w13: Weight
    """[E, 2I, H], the gate half first; [E, I, H] without a gate"""
    w2: Weight
    """[E, H, I]"""
    input_scale: float = 1.0
    """Dequantizes the input's codes, for backends that quantize activations."""
    intermediate_scale: float = 1.0


@dataclass(frozen=True)
class Problem:
    """A layer with the tokens that pass it."""

    layer: Layer
    x: torch.Tensor
    """bfloat16 [T, H]"""
    topk_weights: torch.Tensor
    """float32 [T, K]"""
    topk_ids: torch.Tensor
    """int32 [T, K]"""


def make_layer(shape: LayerShape, quantization: str, *, seed: int = 0, device: str = "cpu") -> Layer:
    """Return a random layer whose outputs are of the size of its inputs. NVFP4 needs multiples of 16."""
    draw = torch.Generator(device).manual_seed(seed)
    makers: dict[str, _Maker] = {
        "nvfp4": _draw_nvfp4,
        "fp8": _draw_fp8,
        "fp8-block": _draw_fp8_block,
        "bf16": _draw_bf16,
    }
    make = makers[quantization]
    make_w13 = partial(_draw_fp8_block, parts=2) if quantization == "fp8-block" and shape.gated else make
    w13 = make_w13((shape.experts, shape.w13_rows, shape.hidden), draw, device)
    w2 = make((shape.experts, shape.hidden, shape.intermediate), draw, device)
    # The largest value must not saturate: 448 * 6 steps in NVFP4, 448 in FP8. In blocks, FP8 activations have
    # scales of their own.
    scale = {"nvfp4": 2.0**-6, "fp8": 2.0**-2}.get(quantization, 1.0)
    return Layer(shape, quantization, w13, w2, input_scale=scale / 2, intermediate_scale=scale)


def make_input(
    layer: Layer, tokens: int, activations: str, *, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """Return bfloat16 [T, H] of unit size, on the grid of `activations`.

    These are ``nvfp4``, ``fp8``, ``fp8_block`` or ``none``.
    """
    draw = torch.Generator(device).manual_seed(seed + 1)
    hidden = layer.shape.hidden
    if activations == "nvfp4":
        codes = torch.randint(0, 16, (tokens, hidden), generator=draw, device=device, dtype=torch.uint8)
        codes[:, :: nvfp4.BLOCK] |= 7  # a block's largest code is 6, so its scale comes back as it was
        scales = _draw_block_scales((tokens, hidden // nvfp4.BLOCK), draw, device).float() * 16  # 8 .. 40
        stored = nvfp4.Nvfp4(
            e2m1.pack(codes),
            scales.to(torch.float8_e4m3fn),
            torch.full((), layer.input_scale, device=device),
        )
        return nvfp4.dequantize(stored).bfloat16()
    x = torch.randn(tokens, hidden, generator=draw, device=device)  # [T, H]
    if activations == "fp8_block":
        x = (x * 128).clamp(-fp8.E4M3_MAX, fp8.E4M3_MAX)  # [T, H]
        x[:, ::_FP8_BLOCK] = fp8.E4M3_MAX  # the largest of each group, so that its scale is a power of two
        halves = torch.randint(7, 9, x[:, ::_FP8_BLOCK].shape, generator=draw, device=device)  # [T, G]
        scale = (0.5 ** halves.float()).repeat_interleave(_FP8_BLOCK, 1)[:, :hidden]  # [T, H]
        return (x.to(torch.float8_e4m3fn).float() * scale).bfloat16()
    return (fp8.round_trip(x, layer.input_scale) if activations == "fp8" else x).bfloat16()


def make_problem(
    layer: Layer, tokens: int, activations: str, *, seed: int = 0, device: str = "cpu"
) -> Problem:
    """Return tokens on the grid of `activations`, routed at random: every expert is as likely.

    Ids are distinct in a row, and a row's weights add up to 1.
    """
    x = make_input(layer, tokens, activations, seed=seed, device=device)  # [T, H]
    draw = torch.Generator(device).manual_seed(seed + 2)
    scores = torch.rand(tokens, layer.shape.experts, generator=draw, device=device)  # [T, E]
    chosen, ids = scores.topk(layer.shape.top_k, dim=1)  # [T, K]
    return Problem(layer, x, torch.softmax(chosen, dim=1), ids.int())


def compute_expected(problem: Problem, activations: str, near: torch.Tensor | None = None) -> torch.Tensor:
    """Return float32 [T, H], as a backend that quantizes its activations like that computes it.

    Such backends round in different places, see `ROUNDINGS`; with an output `near` [T, H] each token has the
    rounding that is nearest to it.
    """
    layer = problem.layer
    compute = partial(
        forward_each,
        problem.x,
        MoeWeights(layer.w13, layer.w2, layer.shape.activation),
        problem.topk_weights,
        problem.topk_ids,
        make_quantizer(activations, layer.input_scale),
        make_quantizer(activations, layer.intermediate_scale),
    )
    best: torch.Tensor = compute(ROUNDINGS[:1])[0]  # [T, H]
    if near is None or activations == "none":
        return best
    for first in range(1, len(ROUNDINGS), _AT_ONCE):
        outputs = torch.cat([best[None], compute(ROUNDINGS[first : first + _AT_ONCE])])  # [roundings, T, H]
        distances = (outputs - near.float()).norm(dim=2).nan_to_num(math.inf)  # [roundings, T]
        best = outputs[distances.argmin(0), torch.arange(len(near), device=near.device)]
    return best


def make_quantizer(activations: str, scale: float) -> Quantize | None:
    """Return a round trip through NVFP4 or FP8, or None for activations that stay.

    NaN stays NaN, and with an NVFP4 scale that is not positive all values become NaN.
    ``fp8`` and ``nvfp4`` use this scale; ``fp8_token`` and ``fp8_block`` one of each token, or of 128 of its
    values.
    """
    if activations == "nvfp4":
        return lambda values: _round_trip_nvfp4(values, scale)
    if activations == "fp8":
        return lambda values: fp8.round_trip(values, scale)
    if activations in ("fp8_token", "fp8_block"):
        group = None if activations == "fp8_token" else _FP8_BLOCK
        return lambda values: fp8.round_trip_in_groups(values, group)
    return None


def _round_trip_nvfp4(values: torch.Tensor, scale: float) -> torch.Tensor:
    if not 0 < scale < math.inf:
        return torch.full_like(values, math.nan)
    rounded = nvfp4.round_trip(values.nan_to_num(), scale)  # Inf saturates
    return rounded.masked_fill(values.isnan(), math.nan)


def _draw_nvfp4(size: tuple[int, int, int], draw: torch.Generator, device: str) -> nvfp4.Nvfp4:
    experts, rows, columns = size
    packed = torch.randint(
        0, 256, (experts, rows, columns // 2), generator=draw, device=device, dtype=torch.uint8
    )
    scales = _draw_block_scales((experts, rows, columns // nvfp4.BLOCK), draw, device)
    typical = 2.0 ** round(math.log2(1 / (_CODE_RMS * _SCALE_RMS * columns**0.5)))
    halves = torch.randint(0, 2, (experts,), generator=draw, device=device)  # [E]
    return nvfp4.Nvfp4(packed, scales, typical * 0.5 ** halves.float())


def _draw_block_scales(size: tuple[int, ...], draw: torch.Generator, device: str) -> torch.Tensor:
    codes = torch.randint(*_SCALE_CODES, size, generator=draw, device=device, dtype=torch.uint8)
    scales: torch.Tensor = codes.view(torch.float8_e4m3fn)
    return scales


def _draw_fp8(size: tuple[int, int, int], draw: torch.Generator, device: str) -> fp8.Fp8:
    values, typical = _draw_e4m3(size, draw, device)
    halves = torch.randint(0, 2, size[:1], generator=draw, device=device)  # [E]
    return fp8.Fp8(values, typical * 0.5 ** halves.float())


def _draw_fp8_block(
    size: tuple[int, int, int], draw: torch.Generator, device: str, *, parts: int = 1
) -> fp8.Fp8:
    """Return weights whose scales are powers of two.

    No block has rows of two `parts`, such as gate and up. The last block of a part may be cut.
    """
    values, typical = _draw_e4m3(size, draw, device)
    rows, columns = (-(-length // _FP8_BLOCK) for length in (size[1] // parts, size[2]))
    halves = torch.randint(0, 3, (size[0], parts * rows, columns), generator=draw, device=device)
    scale = typical * 0.5 ** halves.float()  # [E, rows of blocks, columns of blocks]
    return fp8.Fp8(values, scale, (_FP8_BLOCK, _FP8_BLOCK), parts)


def _draw_e4m3(size: tuple[int, int, int], draw: torch.Generator, device: str) -> tuple[torch.Tensor, float]:
    """Return random codes float8_e4m3fn of `size`, and the scale with which a product keeps its size."""
    values = torch.empty(size, dtype=torch.float8_e4m3fn, device=device)
    for matrix in values:  # an expert at a time, so that a large layer needs no float32 copy of itself
        matrix.copy_(torch.randn(size[1:], generator=draw, device=device) * 32)
    return values, 2.0 ** round(math.log2(1 / (32 * size[2] ** 0.5)))


def _draw_bf16(size: tuple[int, int, int], draw: torch.Generator, device: str) -> torch.Tensor:
    weight = torch.empty(size, dtype=torch.bfloat16, device=device)
    for matrix in weight:
        matrix.copy_(torch.randn(size[1:], generator=draw, device=device) / size[2] ** 0.5)
    return weight
