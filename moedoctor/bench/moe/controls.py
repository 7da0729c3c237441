"""Negative controls: faults that are put in on purpose, each of which a harness must notice.

Some change what a backend gets, so that the backend itself computes the wrong result. Others change its
output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from moedoctor.fixes.moe.weight_layout import flatten_scales, pad_shape, put_up_first, tile_scales
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import Weight
from moedoctor.reference.moe_layer import Layer, Problem, compute_expected
from moedoctor.reference.nvfp4 import Nvfp4


@dataclass(frozen=True)
class Control:
    """One fault, in one of three places."""

    name: str
    on_weights: Callable[[Layer], Weight] | None = None
    """Makes the weight that the backend gets in place of the layer's w13."""
    on_routes: Callable[[Problem], Problem] | None = None
    """Makes the problem that the backend is called with instead; the layer is the same."""
    on_output: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes the wrong output of the right one."""
    applies: Callable[[Layer], bool] = lambda layer: True
    """Returns True if the fault changes anything in this layer."""


def list_controls() -> tuple[Control, ...]:
    """Return every control, in the order of reports."""
    return (
        Control("swapped_gate_up", on_weights=lambda layer: put_up_first(layer.w13), applies=_is_gated),
        Control("inverted_global_scale", on_weights=_invert_scale, applies=_has_scale),
        Control("swizzled_for_linear", on_weights=_change_scales(read_tiles_as_rows), applies=_is_nvfp4),
        Control("linear_for_swizzled", on_weights=_change_scales(read_rows_as_tiles), applies=_is_nvfp4),
        Control("shifted_block_scales", on_weights=_shift_scales, applies=_has_blocks),
        Control(
            "mismatched_global_scale",
            on_weights=_break_up_scale,
            applies=lambda layer: _is_gated(layer) and _has_scale(layer),
        ),
        Control("dropped_expert", on_routes=_drop_expert),
        Control(
            "off_by_one_expert", on_routes=_route_to_neighbor, applies=lambda layer: layer.shape.experts > 1
        ),
        Control("stale_row", on_output=_keep_stale_row),
        Control("half_output", on_output=lambda output: output * 0.5),
        Control("zero_output", on_output=torch.zeros_like),
        Control("nan_row", on_output=_put_nan),
    )


def list_wrong_problems(problem: Problem, *, weights: bool = True) -> Iterator[tuple[str, Problem]]:
    """Yield (control name, what the backend gets) for the controls that apply to this layer, one at a time.

    Controls in weights copy the layer's w13; `weights=False` leaves them out.
    """
    for control in list_controls():
        if not control.applies(problem.layer):
            continue
        if control.on_weights is not None and weights:
            layer = replace(problem.layer, w13=control.on_weights(problem.layer))
            yield control.name, replace(problem, layer=layer)
        elif control.on_routes is not None:
            yield control.name, control.on_routes(problem)


def _is_gated(layer: Layer) -> bool:
    return layer.shape.activation != "relu2"


def _has_scale(layer: Layer) -> bool:
    return layer.quantization != "bf16"


def _is_nvfp4(layer: Layer) -> bool:
    return layer.quantization == "nvfp4"


def _has_blocks(layer: Layer) -> bool:
    return isinstance(layer.w13, Fp8) and layer.w13.block is not None


def _invert_scale(layer: Layer) -> Weight:
    w13 = layer.w13
    if isinstance(w13, Fp8):
        return replace(w13, scale=1 / w13.scale)
    assert isinstance(w13, Nvfp4)
    return replace(w13, global_scale=1 / w13.global_scale)


def _shift_scales(layer: Layer) -> Weight:
    """Give each block of weights the scale of the block before it."""
    assert isinstance(layer.w13, Fp8)
    scale = layer.w13.scale  # [E, rows of blocks, columns of blocks]
    return replace(layer.w13, scale=scale.flatten(1).roll(1, 1).view_as(scale))


def read_tiles_as_rows(block_scales: torch.Tensor) -> torch.Tensor:
    """Return what a reader of rows takes out of tiles that hold `block_scales` [E, M, S].

    What does not fit into the rows is cut off.
    """
    rows, columns = block_scales.shape[-2:]
    tiles = tile_scales(block_scales).view(torch.uint8).flatten(-2)  # [E, M' * S']
    if pad_shape(rows, columns) != (rows, columns):
        tiles = torch.where(tiles == 0, tiles.amax(), tiles)  # padding would show at once
    linear: torch.Tensor = tiles[:, : rows * columns].unflatten(-1, (rows, columns)).contiguous()  # [E, M, S]
    return linear.view(block_scales.dtype)


def read_rows_as_tiles(block_scales: torch.Tensor) -> torch.Tensor:
    """Return what a reader of tiles takes out of rows that hold `block_scales` [E, M, S].

    A backend that tiles the result comes back to the bytes of the rows. If tiles are larger than the rows,
    the largest scale is behind the last row. With 16 columns of scales (hidden size 256) the layouts are each
    other's inverse, and this is the same fault as `read_tiles_as_rows`.
    """
    rows, columns = block_scales.shape[-2:]
    tall, wide = pad_shape(rows, columns)
    linear = block_scales.view(torch.uint8).flatten(-2)  # [E, M * S]
    behind = linear.amax().expand(len(linear), tall * wide - rows * columns)  # [E, M' * S' - M * S]
    tiles = torch.cat((linear, behind), 1).unflatten(-1, (tall, wide))  # [E, M', S']
    return flatten_scales(tiles, rows, columns).view(block_scales.dtype)


def _change_scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Layer], Weight]:
    """Return what gives a backend w13 with changed block scales."""

    def change_layer(layer: Layer) -> Weight:
        assert isinstance(layer.w13, Nvfp4)
        return replace(layer.w13, block_scales=change(layer.w13.block_scales))

    return change_layer


def _break_up_scale(layer: Layer) -> Weight:
    """Compute the up half with the gate's scale, although its own is twice as large."""
    w13, half = layer.w13, layer.shape.intermediate
    if isinstance(w13, Fp8):
        values = w13.values.clone()  # [E, 2I, H]
        values[:, half:] = (values[:, half:].float() / 2).to(values.dtype)
        return replace(w13, values=values)
    assert isinstance(w13, Nvfp4)
    scales = w13.block_scales.clone()  # [E, 2I, H/16]
    scales[:, half:] = (scales[:, half:].float() / 2).to(scales.dtype)
    return replace(w13, block_scales=scales)


