"""What runs in the child for MD008: a device view of pinned memory that is given back too early, or is not.

The order of events is that of vllm#45528: a parameter is offloaded, becomes a device view of pinned memory,
the layer repacks its weights after loading and lets go of what it had, and the next pinned allocation, a
buffer of the batch, gets that memory.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from moedoctor.fixes.offload.pinned import device_view
from moedoctor.results import Observation, Tier, UnavailableError

if TYPE_CHECKING:
    from moedoctor.faults.offload.offload_garbage import OffloadGarbageParameters


class Memory(Protocol):
    """Pinned memory and device views of it."""

    def allocate(self, nbytes: int) -> Any:
        """A block; given back when nobody holds it any more."""

    def bytes_of(self, block: Any) -> torch.Tensor:
        """uint8 [n] on the host."""

    def view(self, block: Any) -> Any:
        """What the device reads `block` through."""

    def read(self, view: Any) -> torch.Tensor:
        """uint8 [n] as the device sees it, on the host."""


def memory_for(tier: Tier, device: str, *, keeps: bool) -> Memory:
    """Simulated or real. `keeps`: whether a view keeps its block. Raises UnavailableError without a GPU."""
    if tier is Tier.MODEL:
        return SimulatedMemory(keeps)
    if not torch.cuda.is_available():
        raise UnavailableError("needs an NVIDIA GPU that torch can use")
    return CudaMemory(torch.device(device), keeps)


@torch.no_grad()
def observe(parameters: OffloadGarbageParameters, memory: Memory) -> Observation:
    """Offload a weight, let go of its host tensor, fill a new buffer as large, and use the weight."""
    generator = torch.Generator().manual_seed(parameters.seed)
    weight = torch.randint(0, 120, (parameters.bytes,), dtype=torch.uint8, generator=generator)  # [n]
    x = torch.rand(parameters.bytes, dtype=torch.float64, generator=generator)  # [n]
    expected = weight.double() @ x
    block = memory.allocate(parameters.bytes)
    memory.bytes_of(block).copy_(weight)
    first = memory.bytes_of(block).data_ptr()
    view = memory.view(block)
    before = bool((memory.read(view) == weight).all())
    del block
    gc.collect()
    later = memory.allocate(parameters.bytes)
    memory.bytes_of(later).fill_(255)
    seen = memory.read(view)  # [n]
    return Observation(
        {
            "right_before": before,
            "memory_was_reused": memory.bytes_of(later).data_ptr() == first,
            "weights_changed": float((seen != weight).double().mean()),
            "same_bits": bool(seen.double() @ x == expected),
            "error": None,
        }
    )


@dataclass(eq=False)
class _Block:
    start: int
    nbytes: int


@dataclass
class SimulatedMemory:
    """A pool that hands the block that was given back last out first, as torch's pinned allocator does."""

    keeps: bool
    _arena: torch.Tensor = field(init=False)
    _free: list[tuple[int, int]] = field(default_factory=list)
    _end: int = 0

    def __post_init__(self) -> None:
        self._arena = torch.empty(4 << 28, dtype=torch.uint8)  # untouched pages take no memory

    def allocate(self, nbytes: int) -> _Block:
        fitting = [one for one in self._free if one[1] == nbytes]
        if fitting:
            self._free.remove(fitting[-1])
            block = _Block(*fitting[-1])
        else:
            block = _Block(self._end, nbytes)
            self._end += nbytes
        weakref.finalize(block, self._free.append, (block.start, block.nbytes))
        return block

    def bytes_of(self, block: _Block) -> torch.Tensor:
        return self._arena[block.start : block.start + block.nbytes]  # [n]

    def view(self, block: _Block) -> Any:
        return self.bytes_of(block), block if self.keeps else None

    def read(self, view: Any) -> torch.Tensor:
        return view[0].clone()  # type: ignore[no-any-return]


class _AddressOnly:
    """An address that nobody is told is in use: a view with a deleter that does nothing."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


@dataclass(frozen=True)
class CudaMemory:
    """torch's pinned allocator and real device views."""

    device: torch.device
    keeps: bool

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)  # [n]

    def bytes_of(self, block: torch.Tensor) -> torch.Tensor:
        return block

    def view(self, block: torch.Tensor) -> torch.Tensor:
        if self.keeps:
            return device_view(block, self.device)
        return torch.as_tensor(_AddressOnly(block), device=self.device)

    def read(self, view: torch.Tensor) -> torch.Tensor:
        return view.clone().cpu()  # the kernel of clone reads over the bus
