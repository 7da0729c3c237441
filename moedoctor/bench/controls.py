"""Negative controls: faults that are put in on purpose, each of which a harness must notice.

Some are put into what a backend is given, so that the backend itself computes the wrong result, others into
what it returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from moedoctor.reference.conventions import swap_gate_up, swap_halves
from moedoctor.reference.experts import Weight
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe_layer import Layer, Problem, expected_output
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.reference.swizzle import padded_shape, swizzle, unswizzle


@dataclass(frozen=True)
class Control:
    """One fault, in one of three places."""

    name: str
    on_weights: Callable[[Layer], Weight] | None = None
    """What the backend takes over in place of the layer's w13."""
    on_routes: Callable[[Problem], Problem] | None = None
    """What to call the backend with in place of the problem; the layer is the same."""
    on_output: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What to make of the right output."""
    applies: Callable[[Layer], bool] = lambda layer: True
    """Whether the fault changes anything in this layer."""


def controls() -> tuple[Control, ...]:
    """Every control, in the order of reports."""
    return (
        Control("swapped_gate_up", on_weights=_swapped, applies=_gated),
        Control("inverted_global_scale", on_weights=_inverted, applies=_scaled),
        Control("swizzled_for_linear", on_weights=_swizzled_for_linear, applies=_blocked),
        Control("linear_for_swizzled", on_weights=_linear_for_swizzled, applies=_blocked),
        Control(
            "mismatched_global_scale",
            on_weights=_mismatched,
            applies=lambda one: _gated(one) and _scaled(one),
        ),
        Control("dropped_expert", on_routes=_dropped),
        Control("off_by_one_expert", on_routes=_off_by_one, applies=lambda one: one.shape.experts > 1),
        Control("stale_row", on_output=_stale),
        Control("half_output", on_output=lambda output: output * 0.5),
        Control("zero_output", on_output=torch.zeros_like),
        Control("nan_row", on_output=_nan),
    )


def wrong_problems(problem: Problem, *, weights: bool = True) -> Iterator[tuple[str, Problem]]:
    """(control name, what the backend is given) for the controls that apply to this layer, one at a time.

    Those in weights copy the layer's w13; without `weights` they are left out.
    """
    for one in controls():
        if not one.applies(problem.layer):
            continue
        if one.on_weights is not None and weights:
            layer = replace(problem.layer, w13=one.on_weights(problem.layer))
            yield one.name, replace(problem, layer=layer)
        elif one.on_routes is not None:
            yield one.name, one.on_routes(problem)


def wrong_outputs(output: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Control name -> the output with that fault."""
    return {one.name: one.on_output(output) for one in controls() if one.on_output is not None}


def _gated(layer: Layer) -> bool:
    return layer.shape.activation != "relu2"


def _scaled(layer: Layer) -> bool:
    return layer.quantization != "bf16"


def _blocked(layer: Layer) -> bool:
    return layer.quantization == "nvfp4"


def _swapped(layer: Layer) -> Weight:
    w13 = layer.w13
    if isinstance(w13, Nvfp4):
        return swap_gate_up(w13)
    if isinstance(w13, Fp8):
        bytes_ = swap_halves(w13.values.view(torch.uint8))  # [E, 2I, H]
        return replace(w13, values=bytes_.view(w13.values.dtype))
    return swap_halves(w13)


def _inverted(layer: Layer) -> Weight:
    w13 = layer.w13
    if isinstance(w13, Fp8):
        return replace(w13, scale=1 / w13.scale)
    assert isinstance(w13, Nvfp4)
    return replace(w13, global_scale=1 / w13.global_scale)