def _find_strongest(problem: Problem, token: int) -> int:
    """Return the lane of `token` whose expert adds most to its row: the effect of another may be small."""
    alone = replace(
        problem,
        x=problem.x[token].expand(problem.topk_ids.shape[1], -1),  # [K, H]
        topk_weights=problem.topk_weights[token].unsqueeze(1),  # [K, 1]
        topk_ids=problem.topk_ids[token].unsqueeze(1),  # [K, 1]
    )
    return int(compute_expected(alone, "none").norm(dim=1).argmax())


def _drop_expert(problem: Problem) -> Problem:
    """Set every token's weight for the expert that adds most to token 0 to zero."""
    expert = problem.topk_ids[0, _find_strongest(problem, 0)]
    weights = torch.where(problem.topk_ids == expert, 0.0, problem.topk_weights)  # [T, K]
    return replace(problem, topk_weights=weights)


def _route_to_neighbor(problem: Problem) -> Problem:
    """Send the last token's strongest pair to a neighboring expert, if possible to one it does not use.

    Needs two experts.
    """
    ids = problem.topk_ids.clone()  # [T, K]
    experts, used = problem.layer.shape.experts, set(ids[-1].tolist())
    lane = _find_strongest(problem, -1)
    neighbors = [(int(ids[-1, lane]) + step) % experts for step in range(1, experts)]
    ids[-1, lane] = next((expert for expert in neighbors if expert not in used), neighbors[0])
    return replace(problem, topk_ids=ids)


def _keep_stale_row(output: torch.Tensor) -> torch.Tensor:
    """Leave in the last row what another token's call wrote there."""
    stale = output.clone()
    stale[-1] = output[0] if len(output) > 1 else output[-1].roll(1)
    return stale


def _put_nan(output: torch.Tensor) -> torch.Tensor:
    broken = output.clone()
    broken[len(output) // 2, 0] = float("nan")
    return broken
