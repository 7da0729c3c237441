"""Computes a recorded call in float32, rightly or with known mistakes in some of its steps.

Steps that deviations share are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.nn import functional

from moedoctor.bench.moe.controls import linear_for_swizzled, swizzled_for_linear
from moedoctor.diagnose.capsule.mistakes import RIGHT, Deviation, Mistake
from moedoctor.fixes.moe.weight_layout import up_first
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import Weight, activate, expert_weight
from moedoctor.reference.moe_layer import Problem, quantiser
from moedoctor.reference.nvfp4 import Nvfp4

_LIMIT = 7.0
"""The limit of SwiGLU in gpt-oss."""
_CURVES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "activation_is_silu": functional.silu,
    "activation_is_gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "activation_is_relu": functional.relu,
    "activation_missing": lambda values: values,
}


@dataclass
class Computation:
    """One recorded call."""

    problem: Problem
    """The layer holds E experts; an id is the place of an expert among them, or -1."""
    activations: str = "none"
    """How the backend quantizes activations: ``nvfp4``, ``fp8`` or ``none``."""
    half_scales: torch.Tensor | None = None
    """float32 [E, 2]: factors of the gate and up rows of w13 beside its global scale; None if they are 1."""
    neighbours: torch.Tensor | None = None
    """[E]: the place of the expert with the next id, -1 if it is not held; None if all experts are held."""
    last: int | None = None
    """The place of the layer's last expert; None if it is not held."""
    _ups: dict[Deviation, torch.Tensor] = field(default_factory=dict)
    _outs: dict[Deviation, torch.Tensor] = field(default_factory=dict)

    def applies(self, mistake: Mistake) -> bool:
        """Return whether this call can show the mistake at all."""
        layer, name = self.problem.layer, mistake.name
        ids = self.problem.topk_ids
        scaled, blocked = layer.quantization != "bf16", layer.quantization == "nvfp4"
        conditions: Mapping[str, Callable[[], bool]] = {
            "gate_up_swapped": lambda: layer.shape.gated,
            "gate_up_interleaved": lambda: layer.shape.gated,
            "global_scale_inverted": lambda: scaled,
            "global_scale_missing": lambda: scaled,
            "w1_w3_scales_exchanged": self._halves_differ,
            "w1_scale_for_w3": self._halves_differ,
            "linear_for_swizzled": lambda: blocked,
            "swizzled_for_linear": lambda: blocked,
            "group_size_doubled": lambda: blocked or _columns_of_blocks(layer.w13) > 1,
            "block_scales_transposed": lambda: _columns_of_blocks(layer.w13) > 1,
            "nibbles_swapped": lambda: blocked,
            "activations_not_quantized": lambda: self.activations != "none",
            "activation_scale_twice": lambda: self.activations in ("fp8", "nvfp4"),
            "activations_quantized_twice": lambda: self.activations in ("fp8", "nvfp4"),
            "activation_is_silu": lambda: layer.shape.activation != "silu",
            "activation_is_gelu_tanh": lambda: layer.shape.activation != "gelu_tanh",
            "expert_off_by_one": lambda: layer.shape.experts > 1,
            "duplicate_summed_once": lambda: bool(_repeated(ids).any()),
            "sentinel_as_last_expert": lambda: self.last is not None and bool((ids < 0).any()),
        }
        return conditions.get(name, lambda: True)()

    def contributions(self, deviation: Deviation = ()) -> torch.Tensor:
        """Return float32 [T, K, H]: what each expert adds to its token's output."""
        wrong = dict(deviation)
        ids, weights = self.problem.topk_ids, self.problem.topk_weights.float()  # [T, K] each
        ids, weights = self._routed(wrong.get("sum", RIGHT), ids, weights)
        out = self._out(tuple(part for part in deviation if part[0] != "sum"), ids)  # [T, K, H]
        return out * weights[..., None]

    def part(self, tokens: Sequence[int]) -> Computation:
        """Return the call of some of its tokens."""
        rows, problem = torch.tensor(list(tokens)), self.problem
        chosen = replace(
            problem,
            x=problem.x[rows],
            topk_weights=problem.topk_weights[rows],
            topk_ids=problem.topk_ids[rows],
        )
        return replace(self, problem=chosen, _ups={}, _outs={})

    def with_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, K, H]: the right computation with other experts [T, K]."""
        return self._out((), ids) * self.problem.topk_weights.float()[..., None]

    def with_scale(self, step: str, factor: float, pairs: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, K, H]: what `pairs` [T, K] add if a global scale is `factor` times as large.

        `step` is ``w13`` or ``w2``. Other pairs are zero.
        """
        ids = torch.where(pairs, self.problem.topk_ids, -1)  # [T, K]
        weights = self.problem.topk_weights.float()[..., None]  # [T, K, 1]
        if step == "w2":
            return self._out((), ids) * weights * factor
        middle = self._activated(self._up(RIGHT, RIGHT, ids) * factor, RIGHT)  # [T, K, I]
        middle = self._quantized(middle, RIGHT, self.problem.layer.intermediate_scale)
        return self._product(middle, "w2", RIGHT, ids) * weights

    def _halves_differ(self) -> bool:
        w13, halves = self.problem.layer.w13, self.half_scales
        if isinstance(w13, Fp8) and w13.halves == 2:
            gate, up = w13.scale.chunk(2, dim=1)  # [E, R / 2, C] each
            return not torch.equal(gate, up)
        return halves is not None and bool((halves[:, 0] != halves[:, 1]).any())

    # --- The steps ----------------------------------------------------------------------------------------

    def _routed(
        self, option: str, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and weights [T, K] that a sum with this mistake uses."""
        if option == "expert_dropped":
            return ids, torch.zeros_like(weights)
        if option == "expert_off_by_one":
            experts = self.problem.layer.shape.experts
            following = torch.arange(1, experts + 1) % experts if self.neighbours is None else self.neighbours
            moved = following.to(ids)[ids.long().clamp(min=0)]  # [T, K]
            return torch.where(ids < 0, ids, torch.where(moved < 0, ids, moved)), weights
        if option == "duplicate_summed_once":
            return ids, weights.masked_fill(_repeated(ids), 0.0)
        if option == "sentinel_as_last_expert":
            return torch.where(ids < 0, -1 if self.last is None else self.last, ids), weights
        if option == "weights_not_applied":
            return ids, torch.ones_like(weights)
        if option == "weights_applied_twice":
            return ids, weights.square()
        return ids, weights

    def _out(self, deviation: Deviation, ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, K, H]: the experts' outputs before they are weighted; zeros for an id of -1."""
        key = (*deviation, ("ids", str(hash(ids.numpy(force=True).tobytes()))))
        if key not in self._outs:
            wrong, layer = dict(deviation), self.problem.layer
            up = self._up(wrong.get("input", RIGHT), wrong.get("w13", RIGHT), ids)  # [T, K, N]
            middle = self._activated(up, wrong.get("activation", RIGHT))  # [T, K, I]
            middle = self._quantized(middle, wrong.get("middle", RIGHT), layer.intermediate_scale)
            self._outs[key] = self._product(middle, "w2", wrong.get("w2", RIGHT), ids)
        return self._outs[key]

    def _up(self, entering: str, w13: str, ids: torch.Tensor) -> torch.Tensor:
        key = (("input", entering), ("w13", w13), ("ids", str(hash(ids.numpy(force=True).tobytes()))))
        if key not in self._ups:
            x = self._quantized(self.problem.x.float(), entering, self.problem.layer.input_scale)  # [T, H]
            wide = x[:, None].expand(-1, ids.shape[1], -1)  # [T, K, H]
            self._ups[key] = self._product(wide, "w13", w13, ids)
        return self._ups[key]

    def _product(self, x: torch.Tensor, name: str, option: str, ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, K, N] of `x` [T, K, M]."""
        layer = self.problem.layer
        weight = _changed(layer.w13 if name == "w13" else layer.w2, option, layer.shape.gated)
        result = x.new_zeros((*x.shape[:2], layer.shape.w13_rows if name == "w13" else layer.shape.hidden))
        for expert in ids[ids >= 0].unique().tolist():
            matrix = expert_weight(weight, expert)  # [N, M]
            if name == "w13" and self.half_scales is not None:
                matrix = matrix * self._row_factors(expert, option)[:, None]
            result[ids == expert] = x[ids == expert] @ matrix.T
        return result

    def _row_factors(self, expert: int, option: str) -> torch.Tensor:
        """Return float32 [2I]: the factor of each row of w13."""
        assert self.half_scales is not None
        gate, up = self.half_scales[expert]
        if option == "w1_w3_scales_exchanged":
            gate, up = up, gate
        if option == "w1_scale_for_w3":
            up = gate
        if option == "gate_up_swapped":
            gate, up = up, gate  # the rows take their scales with them
        return torch.stack((gate, up)).repeat_interleave(self.problem.layer.shape.intermediate)

    def _activated(self, up: torch.Tensor, option: str) -> torch.Tensor:
        right = self.problem.layer.shape.activation
        if self.activations != "none":
            up = up.bfloat16().float()  # such backends activate in bfloat16
        if option in _CURVES:
            if right == "relu2":
                return _CURVES[option](up)
            gate, value = up.chunk(2, dim=-1)  # [T, K, I] each
            return _CURVES[option](gate) * value
        if option == "activation_clamped":
            if right == "relu2":
                return functional.relu(up).clamp(max=_LIMIT).square()
            gate, value = up.chunk(2, dim=-1)  # [T, K, I] each
            limited = torch.cat((gate.clamp(max=_LIMIT), value.clamp(-_LIMIT, _LIMIT)), dim=-1)  # [T, K, 2I]
            return activate(limited, right)
        return activate(up, right)

    def _quantized(self, values: torch.Tensor, option: str, scale: float) -> torch.Tensor:
        quantise = quantiser(self.activations, scale)
        if quantise is None or option == "activations_not_quantized":
            return values
        rounded: torch.Tensor = quantise(values.flatten(0, -2).bfloat16().float()).unflatten(
            0, values.shape[:-1]
        )
        if option == "activations_quantized_twice":
            again: torch.Tensor = quantise((rounded / scale).flatten(0, -2)).unflatten(0, values.shape[:-1])
            return again
        return rounded * scale if option == "activation_scale_twice" else rounded


def _changed(weight: Weight, option: str, gated: bool) -> Weight:
    """Return the weight that a kernel with this mistake computes with."""
    if option == "gate_up_swapped":
        return up_first(weight)
    if option == "gate_up_interleaved":
        return _rows(weight, lambda rows: torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1))
    if option == "halves_transposed":
        return _columns_exchanged(weight)
    if option == "global_scale_inverted":
        return _scaled(weight, lambda scale: 1 / scale)
    if option == "global_scale_missing":
        return _scaled(weight, torch.ones_like)
    if isinstance(weight, Fp8) and weight.block is not None:
        return replace(weight, scale=_block_scales(weight.scale, option))
    if isinstance(weight, Nvfp4):
        if option == "linear_for_swizzled":
            return replace(weight, block_scales=linear_for_swizzled(weight.block_scales))
        if option == "swizzled_for_linear":
            return replace(weight, block_scales=swizzled_for_linear(weight.block_scales))
        if option == "group_size_doubled":
            scales = weight.block_scales.view(torch.uint8)  # [E, N, K/16]
            doubled = scales.repeat_interleave(2, dim=2)[..., : scales.shape[2]]  # [E, N, K/16]
            return replace(weight, block_scales=doubled.contiguous().view(torch.float8_e4m3fn))
        if option == "nibbles_swapped":
            return replace(weight, packed=weight.packed >> 4 | weight.packed << 4)
    return weight


def _block_scales(scale: torch.Tensor, option: str) -> torch.Tensor:
    """Return the scales [E, R, C] of FP8 blocks as a kernel with this mistake has them, the gate's first."""
    gate, up = scale.chunk(2, dim=1) if scale.shape[1] > 1 else (scale, scale)  # [E, R / 2, C] each
    if option == "w1_w3_scales_exchanged":
        return torch.cat((up, gate), dim=1)
    if option == "w1_scale_for_w3":
        return torch.cat((gate, gate), dim=1)
    if option == "group_size_doubled":
        return scale.repeat_interleave(2, dim=2)[..., : scale.shape[2]]
    if option == "block_scales_transposed":
        return scale.transpose(1, 2).reshape(scale.shape)
    return scale


def _rows(weight: Weight, move: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """Move the rows of a weight, values and block scales together."""
    if isinstance(weight, Nvfp4):
        scales = move(weight.block_scales.view(torch.uint8)).view(torch.float8_e4m3fn)
        return replace(weight, packed=move(weight.packed), block_scales=scales)
    if isinstance(weight, Fp8):
        return replace(weight, values=move(weight.values.view(torch.uint8)).view(weight.values.dtype))
    return move(weight)


def _columns_exchanged(weight: Weight) -> Weight:
    """Exchange the halves of the columns; a half must be whole blocks."""

    def exchanged(tensor: torch.Tensor) -> torch.Tensor:
        half = tensor.shape[2] // 2
        return torch.cat((tensor[..., half:], tensor[..., :half]), dim=2)

    return _rows(weight, exchanged)


def _scaled(weight: Weight, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    if isinstance(weight, Nvfp4):
        return replace(weight, global_scale=change(weight.global_scale))
    if isinstance(weight, Fp8):
        return replace(weight, scale=change(weight.scale))
    return weight


def _columns_of_blocks(weight: Weight) -> int:
    """Return how many blocks of FP8 values are beside each other; 0 if the weight has no blocks."""
    return int(weight.scale.shape[2]) if isinstance(weight, Fp8) and weight.block is not None else 0


def _repeated(ids: torch.Tensor) -> torch.Tensor:
    """Return bool [T, K]: whether the id was already among the token's ids before it."""
    same = ids[:, :, None] == ids[:, None, :]  # [T, K, K]
    before = torch.ones_like(same[0]).tril(-1)  # [K, K]
    return (same & before).any(2) & (ids >= 0)  # [T, K]
