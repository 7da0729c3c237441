"""Memory for MoE calls that are recorded, and how they get there without Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STEP, OWNER, OWNED_STEP, COUNT, WANTED_LAYER, WANTED_STEP, ROWS, REAL, HEADER = range(9)
"""Places of the header.

OWNER is the number of a layer plus 1, 0 for none. COUNT counts rows that were to be kept, also beyond the
room. WANTED_LAYER is the number of a layer plus 1, 0 for rows with NaN or Inf, -1 for nothing. ROWS is the
number of rows of the call that was kept, REAL how many rows of a call are no padding.
"""


@dataclass(frozen=True)
class MoeInput:
    """What goes into a call of a MoE layer, on its device."""

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


@dataclass(frozen=True)
class KeptRows:
    """Memory for the rows of one call.

    The rows are in pinned host memory if there is a GPU: kernels write there in place, and a device that an
    assertion or an illegal access ends a moment later does not take them along.
    """

    header: torch.Tensor
    """int32 [HEADER] on the device"""
    row: torch.Tensor
    """int32 [R]: the row of the call that each kept row was"""
    x: torch.Tensor
    """[R, H]"""
    output: torch.Tensor
    """[R, H]"""
    ids: torch.Tensor
    """int32 [R, K]"""
    weights: torch.Tensor
    """float32 [R, K]"""
    logits: torch.Tensor
    """float32 [R, E]"""

    @classmethod
    def make(
        cls, rows: int, hidden: int, top_k: int, experts: int, dtype: torch.dtype, device: torch.device
    ) -> KeptRows:
        """Return empty memory for `rows` rows, that keeps nothing yet."""

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            if device.type == "cuda":
                try:
                    return torch.zeros(size, dtype=dtype, pin_memory=True)
                except RuntimeError:  # WSL may not pin
                    return torch.zeros(size, dtype=dtype, device=device)
            return torch.zeros(size, dtype=dtype)

        with torch.inference_mode(False):  # tensors made in that mode can be written to in no other
            kept = cls(
                header=torch.zeros(HEADER, dtype=torch.int32, device=device),
                row=zeros(rows),
                x=zeros(rows, hidden, dtype=dtype),
                output=zeros(rows, hidden, dtype=dtype),
                ids=zeros(rows, top_k),
                weights=zeros(rows, top_k, dtype=torch.float32),
                logits=zeros(rows, experts, dtype=torch.float32),
            )
            kept.header[WANTED_LAYER] = -1
        return kept

    def begin_on_host(self, real: int) -> None:
        """Begin the next step, whose first `real` rows are no padding. Waits for the device."""
        self.header[STEP] += 1
        self.header[REAL] = real

    def keep_on_host(self, layer: int, call: MoeCall) -> None:
        """Do what `moedoctor.kernels.keep.launch_keep` does, with torch. Waits for the device."""
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
        first = header[COUNT]
        self.header[COUNT] += len(found)
        found = found[: max(len(self.row) - first, 0)]  # [R'']
        place = slice(first, first + len(found))
        self.row[place] = found.int().to(self.row.device)
        self.x[place], self.output[place] = x[found].to(self.x.device), output[found].to(self.x.device)
        given = call.input
        for kept, tensor in (
            (self.ids, given.ids),
            (self.weights, given.weights),
            (self.logits, given.logits),
        ):
            if tensor is not None:
                kept[place] = tensor[found].to(kept.device, kept.dtype)


@dataclass(frozen=True)
class SavedCalls:
    """Host memory for what went into the last calls of a layer, a ring of P places with room for R tokens.

    It is a view of memory that another process reads when this one is dead.
    """

    header: torch.Tensor
    """int32 [P, 2]: the step, and the tokens that the call had"""
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
        place, rows = step % len(self.header), min(len(call.x), self.x.shape[1])
        for saved, tensor in (
            (self.x, call.x),
            (self.ids, call.ids),
            (self.weights, call.weights),
            (self.logits, call.logits),
        ):
            if tensor is not None:
                saved[place, :rows] = tensor[:rows].to("cpu", saved.dtype)
        self.header[place] = torch.tensor([step, len(call.x)], dtype=torch.int32)
