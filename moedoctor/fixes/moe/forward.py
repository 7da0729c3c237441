"""A MoE layer over the slots of an expert cache, in one call or one group of experts after another.

On a GPU there are two ways, both Triton kernels. With few tokens each pair reads the weights of its expert,
in float32 arithmetic. With more, pairs are sorted by slot and multiplied in tiles, with `x`'s own type
between the products. On a CPU the float32 reference computes. All of them skip slot -1, add up in float32
into a buffer of the caller's, and use no shared workspace.

An id or slot below -1, or from the number of experts or slots on, is skipped on a GPU as -1 is: nothing is
read for it, and the host does not wait to see it. On a CPU it raises ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from moedoctor.fixes.cache.engine import check_range
from moedoctor.kernels.device_guard import interprets
from moedoctor.reference import moe as reference

if TYPE_CHECKING:
    from moedoctor.kernels.moe.launch import Rows

ACTIVATIONS = reference.ACTIVATIONS
"""Gated SiLU and GELU (exact, and by tanh), and squared ReLU without a gate."""
_MOST_DECODE_PAIRS = 256
"""With more pairs than this, the pairs of one expert share its weights."""


def moe_forward(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    slot_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the experts' outputs, weighted by `topk_weights`, to `out`, and return it.

    `x` [T, H]; `slot_ids` int32 or int64 [T, K], rows of `weights`, -1 for none (others: see the module);
    `topk_weights` [T, K] floating; `out` float32 [T, H], zeros if None.
    `weights`: ``w13`` [slots, 2 * I, H], gate above up, or for ``relu2`` [slots, I, H]; ``w2`` [slots, H, I];
    bfloat16, float16, float32, or float8_e4m3fn with ``w13_scale`` and ``w2_scale`` float32 [slots];
    ``w13_bias`` [slots, 2 * I] or [slots, I] and ``w2_bias`` [slots, H] if the model has them. Raises
    ValueError that names the argument.
    """
    _check(x, weights, slot_ids, topk_weights, activation, out)
    if _is_on_host(x):
        check_range(slot_ids, weights["w2"].shape[0], "slot_ids")
        layer = reference.MoeWeights.from_tensors(weights, activation)
        total = reference.forward(x, layer, topk_weights, slot_ids)
        return total if out is None else out.add_(total)
    from moedoctor.kernels.moe.launch import launch_decode, launch_many

    adds = out is not None
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)  # [T, H]
    if x.shape[0] and slot_ids.shape[1]:
        launch = launch_many if slot_ids.numel() > _MOST_DECODE_PAIRS else launch_decode
        launch(
            x.contiguous(),
            weights,
            slot_ids.contiguous(),
            topk_weights.contiguous(),
            out,
            activation=activation,
            adds=adds,
        )
    elif not adds:
        out.zero_()
    return out


