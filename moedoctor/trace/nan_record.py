"""How a NaN trace writes its record on the device: by kernels where there are some, else by torch.

Of a row of an output may be known that it is real, or padding, or neither: the latter where the output has
another number of rows than the step, and no multiple of it.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from moedoctor.reference.expert_ids import count_rows

STEP, ACTIVE, REAL, PADDED, SEQUENCE, STEPS, PADDED_STEPS, PAD_TOKENS = range(8)
STEPS_WITH, NOW, THROUGH, MASKED, HEADER = 8, 16, 24, 25, 26
"""Places of the header; as in `moedoctor.kernels.watch_row`, which is not imported without Triton."""
ROWS, STEPS_FOUND, FIRST_STEP, FIRST_SEQUENCE, LAST_STEP, FIELDS = range(6)
KINDS = 6
"""NaN in real rows, Inf in real rows, NaN in padding, Inf in padding, NaN in others, Inf in others."""
PADDING, UNKNOWN = 2, 4
"""What is added to a kind for padding, and for rows of which it is not known."""
ALL_REAL = 2**31 - 1
ID_KINDS = 3


def watch_rows(
    rows: torch.Tensor,
    header: torch.Tensor,
    found: torch.Tensor,
    padding: torch.Tensor | None,
    point: int,
    group: int = 0,
) -> None:
    """Record what `rows` [rows, columns] hold that is not finite, under `point`.

    Each element of `padding` int8 [elements] stands for `group` rows in a row. Without it, `group` rows may
    belong to one of the step, or one, or with 0 any number.
    """
    if has_kernel(rows):
        from moedoctor.kernels.watch import launch_watch

        launch_watch(rows, header, found, point, padding, group=group)
        return
    if not int(header[ACTIVE]):
        return
    offsets = _offsets(rows.shape[0], header, padding, group)  # [rows]
    for which, bad in enumerate((rows.isnan().any(1), rows.isinf().any(1))):  # [rows] each
        for offset in (0, PADDING, UNKNOWN):
            count = int((bad & (offsets == offset)).sum())
            if count:
                _record(header, found[point, which + offset], which + offset, count)


def _offsets(rows: int, header: torch.Tensor, padding: torch.Tensor | None, group: int) -> torch.Tensor:
    """0 for a real row, PADDING, or UNKNOWN: int64 [rows]."""
    number = torch.arange(rows, device=header.device)  # [rows]
    real, padded, masked = int(header[REAL]), int(header[PADDED]), int(header[MASKED])
    if padding is not None and masked == padding.numel():
        each = group or max(rows // masked, 1)
        return (padding[number // each] != 0).long() * PADDING
    if real >= padded:
        return torch.zeros_like(number)
    each = rows // max(padded, 1)
    if masked or each * padded != rows or (each != 1 and group not in (0, each)):
        return torch.full_like(number, UNKNOWN)
    return (number // max(each, 1) >= real).long() * PADDING


def _record(header: torch.Tensor, entry: torch.Tensor, kind: int, count: int) -> None:
    step = int(header[STEP])
    entry[ROWS] += count
    if int(entry[LAST_STEP]) != step:
        entry[LAST_STEP] = step
        entry[STEPS_FOUND] += 1
        if not int(entry[FIRST_STEP]):
            header[SEQUENCE] += 1
            entry[FIRST_STEP], entry[FIRST_SEQUENCE] = step, int(header[SEQUENCE])
    header[NOW + kind] = 1


def watch_own_ids(
    ids: torch.Tensor, header: torch.Tensor, counts: torch.Tensor, num_experts: int, point: int
) -> None:
    """Add to `counts` at `point` the rows of `ids` [T, K] that no kernel should be given.

    The rows are those of the step, one for one: that costs one launch.
    """
    _check_ids(ids, num_experts, counts[point], header[REAL : REAL + 1], header[:2])


def watch_ids(
    ids: torch.Tensor,
    header: torch.Tensor,
    counts: torch.Tensor,
    others: torch.Tensor,
    padding: torch.Tensor | None,
    num_experts: int,
    point: int,
) -> None:
    """As `watch_own_ids`, for ids of any number of rows, and a mask int8 [elements] or None.

    What is in rows that may be real or padding is added to `others`.
    """
    rows = ids.shape[0]
    real, padded, masked = header[REAL], header[PADDED], header[MASKED]  # []
    each = rows // padded.clamp_min(1)
    real_rows, known = real * each, (masked == 0) & (each * padded == rows)
    if padding is not None and padding.numel() and rows % padding.numel() == 0:
        by_mask = masked == padding.numel()
        mask = padding.repeat_interleave(rows // padding.numel())  # [rows]
        # Real rows first, as the check wants them.
        ids = torch.where(by_mask, ids[(mask != 0).to(torch.int8).argsort(stable=True)], ids)
        real_rows, known = torch.where(by_mask, (mask == 0).sum(), real_rows), known | by_mask
    everything = real >= padded
    real_rows = torch.where(everything, rows, real_rows).to(torch.int32).reshape(1)
    for whose, place in ((known | everything, counts), (~(known | everything), others)):
        step = torch.stack((header[STEP], header[ACTIVE] * whose))  # [2]
        _check_ids(ids, num_experts, place[point], real_rows if place is counts else None, step)


def _check_ids(
    ids: torch.Tensor,
    num_experts: int,
    counts: torch.Tensor,
    real_rows: torch.Tensor | None,
    step: torch.Tensor,
) -> None:
    if has_kernel(ids):
        from moedoctor.kernels.expert_ids import launch_check

        launch_check(ids, num_experts, counts, real_rows, step)
    elif int(step[1]):
        rows = torch.zeros_like(counts[0])  # [2, ID_KINDS]
        count_rows(ids, num_experts, rows, real_rows)
        counts[0] += rows
        counts[1] = torch.where((rows > 0) & (counts[1] == 0), step[0], counts[1])


def begin_step(header: torch.Tensor, real: int, padded: int) -> None:
    """Start the next step in the record; one that still runs, for the model raised, is over."""
    if has_kernel(header):
        from moedoctor.kernels.watch import launch_begin

        launch_begin(header, real, padded)
        return
    end_step(header)
    header[STEP] += 1
    header[REAL], header[PADDED], header[MASKED] = real, padded, 0
    header[NOW : NOW + KINDS] = 0
    header[ACTIVE] = 1


def end_step(header: torch.Tensor) -> None:
    """Add up what the step showed; nothing where none runs."""
    if has_kernel(header):
        from moedoctor.kernels.watch import launch_end

        launch_end(header)
        return
    active = header[ACTIVE].clone()
    extra = (header[PADDED] - header[REAL]).clamp_min(0) * active
    header[STEPS_WITH : STEPS_WITH + KINDS] += header[NOW : NOW + KINDS] * active
    header[STEPS] += active
    header[PADDED_STEPS] += (extra > 0).int()
    header[PAD_TOKENS] += extra
    header[ACTIVE] = 0


def has_kernel(x: torch.Tensor) -> bool:
    """Whether there is a kernel for what is on the device of `x`."""
    return x.is_cuda and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# A graph compiler takes an operator as it is, and keeps one that changes its arguments.
_watch_operator = torch.library.custom_op(
    "moedoctor::watch_rows",
    watch_rows,
    mutates_args=("header", "found"),
    schema="(Tensor rows, Tensor(a!) header, Tensor(b!) found, Tensor? padding, int point, "
    "SymInt group) -> ()",
)
_ids_operator = torch.library.custom_op(
    "moedoctor::watch_ids",
    watch_ids,
    mutates_args=("counts", "others"),
    schema="(Tensor ids, Tensor header, Tensor(a!) counts, Tensor(b!) others, Tensor? padding, "
    "int num_experts, int point) -> ()",
)
_begin_operator = torch.library.custom_op(
    "moedoctor::begin_step",
    begin_step,
    mutates_args=("header",),
    schema="(Tensor(a!) header, SymInt real, SymInt padded) -> ()",
)
_end_operator = torch.library.custom_op(
    "moedoctor::end_step", end_step, mutates_args=("header",), schema="(Tensor(a!) header) -> ()"
)
for _operator in (_watch_operator, _ids_operator, _begin_operator, _end_operator):
    _operator.register_fake(lambda *arguments: None)
