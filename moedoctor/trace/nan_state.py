"""The record that a NaN trace keeps on the device: written by every watch, read once at the end."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch

from moedoctor.fixes.expert_ids import ExpertIdFlags, validate_expert_ids
from moedoctor.trace.nan_report import Finding, NanReport, PointCounts, RouterCounts

(STEP, ACTIVE, REAL, PADDED, SEQUENCE, STEPS, PADDED_STEPS, PAD_TOKENS, STEPS_WITH, NOW, THROUGH, HEADER) = (
    *range(9),
    12,
    16,
    17,
)
"""Places of the header; the same as in `moedoctor.kernels.watch`, which is not imported without Triton."""
ROWS, STEPS_FOUND, FIRST_STEP, FIRST_SEQUENCE, LAST_STEP, FIELDS = range(6)
KINDS = 4
"""NaN in real rows, Inf in real rows, NaN in padding, Inf in padding."""
ALL_REAL = 2**31 - 1
_ID_KINDS = 3


class NanState:
    """Device memory for `capacity` points. No method waits for the device but `report`."""

    def __init__(self, device: torch.device | str, capacity: int = 1024) -> None:
        self.header = torch.zeros(HEADER, dtype=torch.int32, device=device)  # [HEADER]
        self.header[REAL] = ALL_REAL
        self.found = torch.zeros(capacity, KINDS, FIELDS, dtype=torch.int32, device=device)
        """int32 [points, KINDS, FIELDS]"""
        self.ids = torch.zeros(capacity, 2, 2, _ID_KINDS, dtype=torch.int32, device=device)
        """int32 [points, (rows, first step), (real, padding), _ID_KINDS]"""
        self.names: list[str] = []
        self._together: dict[int, int] = {}
        """Point -> the first of those that are watched in one launch with it."""
        self.padding: torch.Tensor | None = None
        """int8 [rows]: which rows are padding, where that is not all rows from a certain one on."""

    def point(self, name: str) -> int:
        """The number of a new point. Raises ValueError where there is room for no more."""
        if len(self.names) >= self.found.shape[0]:
            raise ValueError(f"a trace of {self.found.shape[0]} points is full; give a larger capacity")
        self.names.append(name)
        return len(self.names) - 1

    def begin(self, real: int, padded: int) -> None:
        """A step begins with `padded` rows of which the first `real` are no padding."""
        begin_step(self.header, real, padded)

    def begin_masked(self, padding: torch.Tensor) -> None:
        """A step begins whose padding rows are those where `padding` int8 [rows] is not 0."""
        rows = padding.numel()
        begin_step(self.header, rows, rows)
        # An output with another number of rows has none from here on, so it counts as real.
        self.header[PADDED].copy_(rows + (padding != 0).sum())

    def end(self) -> None:
        """The step is over; what follows belongs to none until the next one begins."""
        end_step(self.header)

    def watch(self, point: int, x: torch.Tensor) -> None:
        """Look at `x` [..., columns] of a floating type; all but the last dimension make the rows."""
        rows = x.detach().reshape(-1, x.shape[-1])  # [rows, columns]
        padding = self.padding
        if padding is not None and padding.numel() != rows.shape[0]:
            padding = None
        if torch.compiler.is_compiling():
            torch.ops.moedoctor.watch_rows(rows, self.header, self.found, padding, point)
        else:
            watch_rows(rows, self.header, self.found, padding, point)

    def watch_three(self, points: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Look at three tensors [rows, columns] of the same rows, in the order in which they were made."""
        side_by_side = all(one.stride(1) == 1 for one in tensors)
        if _has_kernel(tensors[0]) and tensors[0].shape[0] and side_by_side and self.padding is None:
            from moedoctor.kernels.watch import launch_watch_three

            self._together.update(dict.fromkeys(points, points[0]))
            launch_watch_three(tensors, self.header, self.found, points)
            return
        for point, one in zip(points, tensors, strict=True):
            self.watch(point, one)

    def watch_last(self, point: int, x: torch.Tensor) -> None:
        """Look at `x` [..., columns], after which the step is over."""
        x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # [rows, columns]
        if _has_kernel(x) and x.numel() and self.padding is None:
            from moedoctor.kernels.watch import launch_watch

            launch_watch(x, self.header, self.found, point, None, ends=True)
            return
        self.watch(point, x)
        self.end()

    def watch_ids(self, point: int, ids: torch.Tensor, num_experts: int) -> None:
        """Look at expert ids [T, K]; those of another number of dimensions are passed over."""
        if ids.dim() != 2:
            return
        ids = ids.view(torch.int32) if ids.dtype is torch.uint32 else ids  # [T, K]
        if torch.compiler.is_compiling():
            torch.ops.moedoctor.watch_ids(ids, self.header, self.ids, num_experts, point)
        else:
            watch_ids(ids, self.header, self.ids, num_experts, point)

    def report(self) -> NanReport:
        """Everything that was recorded; waits for the device."""
        header, found, ids = self.header.tolist(), self.found.cpu(), self.ids.cpu()
        firsts = [self._first(found, kinds) for kinds in ((0, 1), (2, 3))]
        return NanReport(
            steps=header[STEPS],
            steps_with_padding=header[PADDED_STEPS],
            pad_tokens=header[PAD_TOKENS],
            nan_in_real=header[STEPS_WITH],
            inf_in_real=header[STEPS_WITH + 1],
            nan_in_padding=header[STEPS_WITH + 2],
            inf_in_padding=header[STEPS_WITH + 3],
            first_real=firsts[0],
            first_padding=firsts[1],
            points=tuple(
                _point_counts(name, found[index].tolist())
                for index, name in enumerate(self.names)
                if bool(found[index, :, ROWS].any())
            ),
            routers=tuple(
                _router_counts(self.names[index], ids[index].tolist())
                for index in range(len(self.names))
                if bool(ids[index, 0].any())
            ),
            watched=len(self.names),
        )

    def _first(self, found: torch.Tensor, kinds: tuple[int, int]) -> Finding | None:
        seen = [
            (int(found[index, kind, FIRST_SEQUENCE]), index, kind)
            for index in range(len(self.names))
            for kind in kinds
            if found[index, kind, ROWS]
        ]
        if not seen:
            return None
        order, index, kind = min(seen)
        step = int(found[index, kind, FIRST_STEP])
        # Rows of one launch run in any order: of what it saw first in this step, the first point counts.
        same = [
            (other, which, place)
            for place, other, which in seen
            if self._leader(other) == self._leader(index) and int(found[other, which, FIRST_STEP]) == step
        ]
        index, kind, _ = min(same)
        return Finding(self.names[index], "NaN" if kind % 2 == 0 else "Inf", step, order)

    def _leader(self, point: int) -> int:
        return self._together.get(point, point)


