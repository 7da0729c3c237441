"""The record that a NaN trace keeps on the device: written by every watch, read once at the end.

`NanState` is the record. Kernels write it if the device has Triton, else torch operators do. A row of an
output may be known to be real, or padding, or neither: the latter if the output has another number of rows
than the step, and no multiple of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from moedoctor.kernels.device_guard import has_kernels
from moedoctor.reference.expert_ids import count_rows
from moedoctor.trace.nan_report import Finding, NanReport, PointCounts, RouterCounts

STEP, ACTIVE, REAL, PADDED, SEQUENCE, STEPS, PADDED_STEPS, PAD_TOKENS = range(8)
STEPS_WITH, NOW, THROUGH, MASKED, HEADER = 8, 16, 24, 25, 26
"""Places of the header; as in `moedoctor.kernels.watch`, which is not imported without Triton."""
ROWS, STEPS_FOUND, FIRST_STEP, FIRST_SEQUENCE, LAST_STEP, FIELDS = range(6)
KINDS = 6
"""NaN in real rows, Inf in real rows, NaN in padding, Inf in padding, NaN in others, Inf in others."""
PADDING, UNKNOWN = 2, 4
"""The number added to a kind for padding, and for rows that may be either."""
ALL_REAL = 2**31 - 1
ID_KINDS = 3
_NUMBERS = itertools.count(1)


class PointSet:
    """Points of one trace at which something happened; kept on the host, also by compiled code.

    If torch.compile traces an `add`, the point is added then and there, once: the compiled code looks at the
    point from then on. Code that changed the set at each call would be compiled anew for each other set.
    """

    def __init__(self) -> None:
        self.points: set[int] = set()
        self._adders: list[Callable[[], None]] = []
        self._key = f"set {next(_NUMBERS)}"
        """Unique, so that code that was compiled for another trace is not taken for this one."""

    def make_room(self) -> None:
        """Allow one more point: their numbers are given in this order, from 0."""
        point = len(self._adders)

        def add() -> None:
            self.points.add(point)

        # What torch.compiler.assume_constant_result does, which loads the compiler: two seconds for those who
        # do not compile. It takes no arguments, since the compiler would take constants only.
        add._dynamo_marked_constant = True  # type: ignore[attr-defined]
        self._adders.append(add)

    def add(self, point: int) -> None:
        """Add the point with this number."""
        if self._key:  # always true; the compiler guards on what is asked
            self._adders[point]()


class NanState:
    """Device memory for `capacity` points.

    On a CUDA device with Triton only `report` waits for the device; without Triton, `watch` and `watch_ids`
    do too. Tensors on another device than the record's, sparse and nested ones are passed over; the report
    counts the points that gave such tensors.
    """

    def __init__(self, device: torch.device | str, capacity: int = 1024) -> None:
        with torch.inference_mode(False):  # tensors made in that mode can be written to in no other
            self.header = torch.zeros(HEADER, dtype=torch.int32, device=device)  # [HEADER]
            self.header[REAL] = self.header[PADDED] = ALL_REAL
            self.found = torch.zeros(capacity, KINDS, FIELDS, dtype=torch.int32, device=device)
            """int32 [points, KINDS, FIELDS]"""
            self.ids = torch.zeros(capacity, 2, 2, ID_KINDS, dtype=torch.int32, device=device)
            """int32 [points, (rows, first step), (real, padding), ID_KINDS]"""
            self.other_ids = torch.zeros_like(self.ids)
            """The same for rows that may be either; of the third dimension only the first place is used."""
        self._device = self.header.device
        self._copies: list[torch.Tensor] | None = []
        """The parts of the record in pinned host memory, after some step; None if there is none."""
        self.names: list[str] = []
        self.looked = PointSet()
        """Points that were looked at; in a CUDA graph, when it was captured."""
        self.passed_over = PointSet()
        """Points that gave an output on another device, sparse or nested."""
        self.routers = PointSet()
        """Points that were looked at for ids."""
        self._together: dict[int, int] = {}
        """Point -> the first of those that are watched in one launch with it."""
        self.padding: torch.Tensor | None = None
        """int8 of the mask's shape: which rows are padding. None if they are the rows from a number on."""
        self._masks: dict[int, torch.Tensor] = {}
        """Elements, a power of two -> memory for masks. CUDA graphs read it, so it keeps its address."""

    def add_point(self, name: str) -> int:
        """Return the number of a new point. Raises ValueError if there is no room for it."""
        if len(self.names) >= self.found.shape[0]:
            raise ValueError(f"a trace of {self.found.shape[0]} points is full; give a larger capacity")
        self.names.append(name)
        for points in (self.looked, self.passed_over, self.routers):
            points.make_room()
        return len(self.names) - 1

    def begin(self, real: int, padded: int) -> None:
        """Begin a step with `padded` rows, of which those from `real` on are padding."""
        self.padding = None
        begin_step(self.header, real, padded)

    def begin_masked(self, mask: torch.Tensor) -> None:
        """Begin a step whose padding rows are those at which `mask`, of any shape, is not 0."""
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
        """End the step; what follows belongs to no step until the next one begins."""
        end_step(self.header)

    def watch(self, point: int, x: torch.Tensor) -> None:
        """Look at `x` of a floating type; `find_row_dimensions` describes its rows.

        A tensor without elements is not read, nor one of a type that holds two numbers in a byte.
        """
        if self._is_elsewhere(x):
            self.passed_over.add(point)
            return
        self.looked.add(point)
        if not x.numel() or x.dtype is torch.float4_e2m1fn_x2:
            return
        padding, mask = self.padding, None if self.padding is None else self.padding.shape
        dimensions = find_row_dimensions(x.shape, mask)
        group = 0 if mask is None else count_rows_each(dimensions, mask)
        if not group:  # in a step with a mask such rows are neither real nor padding
            padding, group = None, count_group_rows(dimensions)
        rows = x.detach().reshape(math.prod(dimensions), -1)  # [rows, columns]
        if rows.element_size() == 1:
            rows = rows.to(torch.float32)  # on the CPU, torch cannot look for Inf in such types
        flat = None if padding is None else padding.view(-1)  # [elements]
        look = torch.ops.moedoctor.watch_rows if torch.compiler.is_compiling() else watch_rows
        look(rows, self.header, self.found, flat, point, group)

    def watch_three(self, points: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Look at three tensors [rows, columns] of the same rows, in the order in which they were made."""
        here = not any(self._is_elsewhere(tensor) for tensor in tensors)
        side_by_side = here and all(tensor.stride(1) == 1 and tensor.element_size() > 1 for tensor in tensors)
        if has_kernels(self._device) and tensors[0].shape[0] and side_by_side and self.padding is None:
            from moedoctor.kernels.watch import launch_watch_three

            for point in points:
                self.looked.add(point)
            self._together.update(dict.fromkeys(points, points[0]))
            launch_watch_three(tensors, self.header, self.found, points)
            return
        for point, tensor in zip(points, tensors, strict=True):
            self.watch(point, tensor)

    def watch_last(self, point: int, x: torch.Tensor) -> None:
        """Look at `x` [..., columns], and end the step."""
        here = not self._is_elsewhere(x)
        x = x.reshape(-1, x.shape[-1]) if here and x.dim() != 2 else x  # [rows, columns]
        if here and has_kernels(self._device) and x.numel() and self.padding is None:
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
        if own:  # the rows are those of the step, one for one: that takes one launch
            real_rows = self.header[REAL : REAL + 1]  # [1]
            _check_ids(ids, num_experts, self.ids[point], real_rows, self.header[:2])
            return
        padding = None if self.padding is None else self.padding.view(-1)  # [elements]
        look = torch.ops.moedoctor.watch_ids if torch.compiler.is_compiling() else watch_ids
        look(ids, self.header, self.ids, self.other_ids, padding, num_experts, point)

    def _is_elsewhere(self, x: torch.Tensor) -> bool:
        """Return True if a kernel of the record's device cannot read the rows of `x`."""
        return x.device != self._device or x.layout is not torch.strided or x.is_nested

    def mirror(self) -> None:
        """Begin a copy of the record to the host, without waiting, for `last_report`; only on a GPU."""
        if self._device.type != "cuda" or self._copies is None:
            return
        if not self._copies:
            try:
                with torch.inference_mode(False):
                    self._copies = [
                        torch.zeros_like(part, device="cpu", pin_memory=True) for part in self._parts
                    ]
            except RuntimeError:  # without pinned memory, as on some WSL, each copy would wait
                self._copies = None
                return
        used = len(self.names)
        for copy, part in zip(self._copies, self._parts, strict=True):
            rows = len(part) if part is self.header else used
            copy[:rows].copy_(part[:rows], non_blocking=True)

    def last_report(self) -> NanReport | None:
        """Return what `mirror` copied last, if the device can no longer be read; None if nothing was."""
        return self._report(self._copies) if self._copies else None

    def report(self) -> NanReport:
        """Return everything that was recorded, a step that still runs included; waits for the device."""
        return self._report([part.cpu() for part in self._parts])

    @property
    def _parts(self) -> tuple[torch.Tensor, ...]:
        return self.header, self.found, self.ids, self.other_ids

    def _report(self, parts: Sequence[torch.Tensor]) -> NanReport:
        record = parts[0].clone()  # [HEADER]
        end_step(record)
        header = record.tolist()
        number = len(self.names)
        found, ids, others = (part[:number].tolist() for part in parts[1:])  # [points][...] each
        kinds = [f"{what}_in_{rows}" for rows in ("real", "padding", "unknown") for what in ("nan", "inf")]
        return NanReport(
            steps=header[STEPS],
            steps_with_padding=header[PADDED_STEPS],
            pad_tokens=header[PAD_TOKENS],
            **dict(zip(kinds, header[STEPS_WITH : STEPS_WITH + KINDS], strict=True)),
            first_real=self._find_first(found, 0),
            first_padding=self._find_first(found, PADDING),
            first_unknown=self._find_first(found, UNKNOWN),
            points=tuple(
                _count_point(name, kinds)
                for name, kinds in zip(self.names, found, strict=True)
                if any(kind[ROWS] for kind in kinds)
            ),
            routers=tuple(
                _count_router(name, known, other)
                for name, known, other in zip(self.names, ids, others, strict=True)
                if any(map(any, (*known[0], *other[0])))
            ),
            watched=number,
            routers_watched=len(self.routers.points),
            looked_at=len(self.looked.points),
            passed_over=len(self.passed_over.points),
            not_reached=number - len(self.looked.points | self.passed_over.points),
        )

    def _find_first(self, found: list[list[list[int]]], offset: int) -> Finding | None:
        sightings = [
            (kinds[kind][FIRST_SEQUENCE], index, kind)
            for index, kinds in enumerate(found)
            for kind in (offset, offset + 1)
            if kinds[kind][ROWS]
        ]
        if not sightings:
            return None
        order, index, kind = min(sightings)
        step, leader = found[index][kind][FIRST_STEP], self._together.get(index, index)
        # Rows of one launch run in any order: of its first sightings in this step, the first point counts.
        index, kind = min(
            (index, kind)
            for _, index, kind in sightings
            if self._together.get(index, index) == leader and found[index][kind][FIRST_STEP] == step
        )
        return Finding(self.names[index], "NaN" if kind % 2 == 0 else "Inf", step, order)


def _count_point(name: str, kinds: list[list[int]]) -> PointCounts:
    fields = ((field, kinds[which::2]) for field in (ROWS, STEPS_FOUND) for which in (0, 1))
    return PointCounts(name, *(tuple(kind[field] for kind in alike) for field, alike in fields))


def _count_router(name: str, counts: list[list[list[int]]], others: list[list[list[int]]]) -> RouterCounts:
    rows, steps = ([*known, other[0]] for known, other in zip(counts, others, strict=True))
    firsts = [step[0] for step in steps if step[0]]
    repeated, outside, sentinel = zip(*rows, strict=True)
    return RouterCounts(name, repeated, outside, sentinel, min(firsts, default=0))


def find_row_dimensions(shape: Sequence[int], mask: Sequence[int] | None = None) -> Sequence[int]:
    """Return the dimensions of `shape` that make its rows: all but the last.

    Every element is a row of its own if there are fewer than two dimensions, or if a mask of two or more
    dimensions has the same shape.
    """
    if len(shape) < 2 or (mask is not None and len(mask) > 1 and tuple(shape) == tuple(mask)):
        return tuple(shape) or (1,)
    return tuple(shape[:-1])


def count_rows_each(rows: Sequence[int], mask: Sequence[int]) -> int:
    """Return how many consecutive rows belong to each element of a mask; 0 if that is unknown.

    `rows` are the dimensions that `find_row_dimensions` returns, batch first as the mask's. They must begin
    with the mask's own dimensions, or with one of as many elements: [B, T, heads] and [B * T, heads] do for a
    mask [B, T]. [B, heads, T] does not, and neither does a shape that could be that because it has as many
    heads.
    """
    count, total = math.prod(mask), math.prod(rows)
    if not count or total % count:
        return 0
    if len(rows) == 1:
        return total // count
    if tuple(rows[: len(mask)]) == tuple(mask):
        cut = len(mask)
    elif len(mask) == 1:
        cut = next((size for size in range(1, len(rows) + 1) if math.prod(rows[:size]) == count), 0)
    else:
        cut = int(rows[0] == count)
    inner = {mask[-1], rows[cut - 1]} - {1}
    return total // count if cut and not inner.intersection(rows[cut:]) else 0


def count_group_rows(rows: Sequence[int]) -> int:
    """Return how many consecutive rows may belong to one row of a step, if only the device knows its rows.

    As many rows as the step has are always right. 0 means any number: the rows have one dimension.
    """
    rows = [size for size in rows if size != 1]
    if len(rows) < 2:
        return 0
    first = 1 if len(rows) == 2 else 2  # [T, heads], or [B, T, heads, ...]
    return 1 if rows[first - 1] in rows[first:] else math.prod(rows[first:])


def watch_rows(
    rows: torch.Tensor,
    header: torch.Tensor,
    found: torch.Tensor,
    padding: torch.Tensor | None,
    point: int,
    group: int = 0,
) -> None:
    """Record what `rows` [rows, columns] hold that is not finite, under `point`.

    Each element of `padding` int8 [elements] covers `group` consecutive rows. Without it, `group` rows may
    belong to one row of the step, or one, or with 0 any number.
    """
    if has_kernels(rows.device):
        from moedoctor.kernels.watch import launch_watch

        launch_watch(rows, header, found, point, padding, group=group)
        return
    if not int(header[ACTIVE]):
        return
    offsets = _find_offsets(rows.shape[0], header, padding, group)  # [rows]
    for which, bad in enumerate((rows.isnan().any(1), rows.isinf().any(1))):  # [rows] each
        for offset in (0, PADDING, UNKNOWN):
            count = int((bad & (offsets == offset)).sum())
            if count:
                _record(header, found[point, which + offset], which + offset, count)


def _find_offsets(rows: int, header: torch.Tensor, padding: torch.Tensor | None, group: int) -> torch.Tensor:
    """Return int64 [rows]: 0 for a real row, PADDING, or UNKNOWN."""
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


def watch_ids(
    ids: torch.Tensor,
    header: torch.Tensor,
    counts: torch.Tensor,
    others: torch.Tensor,
    padding: torch.Tensor | None,
    num_experts: int,
    point: int,
) -> None:
    """Add to `counts` at `point` the rows of `ids` [rows, K] that no kernel should be given.

    `padding` is a mask int8 [elements] or None. Rows that may be real or padding are added to `others`.
    """
    rows = ids.shape[0]
    real, padded, masked = header[REAL], header[PADDED], header[MASKED]  # []
    each = rows // padded.clamp_min(1)
    real_rows, known = real * each, (masked == 0) & (each * padded == rows)
    if padding is not None and padding.numel() and rows % padding.numel() == 0:
        by_mask = masked == padding.numel()
        mask = padding.repeat_interleave(rows // padding.numel())  # [rows]
        # Real rows first, as the check needs them.
        ids = torch.where(by_mask, ids[(mask != 0).to(torch.int8).argsort(stable=True)], ids)
        real_rows, known = torch.where(by_mask, (mask == 0).sum(), real_rows), known | by_mask
    everything = real >= padded
    known = known | everything
    real_rows = torch.where(everything, rows, real_rows).to(torch.int32).reshape(1)
    for applies, target in ((known, counts), (~known, others)):
        step = torch.stack((header[STEP], header[ACTIVE] * applies))  # [2]
        _check_ids(ids, num_experts, target[point], real_rows if target is counts else None, step)


def _check_ids(
    ids: torch.Tensor,
    num_experts: int,
    counts: torch.Tensor,
    real_rows: torch.Tensor | None,
    step: torch.Tensor,
) -> None:
    """Add to `counts` as `watch_ids` does; `step` int32 [2]: the number of the step, and 0 if none runs."""
    if has_kernels(ids.device):
        from moedoctor.kernels.expert_ids import launch_check

        launch_check(ids, num_experts, counts, real_rows, step)
    elif int(step[1]):
        rows = torch.zeros_like(counts[0])  # [2, ID_KINDS]
        count_rows(ids, num_experts, rows, real_rows)
        counts[0] += rows
        counts[1] = torch.where((rows > 0) & (counts[1] == 0), step[0], counts[1])


def begin_step(header: torch.Tensor, real: int, padded: int) -> None:
    """Start the next step in the record. A step that still runs, because the model raised, ends."""
    if has_kernels(header.device):
        from moedoctor.kernels.watch import launch_begin

        launch_begin(header, real, padded)
        return
    end_step(header)
    header[STEP] += 1
    header[REAL], header[PADDED], header[MASKED] = real, padded, 0
    header[NOW : NOW + KINDS] = 0
    header[ACTIVE] = 1


def end_step(header: torch.Tensor) -> None:
    """Add up what the step showed; does nothing if none runs."""
    if has_kernels(header.device):
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


# A graph compiler takes an operator as it is, and keeps one that changes its arguments.
for _function, _changed, _schema in (
    (
        watch_rows,
        ("header", "found"),
        "(Tensor rows, Tensor(a!) header, Tensor(b!) found, Tensor? padding, int point, SymInt group) -> ()",
    ),
    (
        watch_ids,
        ("counts", "others"),
        "(Tensor ids, Tensor header, Tensor(a!) counts, Tensor(b!) others, Tensor? padding, "
        "int num_experts, int point) -> ()",
    ),
    (begin_step, ("header",), "(Tensor(a!) header, SymInt real, SymInt padded) -> ()"),
    (end_step, ("header",), "(Tensor(a!) header) -> ()"),
):
    torch.library.custom_op(
        f"moedoctor::{_function.__name__}", _function, mutates_args=_changed, schema=_schema
    ).register_fake(lambda *arguments: None)
