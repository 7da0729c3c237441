"""The engine ``resident``: a slot for every expert, loaded once. Ids are slots."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moedoctor.fixes.cache.engine import CachedExperts, Engine, check_range
from moedoctor.fixes.cache.store import ExpertStore
from moedoctor.fixes.eviction import CacheStats, SlotTable


class ResidentEngine(Engine):
    """Costs nothing a call: no lookup, no synchronisation, no counting.

    Ids on the CPU are checked; those on a GPU are not: kernels that do it would be all that a call costs.
    """

    name = "resident"

    def __init__(self, store: ExpertStore, capacity: int, policy: str, device: torch.device) -> None:
        """Raises ValueError where there are fewer slots than experts."""
        super().__init__(store, capacity, policy, device)
        if capacity < store.num_experts:
            raise ValueError(
                f"engine 'resident' needs a slot for each of {store.num_experts} experts, got {capacity}: "
                "use engine='auto'"
            )
        if store.packed:
            raise ValueError(
                "engine 'resident' copies once and does not unpack: give it a store that is not packed"
            )
        self.slots = store.slots(capacity, device)
        for name, slots in self.slots.items():
            slots[: store.num_experts].copy_(store.tensors[name])
        self.mapping = torch.arange(store.num_experts, dtype=torch.int32, device=device)  # [E]

    def acquire(self, ids: torch.Tensor) -> CachedExperts:
        if ids.device.type == "cpu":
            check_range(ids, self.store.num_experts)
        return CachedExperts(self.slots, ids.to(self.device))

    def groups(self, ids: torch.Tensor, overlap: bool) -> Iterator[CachedExperts]:
        yield self.acquire(ids)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Everything is there."""
        if ids.device.type == "cpu":
            check_range(ids, self.store.num_experts)

    def adopt(self, table: SlotTable) -> None:
        """Everything is there, whatever was used."""

    def stats(self) -> CacheStats:
        """Zeros: no call is counted, and every access is a hit."""
        return CacheStats(0, 0, 0)

    def table(self) -> SlotTable:
        table = SlotTable(self.store.num_experts, self.capacity, self.policy)
        table.plan(range(self.store.num_experts))
        return table

    @property
    def state_bytes(self) -> int:
        return self.mapping.nbytes
