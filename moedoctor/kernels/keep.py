"""Keeps rows of a MoE call on the device, if they are to be kept, without the host: for recordings.

One launch a layer, after its experts have run, also inside CUDA graphs. What is kept goes to a `KeptRows`.
Its header decides: a layer and a step that are wanted, or else the first rows whose output holds NaN or Inf
while their input does not. Kernels of a stream run in order, so the first layer to keep a row owns the
record; it keeps rows of that step only.

Shapes: T rows of a call, one a program, R rows that there is room for, H hidden size, H' output's, K top_k,
E experts, BLOCK and BLOCK_K columns that are read at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moedoctor.kernels.device_guard import make_current
from moedoctor.kernels.kept_rows import KeptRows, MoeCall
from moedoctor.kernels.watch import QuickLaunch, check_alignment

# Places of the header, as in `moedoctor.kernels.kept_rows`.
_STEP, _OWNER, _OWNED_STEP, _COUNT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_WANTED_LAYER, _WANTED_STEP, _ROWS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
_REAL = tl.constexpr(7)


@triton.jit
def _is_finite_row(x_ptr: tl.tensor, columns: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return 1 if a contiguous row holds neither NaN nor Inf."""
    bad = tl.zeros([BLOCK], tl.int32)  # [BLOCK]
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0).to(tl.float32)  # [BLOCK]
        bad = bad | (~(tl.abs(x) < float("inf"))).to(tl.int32)
    return 1 - tl.max(bad, axis=0)


@triton.jit
def copy_row(
    source_ptr: tl.tensor, target_ptr: tl.tensor, columns: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Copy contiguous elements; they get the type of the target."""
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        value = tl.load(source_ptr + column, mask=column < columns)  # [BLOCK]
        tl.store(target_ptr + column, value.to(target_ptr.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["layer"])
def keep_kernel(
    x_ptr: tl.tensor,
    output_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    header_ptr: tl.tensor,
    row_ptr: tl.tensor,
    kept_x_ptr: tl.tensor,
    kept_output_ptr: tl.tensor,
    kept_ids_ptr: tl.tensor,
    kept_weights_ptr: tl.tensor,
    kept_logits_ptr: tl.tensor,
    layer: tl.tensor,
    room: tl.constexpr,
    hidden: tl.constexpr,
    output_hidden: tl.constexpr,
    top_k: tl.constexpr,
    experts: tl.constexpr,
    has_ids: tl.constexpr,
    has_logits: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Keep one row of the call of layer number `layer`, if it is to be kept."""
    # All of the header at once: in a decode step a load that waits for another is most of this kernel's time.
    wanted = tl.load(header_ptr + _WANTED_LAYER)
    step = tl.load(header_ptr + _STEP)
    wanted_step = tl.load(header_ptr + _WANTED_STEP)
    real = tl.load(header_ptr + _REAL)
    row = tl.program_id(0).to(tl.int64)
    if (wanted >= 0) & (row < real):
        keeps = (wanted == layer + 1) & (step == wanted_step)
        if wanted == 0:
            keeps = _is_finite_row(output_ptr + row * output_hidden, output_hidden, BLOCK) == 0
            if keeps:
                keeps = _is_finite_row(x_ptr + row * hidden, hidden, BLOCK) == 1
        if keeps:
            owner = tl.atomic_cas(header_ptr + _OWNER, 0, layer + 1)
            if owner == 0:
                tl.atomic_xchg(header_ptr + _OWNED_STEP, step)
                tl.atomic_xchg(header_ptr + _ROWS, tl.num_programs(0))
            # Another program of this launch may own the record and not have written the step yet.
            same_step = tl.atomic_add(header_ptr + _OWNED_STEP, 0)
            if (owner == 0) | ((owner == layer + 1) & ((same_step == step) | (same_step == 0))):
                place = tl.atomic_add(header_ptr + _COUNT, 1)
                # All other programs of this launch have read what is wanted.
                if (wanted > 0) & (place == tl.minimum(real, tl.num_programs(0)) - 1):
                    tl.store(header_ptr + _WANTED_LAYER, -1)
                if place < room:
                    tl.store(row_ptr + place, row.to(tl.int32))
                    copy_row(x_ptr + row * hidden, kept_x_ptr + place * hidden, hidden, BLOCK)
                    output, kept_output = (
                        output_ptr + row * output_hidden,
                        kept_output_ptr + place * output_hidden,
                    )
                    copy_row(output, kept_output, output_hidden, BLOCK)
                    if has_ids:
                        ids, weights = ids_ptr + row * top_k, weights_ptr + row * top_k
                        copy_row(ids, kept_ids_ptr + place * top_k, top_k, BLOCK_K)
                        copy_row(weights, kept_weights_ptr + place * top_k, top_k, BLOCK_K)
                    if has_logits:
                        logits = logits_ptr + row * experts
                        copy_row(logits, kept_logits_ptr + place * experts, experts, BLOCK)


@triton.jit(do_not_specialize=["real", "layer", "step", "frees"])
def step_kernel(
    header_ptr: tl.tensor, real: tl.tensor, layer: tl.tensor, step: tl.tensor, frees: tl.tensor
) -> None:
    tl.store(header_ptr + _STEP, tl.load(header_ptr + _STEP) + 1)
    tl.store(header_ptr + _REAL, real)
    tl.store(header_ptr + _WANTED_LAYER, layer)
    tl.store(header_ptr + _WANTED_STEP, step)
    if frees != 0:
        tl.store(header_ptr + _OWNER, 0)
        tl.store(header_ptr + _OWNED_STEP, 0)
        tl.store(header_ptr + _COUNT, 0)


_keep_rows, _begin_step = (QuickLaunch(kernel, triton.__version__) for kernel in (keep_kernel, step_kernel))


def launch_keep(kept: KeptRows, layer: int, call: MoeCall) -> None:
    """Keep rows of a call. Nothing waits for the device. Raises ValueError if it does not fit the memory."""
    kept.check(call)
    given = call.input
    rows, hidden = given.x.shape
    if rows == 0:
        return
    has_ids, has_logits = given.ids is not None, given.logits is not None
    parts = (given.x, call.output, given.ids, given.weights, given.logits)
    # What the call has not is not read.
    tensors = tuple(given.x if part is None else part.contiguous() for part in parts)
    memory = (kept.header, kept.row, kept.x, kept.output, kept.ids, kept.weights, kept.logits)
    output_hidden, top_k, experts = call.output.shape[1], kept.ids.shape[1], kept.logits.shape[1]
    block = int(min(max(triton.next_power_of_2(hidden), 32), 2048))
    sizes = (len(kept.row), hidden, output_hidden, top_k, experts)
    constants = (*sizes, has_ids, has_logits, block, triton.next_power_of_2(top_k))
    with make_current(given.x):
        _keep_rows(
            (given.x.device, *(tensor.dtype for tensor in tensors), *constants, check_alignment(*tensors)),
            rows,
            *tensors,
            *memory,
            layer,
            *constants,
            num_warps=1 if hidden <= 512 else 4,
        )


def launch_step(header: torch.Tensor, real: int, layer: int, step: int, *, frees: bool) -> None:
    """Begin the next step, whose first `real` rows are no padding. The first is step 1.

    `layer` and `step` are what is wanted from now on, as in the header; `frees` lets it keep another call.
    """
    with make_current(header):
        _begin_step((header.device,), 1, header, real, layer, step, int(frees), num_warps=1)
