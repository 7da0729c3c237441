"""The engine ``host``: bookkeeping in Python, copies on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch

from moedoctor.fixes.cache.engine import CachedExperts, Engine, check_bounds
from moedoctor.fixes.cache.store import ExpertStore
from moedoctor.fixes.eviction import CacheOverflow, CacheStats, Load, SlotTable

_FEW = 512
"""A Python set sorts this many ids faster than torch."""


class HostEngine(Engine):
    """Reads the ids once a call, which waits for the device; nothing else waits for it."""

    name = "host"

    def __init__(self, store: ExpertStore, capacity: int, policy: str, device: torch.device) -> None:
        """Raises ValueError if the store is packed: only kernels unpack."""
        super().__init__(store, capacity, policy, device)
        if store.packed:
            on_device = device.type == "cuda" and store.pinned and find_spec("triton") is not None
            remedy = "use engine='device'" if on_device else "leave out packed"
            raise ValueError(f"engine 'host' copies whole tensors and cannot unpack: {remedy}")
        self.slots = store.slots(capacity, device)
        # Views made once: making them for each copy would take longer than queueing the copy.
        self._from_to = [
            (store.tensors[name].unbind(0), slots.unbind(0)) for name, slots in self.slots.items()
        ]
        self._table = SlotTable(store.num_experts, capacity, policy)
        self._asynchronous = device.type == "cuda" and store.pinned
        # Row E is for ids of -1, which index from the end.
        blank = torch.full((store.num_experts + 1,), -1, dtype=torch.int32)
        self._staging = blank.pin_memory() if self._asynchronous else blank  # [E + 1]
        blanks = torch.full((store.num_experts + 1 + capacity,), -1, dtype=torch.int32)
        self._group_staging = blanks  # [E + 1 + capacity]: slots by expert, experts by slot
        if self._asynchronous:
            self._group_staging = self._group_staging.pin_memory()
            self._copies = torch.cuda.Stream(device)
            self._ready = torch.cuda.Event()
            self._staged = torch.cuda.Event()
        self._lookup = blank.to(device, copy=True)  # [E + 1]
        self._group_lookup = blanks.to(device, copy=True)  # [E + 1 + capacity]
        self.mapping = self._lookup[:-1]  # [E]
        self._calls = self._hits = self._misses = self._prefetched = 0
        self._pending = False
        """Whether prefetches are under way that no call has waited for."""

    def acquire(self, ids: torch.Tensor) -> CachedExperts:
        needed = self._needed(ids)
        if len(needed) > self.capacity:
            raise CacheOverflow(len(needed), self.capacity)
        self._calls += 1
        self._make_resident(needed)
        return CachedExperts(self.slots, self._slots_of(ids, self._lookup))

    def groups(self, ids: torch.Tensor, overlap: bool) -> Iterator[CachedExperts]:
        needed = self._needed(ids)
        self._calls += 1
        if len(needed) <= self.capacity:
            self._make_resident(needed)
            yield CachedExperts(self.slots, self._slots_of(ids, self._lookup))
            return
        for part in self._table.split(needed):
            self._make_resident(part)
            if self._asynchronous:
                self._staged.synchronize()
            by_expert, by_slot = [-1] * (self.store.num_experts + 1), [-1] * self.capacity
            for expert in part:
                slot = by_expert[expert] = self._table.slot_of[expert]
                by_slot[slot] = expert
            self._group_staging.copy_(torch.tensor(by_expert + by_slot, dtype=torch.int32))
            self._upload(self._group_lookup, self._group_staging)
            lookup, experts = self._group_lookup.split([len(by_expert), self.capacity])
            yield CachedExperts(self.slots, self._slots_of(ids, lookup), experts)

    def prefetch(self, ids: torch.Tensor) -> None:
        needed = self._needed(ids)
        loads = self._table.plan(needed)
        self._carry_out(loads)
        self._prefetched += len(loads)

    def adopt(self, table: SlotTable) -> None:
        if self._asynchronous:
            torch.cuda.synchronize(self.device)
        self._table = table
        self._staging.fill_(-1)
        resident = [Load(expert, slot) for slot, expert in enumerate(table.expert_of) if expert >= 0]
        self._carry_out(resident)

    def stats(self) -> CacheStats:
        return CacheStats(self._calls, self._hits, self._misses, prefetched=self._prefetched)

    def table(self) -> SlotTable:
        return self._table

    @property
    def state_bytes(self) -> int:
        return self._lookup.nbytes + self._group_lookup.nbytes

    def _needed(self, ids: torch.Tensor) -> list[int]:
        """The distinct experts, ascending."""
        host = ids.to("cpu")  # the one synchronisation
        needed = host.unique().tolist() if ids.numel() > _FEW else sorted(set(host.flatten().tolist()))
        if needed:
            check_bounds(needed[0], needed[-1], self.store.num_experts)
        return needed[1:] if needed and needed[0] < 0 else needed

    def _make_resident(self, needed: list[int]) -> None:
        loads = self._table.plan(needed)
        self._hits += len(needed) - len(loads)
        if loads:
            self._misses += self._carry_out(loads)
        if self._pending:
            torch.cuda.current_stream(self.device).wait_event(self._ready)
            self._pending = False

    def _carry_out(self, loads: list[Load]) -> int:
        """Copy, and upload the mapping. Return the number of experts that arrived."""
        done = 0
        stream: AbstractContextManager[object] = nullcontext()
        try:
            if self._asynchronous:  # after everything that still computes with the victims
                self._copies.wait_stream(torch.cuda.current_stream(self.device))
                stream = torch.cuda.stream(self._copies)
            with stream:
                for load in loads:
                    self._copy(load)
                    done += 1
        finally:
            for load in loads[done:]:
                self._table.forget(load.expert)
            self._publish()
        return done

    def _copy(self, load: Load) -> None:
        for experts, slots in self._from_to:
            slots[load.slot].copy_(experts[load.expert], non_blocking=self._asynchronous)

    def _publish(self) -> None:
        """Update the mapping on the device, in place."""
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
