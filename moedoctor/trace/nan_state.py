"""The record that a NaN trace keeps on the device: written by every watch, read once at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from moedoctor.trace.nan_record import (
    ALL_REAL,
    FIELDS,
    FIRST_SEQUENCE,
    FIRST_STEP,
    HEADER,
    ID_KINDS,
    KINDS,
    MASKED,
    PAD_TOKENS,
    PADDED,
    PADDED_STEPS,
    PADDING,
    REAL,
    ROWS,
    STEPS,
    STEPS_FOUND,
    STEPS_WITH,
    UNKNOWN,
    begin_step,
    end_step,
    has_kernel,
    watch_ids,
    watch_own_ids,
    watch_rows,
)
from moedoctor.trace.nan_record import LAST_STEP as LAST_STEP
from moedoctor.trace.nan_report import Finding, NanReport, PointCounts, RouterCounts
from moedoctor.trace.nan_rows import group_of, row_dimensions, rows_each
from moedoctor.trace.nan_seen import SeenPoints


class NanState:
    """Device memory for `capacity` points.

    On a CUDA device with Triton no method waits for the device but `report`; without Triton, `watch` and
    `watch_ids` do. Tensors on another device than the record's, sparse and nested ones are passed over: the
    report says how many points gave such.
    """

    def __init__(self, device: torch.device | str, capacity: int = 1024) -> None:
        with torch.inference_mode(False):  # what is made in that mode can be written to in no other
            self.header = torch.zeros(HEADER, dtype=torch.int32, device=device)  # [HEADER]
            self.header[REAL] = self.header[PADDED] = ALL_REAL
            self.found = torch.zeros(capacity, KINDS, FIELDS, dtype=torch.int32, device=device)
            """int32 [points, KINDS, FIELDS]"""
            self.ids = torch.zeros(capacity, 2, 2, ID_KINDS, dtype=torch.int32, device=device)
            """int32 [points, (rows, first step), (real, padding), ID_KINDS]"""
            self.other_ids = torch.zeros_like(self.ids)
            """The same for rows that may be either; of the third dimension only the first place is used."""
        self._device = self.header.device
        self.names: list[str] = []
        self.looked = SeenPoints()
        """Points that were looked at; in a CUDA graph, when it was captured."""
        self.passed_over = SeenPoints()
        """Points that gave an output on another device, sparse or nested."""
        self.routers = SeenPoints()
        """Points that ids were looked at for."""
        self._together: dict[int, int] = {}
        """Point -> the first of those that are watched in one launch with it."""
        self.padding: torch.Tensor | None = None
        """int8 of the mask's shape: which rows are padding, where that is not all from a certain one on."""
        self._masks: dict[int, torch.Tensor] = {}
        """Elements, a power of two -> memory for masks, which stays where it is: CUDA graphs read it."""

    def point(self, name: str) -> int:
        """The number of a new point. Raises ValueError where there is room for no more."""
        if len(self.names) >= self.found.shape[0]:
            raise ValueError(f"a trace of {self.found.shape[0]} points is full; give a larger capacity")
        self.names.append(name)
        for one in (self.looked, self.passed_over, self.routers):
            one.take()
        return len(self.names) - 1

    def begin(self, real: int, padded: int) -> None:
        """A step begins with `padded` rows of which the first `real` are no padding."""
        self.padding = None
        begin_step(self.header, real, padded)

    def begin_masked(self, mask: torch.Tensor) -> None:
        """A step begins whose padding rows are those where `mask`, of any shape, is not 0."""
        rows = mask.numel()
        size = 1 << max(rows - 1, 0).bit_length()
        if size not in self._masks:
            with torch.inference_mode(False):
                self._masks[size] = torch.zeros(size, dtype=torch.int8, device=self._device)
        self.padding = self._masks[size][:rows].view(mask.shape)
        self.padding.copy_(mask != 0)
        begin_step(self.header, rows, rows)
        self.header[PADDED].copy_(rows + self.padding.sum())
        self.header[MASKED].fill_(rows)

    def end(self) -> None:
        """The step is over; what follows belongs to none until the next one begins."""
        end_step(self.header)

    def watch(self, point: int, x: torch.Tensor) -> None:
        """Look at `x` of a floating type; `row_dimensions` says what its rows are.

        Nothing is read of one without elements, and of a type that holds two numbers in a byte.
        """
        if self._is_elsewhere(x):
            self.passed_over.add(point)
            return
        self.looked.add(point)
        if not x.numel() or x.dtype is torch.float4_e2m1fn_x2:
            return
        padding, mask = self.padding, None if self.padding is None else self.padding.shape
        dimensions = row_dimensions(x.shape, mask)
        group = 0 if mask is None else rows_each(dimensions, mask)
        if not group:  # in a step with a mask such rows are neither real nor padding
            padding, group = None, group_of(dimensions)
        rows = x.detach().reshape(math.prod(dimensions), -1)  # [rows, columns]
        if rows.element_size() == 1:
            rows = rows.to(torch.float32)  # torch looks for Inf in no such type on the CPU
        flat = None if padding is None else padding.view(-1)  # [elements]
        if torch.compiler.is_compiling():
            torch.ops.moedoctor.watch_rows(rows, self.header, self.found, flat, point, group)
        else:
            watch_rows(rows, self.header, self.found, flat, point, group)

    def watch_three(self, points: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Look at three tensors [rows, columns] of the same rows, in the order in which they were made."""
        here = not any(self._is_elsewhere(one) for one in tensors)
        side_by_side = here and all(one.stride(1) == 1 and one.element_size() > 1 for one in tensors)
        if has_kernel(tensors[0]) and tensors[0].shape[0] and side_by_side and self.padding is None:
            from moedoctor.kernels.watch import launch_watch_three

            for point in points:
                self.looked.add(point)
            self._together.update(dict.fromkeys(points, points[0]))
            launch_watch_three(tensors, self.header, self.found, points)
            return
        for point, one in zip(points, tensors, strict=True):
            self.watch(point, one)

    def watch_last(self, point: int, x: torch.Tensor) -> None:
        """Look at `x` [..., columns], after which the step is over."""
        here = not self._is_elsewhere(x)
        x = x.reshape(-1, x.shape[-1]) if here and x.dim() != 2 else x  # [rows, columns]
        if here and has_kernel(x) and x.numel() and self.padding is None:
            from moedoctor.kernels.watch import launch_watch

            self.looked.add(point)
            launch_watch(x, self.header, self.found, point, None, ends=True)
            return
        self.watch(point, x)
        self.end()

    def watch_ids(self, point: int, ids: torch.Tensor, num_experts: int, *, own: bool = False) -> None:
        """Look at expert ids [T, K]; those of another number of dimensions are passed over.

        `own`: T is the number of the step's rows, padding included, and there is no mask.
        """
        if ids.dim() != 2:
            return
        if self._is_elsewhere(ids):
            self.passed_over.add(point)
            return
        self.looked.add(point)
        self.routers.add(point)
        ids = ids.view(torch.int32) if ids.dtype is torch.uint32 else ids  # [T, K]
        if own:
            watch_own_ids(ids, self.header, self.ids, num_experts, point)
            return
        padding = None if self.padding is None else self.padding.view(-1)  # [elements]
        look = torch.ops.moedoctor.watch_ids if torch.compiler.is_compiling() else watch_ids
        look(ids, self.header, self.ids, self.other_ids, padding, num_experts, point)

    def _is_elsewhere(self, x: torch.Tensor) -> bool:
        """Whether a kernel of the record's device cannot read the rows of `x`."""
        return x.device != self._device or x.layout is not torch.strided or x.is_nested

    def report(self) -> NanReport:
        """Everything that was recorded, a step that still runs included; waits for the device."""
        header = self.header.cpu().clone()
        end_step(header)
        found, ids, others = self.found.cpu(), self.ids.cpu(), self.other_ids.cpu()
        known = [header.tolist()[STEPS_WITH + kind] for kind in range(KINDS)]
        return NanReport(
            steps=int(header[STEPS]),
            steps_with_padding=int(header[PADDED_STEPS]),
            pad_tokens=int(header[PAD_TOKENS]),
            nan_in_real=known[0],
            inf_in_real=known[1],
            nan_in_padding=known[PADDING],
            inf_in_padding=known[PADDING + 1],
            nan_in_unknown=known[UNKNOWN],
            inf_in_unknown=known[UNKNOWN + 1],
            first_real=self._first(found, 0),
            first_padding=self._first(found, PADDING),
            first_unknown=self._first(found, UNKNOWN),
            points=tuple(
                _point_counts(name, found[index].tolist())
                for index, name in enumerate(self.names)
                if bool(found[index, :, ROWS].any())
            ),
            routers=tuple(
                _router_counts(self.names[index], ids[index].tolist(), others[index].tolist())
                for index in range(len(self.names))
                if bool(ids[index, 0].any()) or bool(others[index, 0].any())
            ),
            watched=len(self.names),
            routers_watched=len(self.routers.points),
            looked_at=len(self.looked.points),
            passed_over=len(self.passed_over.points),
            not_reached=len(self.names) - len(self.looked.points | self.passed_over.points),
        )

    def _first(self, found: torch.Tensor, offset: int) -> Finding | None:
        seen = [
            (int(found[index, kind, FIRST_SEQUENCE]), index, kind)
            for index in range(len(self.names))
            for kind in (offset, offset + 1)
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


def _point_counts(name: str, found: list[list[int]]) -> PointCounts:
    counts = [
        (found[which][field], found[which + PADDING][field], found[which + UNKNOWN][field])
        for field in (ROWS, STEPS_FOUND)
        for which in (0, 1)
    ]
    return PointCounts(name, *counts)


def _router_counts(name: str, counts: list[list[list[int]]], others: list[list[list[int]]]) -> RouterCounts:
    rows, steps = ([*known, other[0]] for known, other in zip(counts, others, strict=True))
    repeated, outside, sentinel = (tuple(one[kind] for one in rows) for kind in range(ID_KINDS))
    firsts = [step[0] for step in steps if step[0]]
    return RouterCounts(name, repeated, outside, sentinel, min(firsts, default=0))
