"""Saves what goes into a MoE call to host memory that outlives the process: one launch a layer.

The kernel writes to pinned host memory in place, also inside CUDA graphs, and is through before the experts
begin. So the call whose experts end the CUDA context is there. Shapes as in `moedoctor.kernels.keep`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moedoctor.kernels.device_guard import make_current
from moedoctor.kernels.keep import copy_row
from moedoctor.kernels.kept_rows import MoeInput, SavedCalls
from moedoctor.kernels.watch import QuickLaunch, check_alignment


@triton.jit(do_not_specialize=["rows"])
def save_call_kernel(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    step_ptr: tl.tensor,
    saved_header_ptr: tl.tensor,
    saved_x_ptr: tl.tensor,
    saved_ids_ptr: tl.tensor,
    saved_weights_ptr: tl.tensor,
    saved_logits_ptr: tl.tensor,
    rows: tl.tensor,
    places: tl.constexpr,
    room: tl.constexpr,
    hidden: tl.constexpr,
    top_k: tl.constexpr,
    experts: tl.constexpr,
    has_ids: tl.constexpr,
    has_logits: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Save one row of a call in place ``step % places``."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.load(step_ptr)
    place = (step % places).to(tl.int64)
    if row == 0:
        header_ptr = saved_header_ptr + place * 6
        tl.store(header_ptr, step)
        tl.store(header_ptr + 1, rows)
        tl.store(header_ptr + 2, x_ptr.to(tl.int64))
        if has_ids:
            tl.store(header_ptr + 3, ids_ptr.to(tl.int64))
            tl.store(header_ptr + 4, weights_ptr.to(tl.int64))
        if has_logits:
            tl.store(header_ptr + 5, logits_ptr.to(tl.int64))
    target = place * room + row
    copy_row(x_ptr + row * hidden, saved_x_ptr + target * hidden, hidden, BLOCK)
    if has_ids:
        copy_row(ids_ptr + row * top_k, saved_ids_ptr + target * top_k, top_k, BLOCK_K)
        copy_row(weights_ptr + row * top_k, saved_weights_ptr + target * top_k, top_k, BLOCK_K)
    if has_logits:
        copy_row(logits_ptr + row * experts, saved_logits_ptr + target * experts, experts, BLOCK)


_save_call = QuickLaunch(save_call_kernel, triton.__version__)


def launch_save(saved: SavedCalls, step: torch.Tensor, call: MoeInput) -> None:
    """Save a call, whose step is in `step` int32 [1] on the device of `call`. Nothing waits.

    Raises ValueError if the call does not fit the memory.
    """
    saved.check(call)
    places, room, hidden = saved.x.shape
    rows = min(len(call.x), room)
    if rows == 0:
        return
    top_k, experts = saved.ids.shape[2], saved.logits.shape[2]
    given = (call.x, call.ids, call.weights, call.logits)
    # What the call has not is not read.
    tensors = tuple(call.x if tensor is None else tensor.contiguous() for tensor in given)
    memory = (saved.header, saved.x, saved.ids, saved.weights, saved.logits)
    block = int(min(max(triton.next_power_of_2(hidden), 32), 2048))
    has = (call.ids is not None, call.logits is not None)
    constants = (places, room, hidden, top_k, experts, *has, block, triton.next_power_of_2(top_k))
    with make_current(call.x):
        _save_call(
            (call.x.device, *(tensor.dtype for tensor in tensors), *constants, check_alignment(*tensors)),
            rows,
            *tensors,
            step,
            *memory,
            len(call.x),
            *constants,
            num_warps=1 if hidden <= 512 else 4,
        )