def watch_rows(
    rows: torch.Tensor, header: torch.Tensor, found: torch.Tensor, padding: torch.Tensor | None, point: int
) -> None:
    """Record what `rows` [rows, columns] hold that is not finite, under `point`."""
    if _has_kernel(rows):
        from moedoctor.kernels.watch import launch_watch

        launch_watch(rows, header, found, point, padding)
        return
    if not int(header[ACTIVE]):
        return
    is_padding = torch.arange(rows.shape[0], device=rows.device) >= header[REAL]  # [rows]
    if padding is not None:
        is_padding = padding != 0
    for which, bad in enumerate((rows.isnan().any(1), rows.isinf().any(1))):  # [rows] each
        for kind, count in (
            (which, int((bad & ~is_padding).sum())),
            (which + 2, int((bad & is_padding).sum())),
        ):
            if count:
                _record(header, found[point, kind], kind, count)


def watch_ids(
    ids: torch.Tensor, header: torch.Tensor, counts: torch.Tensor, num_experts: int, point: int
) -> None:
    """Add to `counts` at `point` the rows of `ids` [T, K] that no kernel should be given."""
    if _has_kernel(ids):
        from moedoctor.kernels.expert_ids import launch_check

        launch_check(ids, num_experts, counts[point], header[REAL : REAL + 1], header[:2])
    else:
        _count_ids(ids, num_experts, counts[point], header)


def begin_step(header: torch.Tensor, real: int, padded: int) -> None:
    """Start the next step in the record."""
    if _has_kernel(header):
        from moedoctor.kernels.watch import launch_begin

        launch_begin(header, real, padded)
        return
    header[STEP] += 1
    header[REAL], header[PADDED] = real, padded
    header[NOW : NOW + KINDS] = 0
    header[ACTIVE] = 1


def end_step(header: torch.Tensor) -> None:
    """Add up what the step showed; nothing where none runs."""
    if _has_kernel(header):
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


def _count_ids(ids: torch.Tensor, num_experts: int, counts: torch.Tensor, header: torch.Tensor) -> None:
    if not int(header[ACTIVE]):
        return
    flags = ExpertIdFlags(ids.device)
    validate_expert_ids(ids, num_experts, flags=flags, real_rows=header[REAL : REAL + 1])
    counts[0] += flags.tensor
    counts[1] = torch.where((flags.tensor > 0) & (counts[1] == 0), header[STEP], counts[1])


def _point_counts(name: str, found: list[list[int]]) -> PointCounts:
    rows = [kind[ROWS] for kind in found]
    steps = [kind[STEPS_FOUND] for kind in found]
    return PointCounts(
        name, (rows[0], rows[2]), (rows[1], rows[3]), (steps[0], steps[2]), (steps[1], steps[3])
    )


def _router_counts(name: str, counts: list[list[list[int]]]) -> RouterCounts:
    (real, padding), (first_real, first_padding) = counts
    repeated, outside, sentinel = zip(real, padding, strict=True)
    firsts = [step for step in (first_real[0], first_padding[0]) if step]
    return RouterCounts(name, repeated, outside, sentinel, min(firsts, default=0))


def _has_kernel(x: torch.Tensor) -> bool:
    return x.is_cuda and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# A graph compiler takes an operator as it is, and keeps one that changes its arguments.
_watch_operator = torch.library.custom_op(
    "moedoctor::watch_rows",
    watch_rows,
    mutates_args=("header", "found"),
    schema="(Tensor rows, Tensor(a!) header, Tensor(b!) found, Tensor? padding, int point) -> ()",
)
_ids_operator = torch.library.custom_op(
    "moedoctor::watch_ids",
    watch_ids,
    mutates_args=("counts",),
    schema="(Tensor ids, Tensor header, Tensor(a!) counts, int num_experts, int point) -> ()",
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
