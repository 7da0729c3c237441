"""FlashInfer's routing maps and finalize restated in numpy, with what goes wrong in them.

After csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh of 0.7.2.post1. Slot k of token t is row
``k * tokens + t`` of the maps. The three-step sort looks for each expert through each token's slots and stops
at the first match; a second slot of the same expert is never written, and whoever reads the map finds there
what the memory held before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

FUSED_TOP_K = (1, 2, 4, 6, 8)
"""The slots a token for which there is a fused prologue."""
FUSED_TOKENS = 256
SHARED_MEMORY = 232_448
"""Bytes that a block may have on a GPU of 9.0; the fused prologue ranks all rows in one block."""


@dataclass(frozen=True)
class ModelMaps:
    """The maps, as `moedoctor.upstream.flashinfer.probe.RoutingMaps` has them, on the CPU."""

    fused: bool
    permuted_of_row: torch.Tensor
    """int64 [K * T]"""
    row_of_permuted: torch.Tensor
    """int64 [K * T]"""
    first_offset: torch.Tensor
    """int64 [E + 1]"""


class ThreeStepModel:
    """The restated functions; the same methods as the probe of a real release."""

    device = "cpu"
    release = "model"

    def build_maps(
        self, ids: torch.Tensor, experts: int, *, start: int = 0, memory: ModelMaps | int = 0
    ) -> ModelMaps:
        """The maps for `ids` int32 [T, K] and local experts from `start` on; `memory` is what was there."""
        tokens, top_k = ids.shape
        if isinstance(memory, ModelMaps):
            before = memory.permuted_of_row.numpy().copy(), memory.row_of_permuted.numpy().copy()
        else:
            before = np.full(tokens * top_k, memory), np.full(tokens * top_k, memory)
        local = ids.numpy().astype(np.int64) - start  # [T, K]
        fused = takes_fused(tokens, top_k, experts)
        build = _fused if fused else _three_step
        permuted_of_row, row_of_permuted, first_offset = build(local, experts, *before)
        return ModelMaps(
            fused,
            torch.from_numpy(permuted_of_row),
            torch.from_numpy(row_of_permuted),
            torch.from_numpy(first_offset),
        )

    def finalize(
        self,
        maps: ModelMaps,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        experts: int,
        *,
        ranks: int = 1,
        rank: int = 0,
        all_to_all: bool = False,
    ) -> None:
        """Each token's weighted sum of its sorted rows into `out` bf16 [T, H].

        The kernel for all-to-all does not ask whether a row is within the map; the other does, since 0.6.10.
        Raises ReadOutOfBoundsError where it reads a row that is none.
        """
        tokens, top_k = ids.shape
        local = ids.numpy().astype(np.int64) - experts * rank  # [T, K]
        is_local = (local >= 0) & (local < experts)  # [T, K]
        at = maps.permuted_of_row.numpy().reshape(top_k, tokens).T  # [T, K]
        inside = (at >= 0) & (at < tokens * top_k)  # [T, K]
        unchecked = all_to_all and ranks > 1
        if unchecked and (is_local & ~inside).any():
            raise ReadOutOfBoundsError(int((is_local & ~inside).sum()))
        used = is_local & inside  # [T, K]
        values = rows.float().numpy()[np.where(used, at, 0)]  # [T, K, H]
        scale = np.where(used, weights.numpy(), 0.0).astype(np.float32)  # [T, K]
        total = torch.from_numpy((values * scale[:, :, None]).sum(1)).to(out.dtype)  # [T, H]
        written = torch.from_numpy(is_local.any(1) if unchecked else np.ones(tokens, dtype=bool))  # [T]
        out[written] = total[written]


class ReadOutOfBoundsError(Exception):
    """Finalize follows an entry of the map to memory that is no row: on a GPU an illegal memory access."""

    def __init__(self, entries: int) -> None:
        super().__init__(f"{entries} entries of the map lead out of bounds")
        self.entries = entries


def takes_fused(tokens: int, top_k: int, experts: int) -> bool:
    """Whether the fused prologue takes a call with so many tokens, slots a token and local experts."""
    bits = int(np.log2(experts + 1)) + 1
    return (
        bits <= 9
        and top_k in FUSED_TOP_K
        and tokens <= FUSED_TOKENS
        and _fused_bytes(tokens, bits) < SHARED_MEMORY
    )


def _fused_bytes(tokens: int, bits: int) -> int:
    """Shared memory of cub's BlockRadixRank, without its scan: 16-bit counters, two in a word."""
    block = next(size for size in (32, 64, 128, 256) if tokens <= size)
    lanes = (1 << max(bits - 1, 0)) + 1
    return int(lanes * block * 4)


def _three_step(local: Ints, experts: int, of_row: Any, of_permuted: Any) -> tuple[Ints, Ints, Ints]:
    tokens = local.shape[0]
    first = np.zeros(experts + 1, dtype=np.int64)  # [E + 1]
    total = 0
    for expert in range(experts):
        first[expert] = total
        slot = np.where((local == expert).any(1), (local == expert).argmax(1), -1)  # [T]: the first match
        token = np.flatnonzero(slot >= 0)  # [N]
        row = slot[token] * tokens + token  # [N]
        of_permuted[total : total + len(row)] = row
        of_row[row] = np.arange(total, total + len(row))
        total += len(row)
    first[experts] = total
    return of_row.astype(np.int64), of_permuted.astype(np.int64), first


def _fused(local: Ints, experts: int, of_row: Any, of_permuted: Any) -> tuple[Ints, Ints, Ints]:
    tokens, top_k = local.shape
    keys = np.where((local >= 0) & (local < experts), local, experts)  # [T, K]
    flat = keys.reshape(-1)  # [T * K], a thread's slots together
    order = np.argsort(flat, kind="stable")  # [T * K]
    token, slot = order // top_k, order % top_k  # [T * K] each
    of_permuted[:] = slot * tokens + token
    of_row[of_permuted] = np.arange(tokens * top_k)
    first = np.searchsorted(flat[order], np.arange(experts + 1)).astype(np.int64)  # [E + 1]
    return of_row.astype(np.int64), of_permuted.astype(np.int64), first