def _swizzled_for_linear(layer: Layer) -> Weight:
    """Scales in tiles given to what reads them row by row; what does not fit into the rows is cut off."""
    w13 = layer.w13
    assert isinstance(w13, Nvfp4)
    rows, columns = w13.block_scales.shape[-2:]
    tiles = swizzle(w13.block_scales).view(torch.uint8).flatten(-2)  # [E, M' * S']
    if padded_shape(rows, columns) != (rows, columns):
        tiles = torch.where(tiles == 0, tiles.amax(), tiles)  # padding would show at once
    linear = tiles[:, : rows * columns].unflatten(-1, (rows, columns)).contiguous()  # [E, M, S]
    return replace(w13, block_scales=linear.view(w13.block_scales.dtype))


def _linear_for_swizzled(layer: Layer) -> Weight:
    """Scales row by row given to what reads them in tiles, as the linear scales that it reads in effect.

    A backend that swizzles them comes back to the bytes of the linear ones. Where tiles are larger than the
    rows, what is read behind the last row is the largest scale. With 16 columns of scales (hidden size 256)
    the layouts are each other's inverse, and this is the same fault as `_swizzled_for_linear`.
    """
    w13 = layer.w13
    assert isinstance(w13, Nvfp4)
    rows, columns = w13.block_scales.shape[-2:]
    tall, wide = padded_shape(rows, columns)
    linear = w13.block_scales.view(torch.uint8).flatten(-2)  # [E, M * S]
    behind = linear.amax().expand(len(linear), tall * wide - rows * columns)  # [E, M' * S' - M * S]
    tiles = torch.cat((linear, behind), 1).unflatten(-1, (tall, wide))  # [E, M', S']
    return replace(w13, block_scales=unswizzle(tiles, rows, columns).view(w13.block_scales.dtype))


def _mismatched(layer: Layer) -> Weight:
    """The up half computed with the gate's scale where its own is twice as large."""
    w13, half = layer.w13, layer.shape.intermediate
    if isinstance(w13, Fp8):
        values = w13.values.clone()  # [E, 2I, H]
        values[:, half:] = (values[:, half:].float() / 2).to(values.dtype)
        return replace(w13, values=values)
    assert isinstance(w13, Nvfp4)
    scales = w13.block_scales.clone()  # [E, 2I, H/16]
    scales[:, half:] = (scales[:, half:].float() / 2).to(scales.dtype)
    return replace(w13, block_scales=scales)


def _strongest(problem: Problem, token: int) -> int:
    """The slot of `token` whose expert adds most to its row. One of 22 may add too little to be missed."""
    alone = replace(
        problem,
        x=problem.x[token].expand(problem.topk_ids.shape[1], -1),  # [K, H]
        topk_weights=problem.topk_weights[token].unsqueeze(1),  # [K, 1]
        topk_ids=problem.topk_ids[token].unsqueeze(1),  # [K, 1]
    )
    return int(expected_output(alone, "none").norm(dim=1).argmax())


def _dropped(problem: Problem) -> Problem:
    """Every token's weight for the expert that adds most to token 0 is zero."""
    expert = problem.topk_ids[0, _strongest(problem, 0)]
    weights = torch.where(problem.topk_ids == expert, 0.0, problem.topk_weights)  # [T, K]
    return replace(problem, topk_weights=weights)


def _off_by_one(problem: Problem) -> Problem:
    """The last token's strongest slot goes to an expert beside its own, one it does not use if there is any.

    Needs two experts.
    """
    ids = problem.topk_ids.clone()  # [T, K]
    experts, used = problem.layer.shape.experts, set(ids[-1].tolist())
    slot = _strongest(problem, -1)
    ids[-1, slot] = next(
        (one for step in range(1, experts) if (one := (int(ids[-1, slot]) + step) % experts) not in used),
        (int(ids[-1, slot]) + 1) % experts,
    )
    return replace(problem, topk_ids=ids)


def _stale(output: torch.Tensor) -> torch.Tensor:
    """The last row still holds what another token's call left there."""
    stale = output.clone()
    stale[-1] = output[0] if len(output) > 1 else output[-1].roll(1)
    return stale


def _nan(output: torch.Tensor) -> torch.Tensor:
    broken = output.clone()
    broken[len(output) // 2, 0] = float("nan")
    return broken
