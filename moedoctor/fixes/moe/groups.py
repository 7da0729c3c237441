"""A MoE layer whose experts are resident in groups, one after another: sorted once, added up once.

A call of `moe_forward` a group sorts the tokens and adds to the output once a group. Here each group writes
the products of its own experts, and the sum over a token's experts is taken at the end, in the order of its
ids: with many tokens the result is that of one call with all experts, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from moedoctor.fixes.moe.forward import MOST_DECODE_PAIRS, check_weights, interprets, moe_forward

if TYPE_CHECKING:
    from moedoctor.kernels.moe.launch import Rows


class GroupedForward:
    """One call of a layer; `add` each group while it is resident, then take the `total`."""

    def __init__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        *,
        activation: str = "silu",
    ) -> None:
        """`x` [T, H]; `ids` int32 or int64 [T, K], experts, -1 for none; `topk_weights` [T, K] floating."""
        self._x, self._ids, self._shares = x.contiguous(), ids.contiguous(), topk_weights.contiguous()
        self._num_experts, self._activation = num_experts, activation
        self._tiles = ids.numel() > MOST_DECODE_PAIRS and (x.is_cuda or interprets())
        self._rows: Rows | None = None
        self._out: torch.Tensor | None = None

    def add(self, weights: Mapping[str, torch.Tensor], experts: torch.Tensor) -> None:
        """Compute one group: `weights` [slots, ...] as `moe_forward` takes them, and whom each slot holds.

        `experts` int32 [slots], -1 for a slot that is not of this group. Every expert that the ids name must
        be in one group. Raises ValueError that names the argument.
        """
        check_weights(weights, self._x.shape[1], self._activation)
        slots = weights["w2"].shape[0]
        if experts.shape != (slots,) or experts.dtype != torch.int32:
            raise ValueError(f"experts must be int32 [{slots}], got {experts.dtype} {tuple(experts.shape)}")
        if not self._tiles:
            slot_ids = self._slot_ids(experts)  # [T, K]
            self._out = moe_forward(
                self._x, weights, slot_ids, self._shares, activation=self._activation, out=self._out
            )
            return
        from moedoctor.kernels.moe.launch import launch_products

        rows = self._sorted(weights["w2"].shape[2])
        launch_products(rows, weights, experts.contiguous(), activation=self._activation)

    def add_resident(self, groups: Sequence[tuple[Mapping[str, torch.Tensor], torch.Tensor]]) -> None:
        """`add` each of several groups that are resident at the same time.

        `groups`: what `add` takes, each with weights of its own. Those of `ExpertCache.groups` are not: they
        come one after another into the same slots. On a GPU two streams take the groups in turn, so that one
        fills the multiprocessors that the end of another leaves idle; what the current stream does next comes
        after all of them. Raises ValueError as `add` does, after which there is no total.
        """
        if not self._tiles or not self._x.is_cuda or len(groups) < 2:
            for weights, experts in groups:
                self.add(weights, experts)
            return
        check_weights(groups[0][0], self._x.shape[1], self._activation)
        self._sorted(groups[0][0]["w2"].shape[2])
        current = torch.cuda.current_stream(self._x.device)
        beside = torch.cuda.Stream(self._x.device)
        beside.wait_stream(current)
        try:
            for index, (weights, experts) in enumerate(groups):
                with torch.cuda.stream(beside if index % 2 else current):
                    self.add(weights, experts)
        finally:
            current.wait_stream(beside)

    def total(self) -> torch.Tensor:
        """float32 [T, H]: the sum over all groups; zeros where there was none."""
        if self._rows is None:
            return torch.zeros_like(self._x, dtype=torch.float32) if self._out is None else self._out
        from moedoctor.kernels.moe.launch import launch_sum

        out = torch.empty_like(self._x, dtype=torch.float32)  # [T, H]
        launch_sum(self._rows, self._shares, out, adds=False)
        return out

    def _sorted(self, inner: int) -> Rows:
        from moedoctor.kernels.moe.launch import Rows

        if self._rows is None:
            self._rows = Rows.sort(self._x, self._ids, self._num_experts, inner)
        if self._rows.inner != inner:
            raise ValueError(
                f"weights['w2'] must be as wide as the first group's, {self._rows.inner}, got {inner}"
            )
        return self._rows

    def _slot_ids(self, experts: torch.Tensor) -> torch.Tensor:
        """[T, K]: the slot of each id's expert, -1 for who is in none. Nothing here depends on values."""
        slots = torch.arange(len(experts), dtype=torch.int32, device=experts.device)  # [slots]
        slot_of = slots.new_full((self._num_experts + 1,), -1)  # [E + 1], the last for nobody
        held = torch.where(experts >= 0, experts, self._num_experts)  # [slots]
        slot_of.scatter_(0, held.long(), slots)
        slot_of[self._num_experts] = -1
        return slot_of[torch.where(self._ids >= 0, self._ids, self._num_experts).long()]
