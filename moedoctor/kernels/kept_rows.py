"""Memory for MoE calls that are recorded, and how they get there without Triton."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

STEP, OWNER, OWNED_STEP, COUNT, WANTED_LAYER, WANTED_STEP, ROWS, REAL, HEADER = range(9)
"""Places of the header.

OWNER is the number of a layer plus 1, 0 for none. COUNT counts rows that were to be kept, also beyond the
room. WANTED_LAYER is the number of a layer plus 1, 0 for rows with NaN or Inf, -1 for nothing: also when the
wanted call is kept, because a draft model's layer runs several times in a step. ROWS is the number of rows of
the call that was kept, REAL how many rows of a call are no padding.
"""


@dataclass(frozen=True)
class MoeInput:
    """The inputs of a call of a MoE layer, on its device."""

    x: torch.Tensor
    """[T, H]"""
    ids: torch.Tensor | None = None
    """integer [T, K]; None if the backend routes by itself"""
    weights: torch.Tensor | None = None
    """floating [T, K]"""
    logits: torch.Tensor | None = None
    """floating [T, E]"""


@dataclass(frozen=True)
class MoeCall:
    """A call of a MoE layer."""

    input: MoeInput
    output: torch.Tensor
    """[T, H]: what came out, of the routed experts only"""


class Sizes(NamedTuple):
    """The sizes and types of the rows of a call, which decide their memory."""

    hidden: int
    dtype: torch.dtype
    """Of x, as is `hidden`."""
    output_hidden: int
    output_dtype: torch.dtype
    top_k: int
    experts: int


Part = tuple[str, torch.Tensor | None, torch.Tensor]
"""The name of a part of a call, its tensor [T, columns] and its memory [..., columns]."""


def list_parts(call: MoeInput, memory: KeptRows | SavedCalls) -> tuple[Part, ...]:
    """Return the parts of what goes into a call."""
    return (
        ("x", call.x, memory.x),
        ("ids", call.ids, memory.ids),
        ("weights", call.weights, memory.weights),
        ("logits", call.logits, memory.logits),
    )


def check_parts(rows: int, parts: Iterable[Part]) -> None:
    """Raise ValueError if a part of a call of `rows` rows does not fit its memory.

    Kernels write whole rows, so a wider one would end outside of the memory. x and the output are kept in
    their own types.
    """
    for name, tensor, memory in parts:
        if tensor is None:
            continue
        dtype = memory.dtype if name in ("x", "output") else tensor.dtype
        size, expected = list(tensor.shape), [rows, memory.shape[-1]]
        if (size, tensor.dtype) != (expected, dtype):
            raise ValueError(
                f"its {name} is {tensor.dtype} {size}, expected {dtype} {expected} as in its first call"
            )


def make_header(device: torch.device) -> torch.Tensor:
    """Return the header [HEADER] of a record that keeps nothing yet."""
    with torch.inference_mode(False):  # tensors made in that mode can be written to in no other
        header = torch.zeros(HEADER, dtype=torch.int32, device=device)
        header[WANTED_LAYER] = -1
    return header


def begin_step_on_host(header: torch.Tensor, real: int, layer: int, step: int, *, frees: bool) -> None:
    """Do what `moedoctor.kernels.keep.launch_step` does, with torch."""
    header[STEP] += 1
    header[REAL], header[WANTED_LAYER], header[WANTED_STEP] = real, layer, step
    if frees:
        header[OWNER : COUNT + 1] = 0


@dataclass(frozen=True)
class KeptRows:
    """Memory for the rows of one call.

    The rows are in pinned host memory if there is a GPU: kernels write there in place, and a device that an
    assertion or an illegal access ends a moment later does not take them along.
    """

    header: torch.Tensor
    """int32 [HEADER] on the device; layers of different sizes share it, so they keep one call in all"""
    row: torch.Tensor
    """int32 [R]: the row of the call that each kept row was"""
    x: torch.Tensor
    """[R, H]"""
    output: torch.Tensor
    """[R, H'], where backends may pad x or the output alone"""
    ids: torch.Tensor
    """int32 [R, K]"""
    weights: torch.Tensor
    """float32 [R, K]"""
    logits: torch.Tensor
    """float32 [R, E]"""

    @classmethod
    def make(cls, rows: int, sizes: Sizes, header: torch.Tensor) -> KeptRows:
        """Return empty memory for `rows` rows."""

        def make_zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            if header.is_cuda:
                try:
                    return torch.zeros(size, dtype=dtype, device="cpu", pin_memory=True)
                except RuntimeError:  # WSL may not pin
                    return torch.zeros(size, dtype=dtype, device=header.device)
            return torch.zeros(size, dtype=dtype)

        with torch.inference_mode(False):
            return cls(
                header=header,
                row=make_zeros(rows),
                x=make_zeros(rows, sizes.hidden, dtype=sizes.dtype),
                output=make_zeros(rows, sizes.output_hidden, dtype=sizes.output_dtype),
                ids=make_zeros(rows, sizes.top_k),
                weights=make_zeros(rows, sizes.top_k, dtype=torch.float32),
                logits=make_zeros(rows, sizes.experts, dtype=torch.float32),
            )

    def check(self, call: MoeCall) -> None:
        """Raise ValueError if a call does not fit this memory."""
        check_parts(len(call.input.x), self._list_parts(call))

    def _list_parts(self, call: MoeCall) -> tuple[Part, ...]:
        return ("output", call.output, self.output), *list_parts(call.input, self)

    def keep_on_host(self, layer: int, call: MoeCall) -> None:
        """Do what `moedoctor.kernels.keep.launch_keep` does, with torch. Waits for the device."""
        self.check(call)
        header = self.header.tolist()
        wanted, step = header[WANTED_LAYER], header[STEP]
        x, output = call.input.x, call.output
        if wanted == layer + 1 and step == header[WANTED_STEP]:
            keeps = torch.ones(len(x), dtype=torch.bool, device=x.device)  # [T]
        elif wanted == 0:
            keeps = ~output.isfinite().all(1) & x.isfinite().all(1)  # [T]
        else:
            return
        found = keeps[: header[REAL]].nonzero().flatten()  # [R']
        if not len(found) or header[OWNER] not in (0, layer + 1):
            return
        if header[OWNER] and header[OWNED_STEP] != step:
            return
        self.header[OWNER], self.header[OWNED_STEP], self.header[ROWS] = layer + 1, step, len(x)
        if wanted:
            self.header[WANTED_LAYER] = -1
        first = header[COUNT]
        self.header[COUNT] += len(found)
        found = found[: max(len(self.row) - first, 0)]  # [R'']
        place = slice(first, first + len(found))
        self.row[place] = found.int().to(self.row.device)
        for _, tensor, kept in self._list_parts(call):
            if tensor is not None:
                kept[place] = tensor[found].to(kept.device, kept.dtype)


@dataclass(frozen=True)
class SavedCalls:
    """Host memory for what went into the last calls of a layer, a ring of P places with room for R tokens.

    It is a view of memory that another process reads when this one is dead.
    """

    header: torch.Tensor
    """int64 [P, 6]: the step, the tokens that the call had, the addresses of x, ids, weights and logits"""
    x: torch.Tensor
    """[P, R, H]"""
    ids: torch.Tensor
    """int32 [P, R, K], -1 if the backend routes by itself"""
    weights: torch.Tensor
    """float32 [P, R, K]"""
    logits: torch.Tensor
    """float32 [P, R, E]"""

    def save_on_host(self, step: int, call: MoeInput) -> None:
        """Do what `moedoctor.kernels.save_call.launch_save` does, with torch. Waits for the device."""
        self.check(call)
        place, rows = step % len(self.header), min(len(call.x), self.x.shape[1])
        addresses = []
        for _, tensor, saved in list_parts(call, self):
            addresses.append(-1 if tensor is None else tensor.data_ptr())
            if tensor is not None:
                saved[place, :rows] = tensor[:rows].to("cpu", saved.dtype)
        self.header[place] = torch.tensor([step, len(call.x), *addresses])

    def check(self, call: MoeInput) -> None:
        """Raise ValueError if a call does not fit this memory."""
        check_parts(len(call.x), list_parts(call, self))
