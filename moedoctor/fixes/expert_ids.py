"""Guards for kernels that assume the experts of a token to be distinct and in range.

FlashInfer's three-step sort leaves a row of its map unwritten for a repeated id (MD011), and kernels that use
an id as an index read the wrong memory for -1 (MD016). All functions run on the device of their arguments and
never wait for it. So an id that is no expert is never an error here; the functions that compute with ids
(`moe_forward`, `ExpertCache`) ignore it as -1 if it is on a GPU and raise ValueError if it is on the CPU. On
a CUDA device with Triton `validate_expert_ids` and `deduplicate` are one launch each, which a CUDA graph may
hold.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from moedoctor.kernels.device_guard import has_kernels
from moedoctor.reference import expert_ids as reference

_INTEGERS = (torch.int32, torch.int64)


class InvalidExpertIdsError(ValueError):
    """The flags show expert ids that no kernel should get."""


@dataclass(frozen=True)
class ExpertIdCounts:
    """Rows with unusual ids since the flags were made. One row may be in several counters."""

    repeated: int = 0
    """Rows that hold an expert in range twice or more."""
    out_of_range: int = 0
    """Rows with an id below -1 or from the number of experts on."""
    sentinel: int = 0
    """Rows with an id of -1, which means: no expert."""


class ExpertIdFlags:
    """Counters on the device that `validate_expert_ids` adds to; only reading them waits for the device."""

    def __init__(self, device: torch.device | str) -> None:
        self.tensor = torch.zeros(2, 3, dtype=torch.int32, device=device)
        """int32 [2, 3]: real rows, then padding; repeated, out of range, sentinel."""

    def count_real(self) -> ExpertIdCounts:
        """Return the counts of real rows; waits for the device."""
        return ExpertIdCounts(*self.tensor[0].tolist())

    def count_padding(self) -> ExpertIdCounts:
        """Return the counts of padding rows; waits for the device."""
        return ExpertIdCounts(*self.tensor[1].tolist())

    def raise_if_found(self, *, allow_sentinel: bool = True) -> None:
        """Raise InvalidExpertIdsError for repeated ids, ids out of range and, if not allowed, ids of -1."""
        total = asdict(ExpertIdCounts(*self.tensor.sum(0).tolist()))
        if allow_sentinel:
            total["sentinel"] = 0
        if any(total.values()):
            rows = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in total.items() if count)
            raise InvalidExpertIdsError(f"rows of expert ids that no kernel should be given: {rows}")

    def reset(self) -> None:
        """Start from zero, without waiting."""
        self.tensor.zero_()


class DistinctTopK(NamedTuple):
    """Experts of each token, each at most once."""

    ids: torch.Tensor
    """int32 [T, K]"""
    weights: torch.Tensor
    """float32 [T, K]"""


@torch.no_grad()
def validate_expert_ids(
    ids: torch.Tensor,
    num_experts: int,
    *,
    flags: ExpertIdFlags | None = None,
    real_rows: torch.Tensor | None = None,
) -> ExpertIdFlags:
    """Count the rows of `ids` (int32 or int64 [T, K], any strides) with repeated ids, unknown ids, and -1.

    The counts are added to `flags`, or to new flags if that is None, and the flags are returned. Read them
    whenever it suits. Give your own flags inside a CUDA graph, so that nothing is allocated. `real_rows`,
    int32 [1] on the same device, is the number of rows that are not padding. Raises TypeError or ValueError
    for other arguments.
    """
    _check_ids(ids)
    check_int("num_experts", num_experts)
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    if flags is None:
        flags = ExpertIdFlags(ids.device)
    if not isinstance(flags, ExpertIdFlags):
        raise TypeError(f"flags must be ExpertIdFlags, got {type(flags).__name__}")
    if real_rows is not None and not isinstance(real_rows, torch.Tensor):
        raise TypeError(f"real_rows must be a torch.Tensor, got {type(real_rows).__name__}")
    for name, value in (("flags", flags.tensor), ("real_rows", real_rows)):
        if value is not None and value.device != ids.device:
            raise ValueError(f"{name} must be on the device of ids, {ids.device}, got {value.device}")
    if real_rows is not None and (real_rows.dtype != torch.int32 or real_rows.numel() != 1):
        raise ValueError(f"real_rows must be int32 [1], got {real_rows.dtype} {list(real_rows.shape)}")
    if has_kernels(ids.device):
        from moedoctor.kernels.expert_ids import launch_check

        launch_check(ids, num_experts, flags.tensor, real_rows)
    else:
        reference.count_rows(ids, num_experts, flags.tensor, real_rows)
    return flags


@torch.no_grad()
def deduplicate(ids: torch.Tensor, weights: torch.Tensor, *, num_experts: int | None = None) -> DistinctTopK:
    """Give the first pair of each expert the weights of all its pairs in the row, and empty the others.

    An emptied pair has weight 0 and id -1. With `num_experts` it has the id of an expert that the row does
    not hold: for kernels that do not know -1, at the price of that expert's work. Then 0 times the output of
    that expert is NaN if the output is not finite. The sum over experts of weight times expert output is the
    same; it is formed in float32. Ids below 0 are left as they are, with their weights, and so are ids of no
    expert at the other end: nothing is indexed with them here. An id that int32
    cannot hold becomes -1. `ids` int32 or int64 [T, K], `weights` floating [T, K]. Raises TypeError or
    ValueError for other arguments, and if `num_experts` is below K.
    """
    _check_ids(ids)
    _check_weights(weights, ids)
    if num_experts is not None and num_experts < ids.shape[1]:
        raise ValueError(f"num_experts must be at least top_k {ids.shape[1]}, got {num_experts}")
    use_spare = num_experts is not None
    if not has_kernels(ids.device):
        return DistinctTopK(*reference.deduplicate(ids, weights, use_spare=use_spare))
    from moedoctor.kernels.expert_ids import launch_deduplicate

    out_ids = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)  # [T, K]
    out_weights = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)  # [T, K]
    launch_deduplicate(ids, weights, out_ids, out_weights, use_spare=use_spare)
    return DistinctTopK(out_ids, out_weights)


@torch.no_grad()
def find_local_ids(ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Return the local id of each expert, int32 [T, K]: -1 if this rank has none, or if the id is no expert.

    `expert_map` int [E] holds the local id of each expert, or -1. Indexing it with the ids themselves gives
    an id of -1 the last expert, which is MD016. Does not wait for the device.
    """
    _check_ids(ids)
    if not isinstance(expert_map, torch.Tensor):
        raise TypeError(f"expert_map must be a torch.Tensor, got {type(expert_map).__name__}")
    if expert_map.dim() != 1 or not len(expert_map) or expert_map.dtype not in _INTEGERS:
        raise ValueError(f"expert_map must be int [experts], got {expert_map.dtype} {list(expert_map.shape)}")
    known = (ids >= 0) & (ids < expert_map.shape[0])  # [T, K]
    return torch.where(known, expert_map[torch.where(known, ids, 0).long()], -1).to(torch.int32)


