"""Computes a recorded call in float32, rightly or with known mistakes in some of its steps.

Steps that deviations share are computed once, and a weight that several of them use is dequantized once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from moedoctor.bench.moe.controls import read_rows_as_tiles, read_tiles_as_rows
from moedoctor.diagnose.capsule.mistakes import RIGHT, Deviation, Mistake
from moedoctor.fixes.moe.weight_layout import put_up_first
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import Weight, activate, dequantize_expert
from moedoctor.reference.moe_layer import Problem, make_quantizer
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
    problem: Problem
    """The layer holds E experts; an id is the place of an expert among them, or -1."""
    activations: str = "none"
    """The format in which the backend quantizes activations: ``nvfp4``, ``fp8`` or ``none``."""
    half_scales: torch.Tensor | None = None
    """float32 [E, 2]: factors of the gate and up rows of w13 beside its global scale; None if they are 1."""
    neighbors: torch.Tensor | None = None
    """[E]: the place of the expert with the next id, -1 if it is not held; None if all experts are held."""
    last: int | None = None
    """The place of the layer's last expert; None if it is not held."""
    _ups: dict[_Up, torch.Tensor] = field(default_factory=dict)
    _outs: dict[_Out, torch.Tensor] = field(default_factory=dict)

    def applies(self, mistake: Mistake) -> bool:
        """Return True if this call can show the mistake at all."""
        layer, ids = self.problem.layer, self.problem.topk_ids
        properties: Mapping[str, Callable[[], bool]] = {
            "gated": lambda: layer.shape.gated,
            "scaled": lambda: layer.quantization != "bf16",
            "nvfp4": lambda: layer.quantization == "nvfp4",
            "two scales": self._has_different_halves,
            "groups": lambda: layer.quantization == "nvfp4" or _count_block_columns(layer.w13) > 1,
            "columns": lambda: _count_block_columns(layer.w13) > 1,
            "quantized": lambda: self.activations != "none",
            "scaled input": lambda: self.activations in ("fp8", "nvfp4"),
            "other than silu": lambda: layer.shape.activation != "silu",
            "other than gelu_tanh": lambda: layer.shape.activation != "gelu_tanh",
            "experts": lambda: layer.shape.experts > 1,
            "repeats": lambda: bool(find_repeats(ids).any()),
            "sentinels": lambda: self.last is not None and bool((ids < 0).any()),
        }
        return not mistake.needs or properties[mistake.needs]()

    def compute_contributions(self, deviation: Deviation = ()) -> torch.Tensor:
        """Return float32 [T, K, H]: what each expert adds to its token's output."""
        ids, weights = self._route(deviation)  # [T, K] each
        key = _Out.from_deviation(deviation, ids)
        if key not in self._outs:
            self._compute([(deviation, ids)])
        return self._outs[key] * weights[..., None]

    def prepare(self, deviations: Iterable[Deviation]) -> None:
        """Compute the experts' outputs for these deviations together, which is faster than one by one."""
        self._compute([(deviation, self._route(deviation)[0]) for deviation in deviations])

    def forget(self) -> None:
        """Free the experts' outputs that were computed until now."""
        self._outs.clear()

    def select_tokens(self, tokens: Sequence[int]) -> Computation:
        rows, problem = torch.tensor(list(tokens)), self.problem
        chosen = replace(
            problem,
            x=problem.x[rows],
            topk_weights=problem.topk_weights[rows],
            topk_ids=problem.topk_ids[rows],
        )
        return replace(self, problem=chosen, _ups={}, _outs={})

    def compute_with_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, K, H]: the right computation with other experts [T, K]; zeros for an id of -1.

        Nothing of it is kept.
        """
        (up,) = self._multiply([self._prepare_input(RIGHT)], "w13", RIGHT, ids)  # [T, K, N]
        (out,) = self._multiply([self._activate_and_quantize(up)], "w2", RIGHT, ids)  # [T, K, H]
        return out * self.problem.topk_weights.float()[..., None]

    def compute_with_values(
        self, step: str, values: Sequence[float], pairs: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return float32 [T, K, H] for each value: what `pairs` [T, K] add if a step has this value.

        ``w13`` and ``w2``: their scale is that many times as large. ``activation``: it is clamped there.
        Other pairs are zero.
        """
        ids = torch.where(pairs, self.problem.topk_ids, -1)  # [T, K]
        if step == "w2":
            right = self.compute_with_ids(ids)  # [T, K, H]
            return [right * factor for factor in values]
        (up,) = self._multiply([self._prepare_input(RIGHT)], "w13", RIGHT, ids)  # [T, K, N]
        if step == "w13":
            middles = [self._activate_and_quantize(up * factor) for factor in values]  # [T, K, I] each
        else:
            middles = [self._activate_and_quantize(up, "activation_clamped", limit=limit) for limit in values]
        weights = self.problem.topk_weights.float()[..., None]  # [T, K, 1]
        return [out * weights for out in self._multiply(middles, "w2", RIGHT, ids)]

    def _has_different_halves(self) -> bool:
        w13, halves = self.problem.layer.w13, self.half_scales
        if isinstance(w13, Fp8) and w13.halves == 2:
            gate, up = w13.scale.chunk(2, dim=1)  # [E, R / 2, C] each
            return not torch.equal(gate, up)
        return halves is not None and bool((halves[:, 0] != halves[:, 1]).any())

    # --- The steps ----------------------------------------------------------------------------------------

    def _route(self, deviation: Deviation) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and weights [T, K] that a sum with this mistake uses."""
        option = dict(deviation).get("sum", RIGHT)
        ids, weights = self.problem.topk_ids, self.problem.topk_weights.float()  # [T, K] each
        if option == "expert_dropped":
            return ids, torch.zeros_like(weights)
        if option == "expert_off_by_one":
            experts = self.problem.layer.shape.experts
            following = torch.arange(1, experts + 1) % experts if self.neighbors is None else self.neighbors
            moved = following.to(ids)[ids.long().clamp(min=0)]  # [T, K]
            return torch.where(ids < 0, ids, torch.where(moved < 0, ids, moved)), weights
        if option == "duplicate_summed_once":
            return ids, weights.masked_fill(find_repeats(ids), 0.0)
        if option == "sentinel_as_last_expert":
            return torch.where(ids < 0, -1 if self.last is None else self.last, ids), weights
        if option == "weights_not_applied":
            return ids, torch.ones_like(weights)
        if option == "weights_applied_twice":
            return ids, weights.square()
        return ids, weights

    def _compute(self, calls: Iterable[tuple[Deviation, torch.Tensor]]) -> None:
        """Compute the experts' outputs for each deviation and its ids [T, K]."""
        routes: dict[bytes, torch.Tensor] = {}
        ups: dict[tuple[str, bytes], dict[str, None]] = {}
        outs: dict[tuple[str, bytes], dict[_Out, None]] = {}
        for deviation, ids in calls:
            out = _Out.from_deviation(deviation, ids)
            if out in self._outs:
                continue
            routes[out.up.ids] = ids
            outs.setdefault((out.w2, out.up.ids), {})[out] = None
            if out.up not in self._ups:
                ups.setdefault((out.up.w13, out.up.ids), {})[out.up.entering] = None
        for (option, route), entering in ups.items():
            products = self._multiply(map(self._prepare_input, entering), "w13", option, routes[route])
            self._ups |= {_Up(each, option, route): up for each, up in zip(entering, products, strict=True)}
        for (option, route), wanted in outs.items():
            middles = [
                self._activate_and_quantize(self._ups[out.up], out.activation, out.middle) for out in wanted
            ]
            self._outs |= zip(wanted, self._multiply(middles, "w2", option, routes[route]), strict=True)

    def _prepare_input(self, option: str) -> torch.Tensor:
        """Return float32 [T, K, H]: the input of each pair."""
        x = self._quantize(self.problem.x.float(), option, self.problem.layer.input_scale)  # [T, H]
        return x[:, None].expand(-1, self.problem.topk_ids.shape[1], -1)

    def _activate_and_quantize(
        self, up: torch.Tensor, activation: str = RIGHT, middle: str = RIGHT, limit: float = _LIMIT
    ) -> torch.Tensor:
        """Return float32 [T, K, I] of the first product [T, K, N]: activated, and quantized again."""
        activated = self._activate(up, activation, limit)  # [T, K, I]
        return self._quantize(activated, middle, self.problem.layer.intermediate_scale)

    def _multiply(
        self, inputs: Iterable[torch.Tensor], name: str, option: str, ids: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return float32 [T, K, N] of each of the inputs [T, K, M], by the weight of its pair's expert."""
        inputs, layer = list(inputs), self.problem.layer
        weight, columns = (
            (layer.w13, layer.shape.w13_rows) if name == "w13" else (layer.w2, layer.shape.hidden)
        )
        results = [each.new_zeros((*each.shape[:2], columns)) for each in inputs]
        for expert in ids[ids >= 0].unique().tolist():
            matrix = dequantize_expert(
                _change(_select_expert(weight, expert), option, layer.shape.gated), 0
            )  # [N, M]
            if name == "w13" and self.half_scales is not None:
                matrix = matrix * self._expand_row_factors(expert, option)[:, None]
            here = ids == expert  # [T, K]
            rows = torch.cat([each[here] for each in inputs]) @ matrix.T  # [B * n, N]
            for result, part in zip(results, rows.split(int(here.sum())), strict=True):
                result[here] = part
        return results

    def _expand_row_factors(self, expert: int, option: str) -> torch.Tensor:
        """Return float32 [2I]: the factor of each row of w13."""
        assert self.half_scales is not None
        gate, up = self.half_scales[expert]
        if option in ("w1_w3_scales_exchanged", "gate_up_swapped"):
            gate, up = up, gate  # swapped rows take their scales with them
        if option == "w1_scale_for_w3":
            up = gate
        return torch.stack((gate, up)).repeat_interleave(self.problem.layer.shape.intermediate)

    def _activate(self, up: torch.Tensor, option: str, limit: float) -> torch.Tensor:
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
                return functional.relu(up).clamp(max=limit).square()
            gate, value = up.chunk(2, dim=-1)  # [T, K, I] each
            limited = torch.cat((gate.clamp(max=limit), value.clamp(-limit, limit)), dim=-1)  # [T, K, 2I]
            return activate(limited, right)
        return activate(up, right)

    def _quantize(self, values: torch.Tensor, option: str, scale: float) -> torch.Tensor:
        quantize = make_quantizer(self.activations, scale)
        if quantize is None or option == "activations_not_quantized":
            return values
        rounded: torch.Tensor = quantize(values.flatten(0, -2).bfloat16().float()).unflatten(
            0, values.shape[:-1]
        )
        if option == "activations_quantized_twice":
            again: torch.Tensor = quantize((rounded / scale).flatten(0, -2)).unflatten(0, values.shape[:-1])
            return again
        return rounded * scale if option == "activation_scale_twice" else rounded


class _Up(NamedTuple):
    """The inputs of a first product."""

    entering: str
    """Options of the steps, ``input`` and ``w13``."""
    w13: str
    ids: bytes
    """The experts [T, K]."""


class _Out(NamedTuple):
    """The inputs of a second product: the options of all steps but the sum, and the experts."""

    up: _Up
    activation: str
    middle: str
    w2: str

    @classmethod
    def from_deviation(cls, deviation: Deviation, ids: torch.Tensor) -> _Out:
        wrong = dict(deviation)
        options = (wrong.get(step, RIGHT) for step in ("activation", "middle", "w2"))
        experts = bytes(ids.int().numpy(force=True).tobytes())
        return cls(_Up(wrong.get("input", RIGHT), wrong.get("w13", RIGHT), experts), *options)


def _select_expert(weight: Weight, expert: int) -> Weight:
    """Return a stack of one: the weight of this expert."""
    here = slice(expert, expert + 1)
    if isinstance(weight, Nvfp4):
        return Nvfp4(weight.packed[here], weight.block_scales[here], weight.global_scale[here])
    if isinstance(weight, Fp8):
        return replace(weight, values=weight.values[here], scale=weight.scale[here])
    return weight[here]


def _change(weight: Weight, option: str, gated: bool) -> Weight:
    """Return the weight that a kernel with this mistake computes with."""
    if option == "gate_up_swapped":
        return put_up_first(weight)
    if option == "gate_up_interleaved":
        return _move_rows(weight, lambda rows: torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1))
    if option == "halves_transposed":
        # A half must be whole blocks.
        return _move_rows(weight, lambda rows: rows.roll(-(rows.shape[2] // 2), dims=2))
    if option == "global_scale_inverted":
        return _scale(weight, lambda scale: 1 / scale)
    if option == "global_scale_missing":
        return _scale(weight, torch.ones_like)
    if isinstance(weight, Fp8) and weight.block is not None:
        return replace(weight, scale=_change_block_scales(weight.scale, option))
    if isinstance(weight, Nvfp4):
        if option == "linear_for_swizzled":
            return replace(weight, block_scales=read_rows_as_tiles(weight.block_scales))
        if option == "swizzled_for_linear":
            return replace(weight, block_scales=read_tiles_as_rows(weight.block_scales))
        if option == "group_size_doubled":
            scales = weight.block_scales.view(torch.uint8)  # [E, N, K/16]
            doubled = scales.repeat_interleave(2, dim=2)[..., : scales.shape[2]]  # [E, N, K/16]
            return replace(weight, block_scales=doubled.contiguous().view(torch.float8_e4m3fn))
        if option == "nibbles_swapped":
            return replace(weight, packed=weight.packed >> 4 | weight.packed << 4)
    return weight


def _change_block_scales(scale: torch.Tensor, option: str) -> torch.Tensor:
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


def _move_rows(weight: Weight, move: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """Move rows or columns of a weight, values and block scales together."""
    if isinstance(weight, Nvfp4):
        scales = move(weight.block_scales.view(torch.uint8)).view(torch.float8_e4m3fn)
        return replace(weight, packed=move(weight.packed), block_scales=scales)
    if isinstance(weight, Fp8):
        return replace(weight, values=move(weight.values.view(torch.uint8)).view(weight.values.dtype))
    return move(weight)


def _scale(weight: Weight, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    if isinstance(weight, Nvfp4):
        return replace(weight, global_scale=change(weight.global_scale))
    if isinstance(weight, Fp8):
        return replace(weight, scale=change(weight.scale))
    return weight


def _count_block_columns(weight: Weight) -> int:
    """Return how many blocks of FP8 values are beside each other; 0 if the weight has no blocks."""
    return int(weight.scale.shape[2]) if isinstance(weight, Fp8) and weight.block is not None else 0


def find_repeats(ids: torch.Tensor) -> torch.Tensor:
    """Return bool [T, K]: True if the id was already among the token's ids before it."""
    same = ids[:, :, None] == ids[:, None, :]  # [T, K, K]
    before = torch.ones_like(same[0]).tril(-1)  # [K, K]
    return (same & before).any(2) & (ids >= 0)  # [T, K]
