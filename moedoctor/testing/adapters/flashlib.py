"""flashlib's slot cache for a device: its admission, and the copies that it plans. Needs Triton."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch

from moedoctor.testing.questions import declare

_IDS = "lru_ensure: ids outside [0, num_total) are undefined behavior"
_COUNT = "lru_ensure: the caller must guarantee |distinct(query)| <= num_cached"
_UNDEFINED = {"skipped_ids": _IDS, "unknown_ids": _IDS}
_UNDEFINED |= {"too_many_experts": _COUNT, "usable_after_an_error": _COUNT}


@declare(kind="cache", package="flashlib", undefined=_UNDEFINED)
class SlotCache:
    """The rows of an expert table in slots, as `lru_ensure` plans them."""

    def __init__(self, weights: Mapping[str, torch.Tensor], capacity: int, device: str) -> None:
        experts = next(iter(weights.values())).shape[0]
        self.host = weights
        self.slots = {
            name: torch.zeros(capacity, *tensor.shape[1:], dtype=tensor.dtype, device=device)
            for name, tensor in weights.items()
        }
        self.maps = [
            torch.full((size,), -1, dtype=torch.int32, device=device) for size in (experts, capacity)
        ]
        self.usage = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.step = torch.zeros((), dtype=torch.int32, device=device)

    def acquire(self, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Make the experts of `ids` [T, K] resident."""
        query = ids.int().flatten()  # [T * K]
        out = torch.empty_like(query)
        plan = [query.new_zeros(min(len(query), len(self.usage))) for _ in range(2)]
        count = torch.zeros((), dtype=torch.int64, device=query.device)
        admit = importlib.import_module("flashlib.kernels.slot_cache").lru_ensure
        admit(query, *self.maps, self.usage, self.step, out, *plan, count)
        sources, targets = (each[: int(count)].cpu() for each in plan)
        for name, slots in self.slots.items():
            slots[targets.long().to(slots.device)] = self.host[name][sources.long()].to(slots.device)
        return self.slots, out.view(ids.shape)
