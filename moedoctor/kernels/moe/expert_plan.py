"""Groups the slots of a batch by expert and cuts them into blocks, in one launch and without the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def plan_kernel(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    slots: tl.tensor,
    blocks: tl.tensor,
    experts: tl.constexpr,
    block_m: tl.constexpr,
    by_row: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """A stable counting sort of `ids` [slots], a program an expert; see `plan_blocks` for what it writes.

    Every expert has a piece of the plan that is long enough whatever the others have, so that programs need
    not wait for each other: a block for each of its rows (`by_row`), or the full blocks that its rows can
    end and one more.
    """
    mine = tl.program_id(0)
    lane = tl.arange(0, chunk)  # [chunk]
    lower = tl.zeros((chunk,), tl.int32)
    equal = tl.zeros((chunk,), tl.int32)
    start = slots * 0
    while start < slots:
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < slots, other=-1).to(tl.int32)
        lower += ((ids >= 0) & (ids < mine)).to(tl.int32)
        equal += (ids == mine).to(tl.int32)
        start += chunk
    row = tl.sum(lower, axis=0)
    number = tl.sum(equal, axis=0)
    block = row if by_row else row // block_m + mine
    stop = row + number if by_row else (row + number) // block_m + mine + 1
    if mine == experts - 1:
        stop = blocks
    done = number * 0
    while block < stop:
        tl.store(plan_ptr + block * 3, tl.where(done < number, mine, -1))
        tl.store(plan_ptr + block * 3 + 1, row + done)
        tl.store(plan_ptr + block * 3 + 2, tl.minimum(number - done, block_m))
        done += block_m
        block += 1
    start = slots * 0
    while (start < slots) & (number > 0):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < slots, other=-1).to(tl.int32)
        hit = (ids == mine).to(tl.int32)  # [chunk]
        tl.store(order_ptr + row + tl.cumsum(hit, axis=0) - 1, start + lane, mask=hit != 0)
        row += tl.sum(hit, axis=0)
        start += chunk


def plan_blocks(topk_ids: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order int32 [S], plan int32 [B, 3]): slots by expert; (expert or -1, first row, rows) of each block.

    B depends on the sizes alone, never on the ids, so that nothing has to be read back. Slots of no expert
    are in no block; what belongs to no block is not written.
    """
    slots = topk_ids.numel()
    size = slots // block_m + experts
    by_row = slots < size
    size = min(slots, size)
    order = torch.empty(slots, dtype=torch.int32, device=topk_ids.device)  # [S]
    plan = torch.empty((size, 3), dtype=torch.int32, device=topk_ids.device)  # [B, 3]
    plan_kernel[(experts,)](
        topk_ids.contiguous(),
        order,
        plan,
        slots,
        size,
        experts=experts,
        block_m=block_m,
        by_row=by_row,
        chunk=1024 if slots <= 4096 else 4096,
        num_warps=4 if slots <= 4096 else 8,
    )
    return order, plan
