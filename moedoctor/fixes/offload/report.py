"""The report of an offload, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moedoctor.fixes.offload.plan import RULES, Plan, measure_span
from moedoctor.fixes.offload.storage import Originals, StoredLayer


@dataclass(frozen=True)
class Placement:
    """The place of a parameter after `moedoctor.fixes.offloader.offload`."""

    name: str
    """As `module.named_parameters()` names it; a tied parameter has a row for each of its names."""
    bytes: int
    """From its first to its last element; 0 in the further rows of a tied parameter."""
    lives: str
    """``host`` or ``device``."""
    pinned: bool
    """True if that host memory is page-locked."""
    access: str
    """Its way to a kernel: ``copy`` (through a device buffer), ``view`` (over the bus) or ``resident``."""
    reason: str
    """The reason that it is there."""


@dataclass(frozen=True)
class OffloadReport:
    """The rows and their sums, in bytes."""

    placements: tuple[Placement, ...]
    rules: tuple[str, ...]
    """The rules by which tensors stay on the device, as applied."""
    budget_bytes: int
    host_bytes: int
    """Weights that live on the host now."""
    pinned_bytes: int
    freed_bytes: int
    """Device memory of those weights that was given back: its storages are gone, which was checked."""
    held_bytes: int
    """Device memory of those weights that something outside of the module still holds on to."""
    buffer_bytes: int
    """The fixed device buffers that the weights are copied into."""
    notes: tuple[str, ...] = ()
    """Not as asked: no pinned memory, memory held by others, a budget that is not used up."""

    @property
    def net_bytes(self) -> int:
        """The bytes that the device gained."""
        return self.freed_bytes - self.buffer_bytes

    def __str__(self) -> str:
        """The rows as aligned text, then the sums, what did not go as asked, and the rules."""
        rows = [("name", "bytes", "lives", "pinned", "access", "reason")]
        for row in self.placements:
            pinned = "yes" if row.pinned else "no"
            rows.append((row.name, str(row.bytes), row.lives, pinned, row.access, row.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.append(
            f"{self.host_bytes} of at most {self.budget_bytes} bytes on the host, {self.pinned_bytes} pinned;"
            f" {self.freed_bytes} freed on the device, {self.buffer_bytes} taken for buffers"
        )
        rules = [f"stays on the device by {rule}" for rule in self.rules]
        return "\n".join([*lines, *self.notes, *rules])


def write_report(
    plan: Plan,
    stored: Sequence[StoredLayer],
    budget: int,
    access: str,
    originals: Originals,
    buffers: Sequence[torch.Tensor],
    failure: str | None,
) -> OffloadReport:
    """Report what was done, read off the result. `failure`: why memory is not pinned."""
    layer_of = {weight: layer for layer in stored for weight, _ in layer.items}
    rows = []
    for weight in plan.weights:
        layer = layer_of.get(weight)
        for name in weight.names:
            size = measure_span(weight.parameter) if name == weight.names[0] else 0
            if layer is None:
                rows.append(Placement(name, size, "device", False, "resident", plan.reasons[weight]))
            else:
                reason = f"weight of {layer.name or 'the module'}"
                rows.append(Placement(name, size, "host", layer.block.pinned, access, reason))
    on_host = [(region.nbytes, layer.block.pinned) for layer in stored for _, region in layer.items]
    report = OffloadReport(
        placements=tuple(rows),
        rules=RULES,
        budget_bytes=budget,
        host_bytes=sum(size for size, _ in on_host),
        pinned_bytes=sum(size for size, pinned in on_host if pinned),
        freed_bytes=sum(size for storage, size in originals if storage.expired()),
        held_bytes=sum(size for storage, size in originals if not storage.expired()),
        buffer_bytes=sum(buffer.numel() for buffer in buffers),
    )
    return replace(report, notes=tuple(_write_notes(report, len(stored), access, failure)))


def _write_notes(report: OffloadReport, layers: int, access: str, failure: str | None) -> list[str]:
    notes = [failure] if failure is not None else []
    if not layers:
        notes.append("nothing was offloaded: see the reasons")
    elif layers == 2 and access == "copy":
        notes.append("two layers share one buffer, so no copy overlaps the computation of the other")
    if report.held_bytes:
        notes.append(
            f"{report.held_bytes} bytes are not free: something outside of the module holds on to them"
        )
    if layers and report.net_bytes <= 0:
        notes.append("the device gains nothing: the buffers are as large as what was freed")
    return notes