class GroupedForward:
    """One call of a layer whose experts come in groups: `add` each group, then take the `sum`.

    A call of `moe_forward` a group sorts the pairs and adds to the output once a group. Here each group
    writes the products of its own experts, and the sum over a token's experts is taken at the end, in the
    order of its ids. With many tokens the result equals that of one call with all experts, bit by bit.
    """

    def __init__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        *,
        activation: str = "silu",
    ) -> None:
        """`x` [T, H]; `ids` int32 or int64 [T, K], experts, -1 for none; `topk_weights` [T, K] floating.

        Raises ValueError for an id out of range on a CPU; on a GPU its pair is skipped.
        """
        if _is_on_host(ids):
            check_range(ids, num_experts)
        self._x, self._ids, self._topk_weights = x.contiguous(), ids.contiguous(), topk_weights.contiguous()
        self._num_experts, self._activation = num_experts, activation
        self._tiles = ids.numel() > _MOST_DECODE_PAIRS and (x.is_cuda or interprets())
        self._rows: Rows | None = None
        self._out: torch.Tensor | None = None

    def add(self, weights: Mapping[str, torch.Tensor], experts: torch.Tensor | None) -> None:
        """Compute one group: `weights` [slots, ...] as `moe_forward` takes them, and the expert in each slot.

        `experts` int32 [slots], -1 for a slot that is not of this group. Every expert that the ids name must
        be in one group. Raises ValueError that names the argument, also for None, and for an expert out of
        range on a CPU; on a GPU its slot is left out.
        """
        _check_weights(weights, self._x.shape[1], self._activation)
        slots = weights["w2"].shape[0]
        if experts is None:
            raise ValueError("experts is None: the call is one group of a cache, which moe_forward computes")
        if experts.shape != (slots,) or experts.dtype != torch.int32:
            raise ValueError(f"experts must be int32 [{slots}], got {experts.dtype} {tuple(experts.shape)}")
        if _is_on_host(experts):
            check_range(experts, self._num_experts, "experts")
        if not self._tiles:
            slot_ids = self._find_slots(experts)  # [T, K]
            self._out = moe_forward(
                self._x, weights, slot_ids, self._topk_weights, activation=self._activation, out=self._out
            )
            return
        from moedoctor.kernels.moe.launch import launch_products

        rows = self._sort_rows(weights["w2"].shape[2])
        launch_products(rows, weights, experts.contiguous(), activation=self._activation)

    def sum(self) -> torch.Tensor:
        """Return float32 [T, H]: the sum over all groups; zeros if there was no group."""
        if self._rows is None:
            return torch.zeros_like(self._x, dtype=torch.float32) if self._out is None else self._out
        from moedoctor.kernels.moe.launch import launch_sum

        out = torch.empty_like(self._x, dtype=torch.float32)  # [T, H]
        launch_sum(self._rows, self._topk_weights, out, adds=False)
        return out

    def _sort_rows(self, intermediate_size: int) -> Rows:
        from moedoctor.kernels.moe.launch import Rows

        if self._rows is None:
            self._rows = Rows.sort(self._x, self._ids, self._num_experts, intermediate_size)
        width = self._rows.h.shape[1]
        if width != intermediate_size:
            raise ValueError(
                f"weights['w2'] must be as wide as the first group's, {width}, got {intermediate_size}"
            )
        return self._rows

    def _find_slots(self, experts: torch.Tensor) -> torch.Tensor:
        """Return [T, K]: the slot of each id's expert, -1 if it is in no slot. Never waits for the device.

        Ids and experts out of range get the place of -1: as an index they would end the process's use of the
        GPU.
        """
        none = self._num_experts
        slots = torch.arange(len(experts), dtype=torch.int32, device=experts.device)  # [slots]
        slot_of = slots.new_full((none + 1,), -1)  # [E + 1], the last for -1
        held = torch.where((experts >= 0) & (experts < none), experts, none)  # [slots]
        slot_of.scatter_(0, held.long(), slots)
        slot_of[none] = -1
        return slot_of[torch.where((self._ids >= 0) & (self._ids < none), self._ids, none).long()]


def group_bound(top_k: int) -> float:
    """Return how far groups may differ from one call, relative to the sum of an output element's |terms|.

    Each term is computed alike; only the order in which `top_k` float32 terms are added changes, and each of
    two orders is within (top_k - 1) * 2**-24 of the exact sum to first order (Higham, Accuracy and
    Stability of Numerical Algorithms, 4.2). With one expert a token, or with all experts of a token in
    one group, the sums are equal bit by bit.
    """
    unit = 2.0**-24
    steps = max(top_k - 1, 0) * unit
    return 2 * steps / (1 - steps)


def _is_on_host(x: torch.Tensor) -> bool:
    """Return True if torch computes with `x` on the CPU, and no kernel of ours."""
    return x.device.type == "cpu" and not interprets()


def _check_weights(weights: Mapping[str, torch.Tensor], hidden_size: int, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    missing = {"w13", "w2"} - set(weights)
    if missing:
        raise ValueError(
            f"weights lacks {', '.join(sorted(missing))}; it holds {', '.join(weights) or 'none'}"
        )
    slots, width, intermediate_size = weights["w2"].shape
    height = intermediate_size if activation == "relu2" else 2 * intermediate_size
    expected = {
        "w13": (slots, height, width),
        "w13_scale": (slots,),
        "w2_scale": (slots,),
        "w13_bias": (slots, height),
        "w2_bias": (slots, width),
    }
    for name, shape in expected.items():
        if name in weights and tuple(weights[name].shape) != shape:
            raise ValueError(f"weights[{name!r}] must be {shape} for w2, got {tuple(weights[name].shape)}")
    for name in ("w13", "w2"):
        if not weights[name].is_contiguous():
            raise ValueError(f"weights[{name!r}] must be contiguous")
        if weights[name].dtype is torch.float8_e4m3fn and f"{name}_scale" not in weights:
            raise ValueError(f"weights[{name!r}] is float8 and has no {name}_scale")
    if width != hidden_size:
        raise ValueError(f"x must be [T, {width}] for w2, got width {hidden_size}")


def _check(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    slot_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str,
    out: torch.Tensor | None,
) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must be [T, H], got {tuple(x.shape)}")
    _check_weights(weights, x.shape[1], activation)
    if slot_ids.shape != topk_weights.shape or slot_ids.dim() != 2 or slot_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"slot_ids and topk_weights must be [{x.shape[0]}, K], got {tuple(slot_ids.shape)} "
            f"and {tuple(topk_weights.shape)}"
        )
    if out is not None and (out.shape != x.shape or out.dtype != torch.float32 or not out.is_contiguous()):
        raise ValueError(
            f"out must be contiguous float32 {tuple(x.shape)}, got {out.dtype} {tuple(out.shape)}"
        )
