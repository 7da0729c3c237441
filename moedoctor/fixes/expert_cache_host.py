"""The engine ``host``: bookkeeping in Python, copies on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moedoctor.fixes._expert_store import ExpertStore
from moedoctor.fixes.eviction import CacheOverflow, CacheStats, Load, SlotTable
from moedoctor.fixes.expert_cache_engine import CachedExperts, Engine

_FEW = 512
"""Ids that a Python set sorts faster than torch does."""


class HostEngine(Engine):
    """Reads the ids once a call, which waits for the device; nothing else does."""

    name = "host"

    def __init__(self, store: ExpertStore, capacity: int, policy: str, device: torch.device) -> None:
        """Raises ValueError where the store is packed: only kernels unpack."""
        super().__init__(store, capacity, policy, device)
        if store.packed:
            raise ValueError("engine 'host' copies whole tensors and cannot unpack: use engine='device'")
        self.slots = store.slots(capacity, device)
        self._table = SlotTable(store.num_experts, capacity, policy)
        self._asynchronous = device.type == "cuda" and store.pinned
        # Row E is for ids of -1, which index from the end.
        blank = torch.full((store.num_experts + 1,), -1, dtype=torch.int32)
        self._staging = blank.pin_memory() if self._asynchronous else blank  # [E + 1]
        self._group_staging = self._staging.clone()  # [E + 1]
        if self._asynchronous:
            self._group_staging = self._group_staging.pin_memory()
            self._copies = torch.cuda.Stream(device)
            self._ready = torch.cuda.Event()
            self._staged = torch.cuda.Event()
        self._lookup = blank.to(device, copy=True)  # [E + 1]
        self._group_lookup = blank.to(device, copy=True)  # [E + 1]
        self.mapping = self._lookup[:-1]  # [E]
        self._calls = self._hits = self._misses = self._prefetched = 0
        self._pending = False
        """Prefetches are under way that no call has waited for."""

    def acquire(self, ids: torch.Tensor) -> CachedExperts:
        needed, pairs = self._needed(ids)
        if len(needed) > self.capacity:
            raise CacheOverflow(len(needed), self.capacity)
        self._calls += 1
        self._make_resident(needed)
        return CachedExperts(self.slots, self._slots_of(ids, self._lookup), pairs)

    def groups(self, ids: torch.Tensor, overlap: bool) -> Iterator[CachedExperts]:
        needed, pairs = self._needed(ids)
        self._calls += 1
        if len(needed) <= self.capacity:
            return self._one_group(ids, needed, pairs)
        return self._several_groups(ids, self._table.split(needed))

    def _one_group(self, ids: torch.Tensor, needed: list[int], pairs: int) -> Iterator[CachedExperts]:
        self._make_resident(needed)
        yield CachedExperts(self.slots, self._slots_of(ids, self._lookup), pairs)

    def _several_groups(self, ids: torch.Tensor, parts: list[list[int]]) -> Iterator[CachedExperts]:
        for part in parts:
            self._make_resident(part)
            if self._asynchronous:
                self._staged.synchronize()
            self._group_staging.fill_(-1)
            for expert in part:
                self._group_staging[expert] = self._table.slot_of[expert]
            self._upload(self._group_lookup, self._group_staging)
            slot_ids = self._slots_of(ids, self._group_lookup)  # [T, K]
            yield CachedExperts(self.slots, slot_ids, ids.numel())

    def prefetch(self, ids: torch.Tensor) -> None:
        needed, _ = self._needed(ids)
        loads = self._table.plan(needed).loads
        self._carry_out(loads)
        self._prefetched += len(loads)

    def adopt(self, table: SlotTable) -> None:
        if self._asynchronous:
            torch.cuda.synchronize(self.device)
        self._table = table
        self._staging.fill_(-1)
        held = [Load(expert, slot) for slot, expert in enumerate(table.expert_of) if expert >= 0]
        self._carry_out(held)

    def stats(self) -> CacheStats:
        return CacheStats(self._calls, self._hits, self._misses, prefetched=self._prefetched)

    def table(self) -> SlotTable:
        return self._table

    @property
    def state_bytes(self) -> int:
        return self._lookup.nbytes + self._group_lookup.nbytes

    def _needed(self, ids: torch.Tensor) -> tuple[list[int], int]:
        """The distinct experts, ascending, and how many ids name one."""
        host = ids.to("cpu")  # the one synchronisation
        pairs = ids.numel()
        needed = host.unique().tolist() if pairs > _FEW else sorted(set(host.flatten().tolist()))
        if needed and needed[0] < 0:
            if needed[0] < -1:
                raise ValueError(f"ids: {needed[0]} is no expert; -1 stands for none")
            needed = needed[1:]
        if needed and needed[-1] >= self.store.num_experts:
            raise ValueError(f"ids: expert {needed[-1]} of {self.store.num_experts}")
        return needed, pairs

    def _make_resident(self, needed: list[int]) -> None:
        plan = self._table.plan(needed)
        self._hits += plan.hits
        if plan.loads:
            self._misses += self._carry_out(plan.loads)
        if self._pending:
            torch.cuda.current_stream(self.device).wait_event(self._ready)
            self._pending = False

    def _carry_out(self, loads: list[Load]) -> int:
        """Copy, and upload the mapping; gives the number of experts that arrived."""
        if self._asynchronous:
            # Whoever still computes with the victims comes first.
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
        done = 0
        try:
            for load in loads:
                self._copy(load)
                done += 1
        finally:
            for load in loads[done:]:
                self._table.forget(load.expert)
            self._publish()
        return done

    def _copy(self, load: Load) -> None:
        if not self._asynchronous:
            for name, slots in self.slots.items():
                slots[load.slot].copy_(self.store.tensors[name][load.expert])
            return
        with torch.cuda.stream(self._copies):
            for name, slots in self.slots.items():
                slots[load.slot].copy_(self.store.tensors[name][load.expert], non_blocking=True)

    def _publish(self) -> None:
        """Bring the mapping on the device up to date, in place."""
        if self._asynchronous:
            self._ready.record(self._copies)
            self._pending = True
            self._staged.synchronize()  # the staging buffer's last upload; long past
        self._staging[:-1] = torch.tensor(self._table.slot_of, dtype=torch.int32)
        self._upload(self._lookup, self._staging)

    def _upload(self, lookup: torch.Tensor, staging: torch.Tensor) -> None:
        lookup.copy_(staging, non_blocking=self._asynchronous)
        if self._asynchronous:
            self._staged.record(torch.cuda.current_stream(self.device))

    def _slots_of(self, ids: torch.Tensor, lookup: torch.Tensor) -> torch.Tensor:
        return lookup[ids.to(self.device)].to(ids.dtype)  # [T, K]