@torch.no_grad()
def replace_sentinels(
    ids: torch.Tensor, weights: torch.Tensor, *, spare: int = 0, num_experts: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int32 [T, K] that a kernel may index with, and weights [T, K].

    For kernels that take no -1: ids below 0 become `spare` with weight 0, and with `num_experts` also ids
    from there on. Without it those are kept, and the kernel must not index with them. The work of emptied
    pairs is done and adds nothing, unless the row itself or the spare expert's output is not finite: 0 times
    NaN is NaN. An id that int32 cannot hold is treated as below 0. Raises TypeError or ValueError for other
    ids and weights, for a `num_experts` below 1, and if `spare` is not an expert.
    """
    _check_ids(ids)
    _check_weights(weights, ids)
    check_int("spare", spare)
    largest = torch.iinfo(torch.int32).max
    if num_experts is not None:
        check_int("num_experts", num_experts)
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        largest = min(largest, num_experts - 1)
    if not 0 <= spare <= largest:
        below = "" if num_experts is None else f" and below {num_experts}"
        raise ValueError(f"spare must be an expert, 0 or more{below}, got {spare}")
    empty = (ids < 0) | (ids > largest)  # [T, K]
    return torch.where(empty, spare, ids).to(torch.int32), weights.masked_fill(empty, 0.0)


def check_int(name: str, value: int) -> None:
    """Raise TypeError if `value` is not an int, or if it is a bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def _check_weights(weights: torch.Tensor, ids: torch.Tensor) -> None:
    if not isinstance(weights, torch.Tensor) or not weights.is_floating_point():
        raise TypeError("weights must be a floating torch.Tensor")
    if weights.shape != ids.shape or weights.device != ids.device:
        raise ValueError(
            f"weights must be {list(ids.shape)} on {ids.device}, as ids; "
            f"got {list(weights.shape)} on {weights.device}"
        )


def _check_ids(ids: torch.Tensor) -> None:
    if not isinstance(ids, torch.Tensor) or ids.dtype not in _INTEGERS:
        kind = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(f"ids must be an int32 or int64 torch.Tensor, got {kind}")
    if ids.dim() != 2 or ids.shape[1] < 1:
        raise ValueError(f"ids must have two dimensions [tokens, top_k], got shape {list(ids.shape)}")
