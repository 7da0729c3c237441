"""The host's copy of every expert, pinned if possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from moedoctor.fixes.cache.packed import pack
from moedoctor.fixes.offload.pinned import PinError, allocate, register
from moedoctor.kernels.host_address import find_device_address


class ExpertStore:
    """Per-expert host tensors [E, ...], contiguous and never written again. Several caches may share one."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], *, pin: bool = True, packed: bool = False
    ) -> None:
        """Use `weights` as they are if they are contiguous and, with `pin`, pinned; else copy them.

        `packed`: bfloat16 tensors that pack without loss are kept in some 69 % of their bytes instead;
        the packing runs on the current CUDA device if there is one. Pinned copies take whole pages, no more.
        Raises TypeError if `weights` is not a mapping to tensors, ValueError if it is empty, if a tensor has
        no dimension or is not on the CPU, or if they disagree about E.
        """
        self.num_experts = count_experts(weights)
        self.shapes = {name: (tensor.shape[1:], tensor.dtype) for name, tensor in weights.items()}
        """Name -> shape and dtype of one expert's tensor."""
        self.uncached_bytes = sum(tensor.nbytes for tensor in weights.values())
        """Bytes of all experts as the device would hold them."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        parts = {name: pack(tensor, device=device) for name, tensor in weights.items()} if packed else {}
        self.packed = {name: part for name, part in parts.items() if part is not None}
        self.tensors = {
            name: tensor.detach().contiguous() for name, tensor in weights.items() if name not in self.packed
        }  # [E, ...] each
        self.pinned = False
        self.reason: str | None = "pinning was not asked for"
        """The reason that the tensors are not pinned; None if they are."""
        if pin:
            self._pin()

    def _pin(self) -> None:
        if not torch.cuda.is_available():
            self.reason = "there is no GPU to pin memory for"
            return
        try:
            tensors = {name: _pin_tensor(tensor) for name, tensor in self.tensors.items()}
            packed = {
                name: replace(part, blocks=_pin_tensor(part.blocks)) for name, part in self.packed.items()
            }
        except PinError as error:  # the driver refuses, or the limit on locked memory is reached
            self.reason = str(error)
            return
        self.tensors, self.packed, self.pinned, self.reason = tensors, packed, True, None

    def is_readable(self, device: torch.device) -> bool:
        """Return True if kernels on `device` can read the pinned tensors in place."""
        try:
            for tensor in (*self.tensors.values(), *(part.blocks for part in self.packed.values())):
                find_device_address(tensor, device)
        except PinError:
            return False
        return True

    @property
    def nbytes(self) -> int:
        """Bytes that the host holds."""
        packed = sum(part.blocks.nbytes for part in self.packed.values())
        return packed + sum(tensor.nbytes for tensor in self.tensors.values())

    def make_slots(self, capacity: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Room for `capacity` experts on `device`: [capacity, ...] for each tensor, zeroed."""
        return {
            name: torch.zeros((capacity, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in self.shapes.items()
        }


def count_experts(weights: Mapping[str, torch.Tensor]) -> int:
    """E of host tensors [E, ...]. Raises TypeError or ValueError as `ExpertStore`."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a mapping of names to host tensors, got {type(weights).__name__}")
    if not weights:
        raise ValueError("weights is empty: a cache needs at least one tensor [E, ...]")
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"weights[{name!r}] must be a tensor [E, ...], got {type(tensor).__name__}")
        if tensor.dim() < 1:
            raise ValueError(f"weights[{name!r}] must be a tensor [E, ...], got one without dimensions")
        if tensor.device.type != "cpu":
            raise ValueError(
                f"weights[{name!r}] must be a host tensor [E, ...], got {tuple(tensor.shape)} on "
                f"{tensor.device}: move it with .cpu()"
            )
    sizes = {name: int(tensor.shape[0]) for name, tensor in weights.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise ValueError(f"weights must agree on the number of experts, at least 1; got {sizes}")
    return next(iter(sizes.values()))


def _pin_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` if it is pinned, else a copy that keeps its block for as long as a view of it lives.

    Page-locked in its own size: torch's pinned memory is rounded up to a power of two. Raises PinError.
    """
    if tensor.is_pinned():
        return tensor
    block, failure = allocate(tensor.nbytes, register)
    if failure is not None:
        raise PinError(failure)
    return block.bytes.view(tensor.dtype).view(tensor.shape).copy_(tensor)
