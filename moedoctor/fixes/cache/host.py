"""The engine ``host``: bookkeeping in Python, copies on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
        self.slots = store.make_slots(capacity, device)
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
            # If the cache is dropped under a copy, the memory is given out again only after it.
            for slots in self.slots.values():
                slots.record_stream(self._copies)
        self._lookup = blank.to(device, copy=True)  # [E + 1]
        self._group_lookup = blanks.to(device, copy=True)  # [E + 1 + capacity]
        self.mapping = self._lookup[:-1]  # [E]
        self._calls = self._hits = self._misses = self._prefetched = 0
        self._pending = False
        """True if prefetches are under way that no call has waited for."""
        self._torn = False
        """True while the table may name experts that are not there, or the mapping differs from it."""

    def acquire(self, ids: torch.Tensor) -> CachedExperts:
        ids = self._replace_padding(ids)
        needed = self._find_needed(ids)
        self._check_fits(needed)
        self._calls += 1
        self._make_resident(needed)
        return CachedExperts(self.slots, self._look_up(ids, self._lookup))

    def groups(self, ids: torch.Tensor, overlap: bool) -> Iterator[CachedExperts]:
        ids = self._replace_padding(ids)
        needed = self._find_needed(ids)
        self._calls += 1
        if len(needed) <= self.capacity:
            self._make_resident(needed)
            yield CachedExperts(self.slots, self._look_up(ids, self._lookup))
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
            yield CachedExperts(self.slots, self._look_up(ids, lookup), experts)

    def prefetch(self, ids: torch.Tensor) -> None:
        needed = self._find_needed(ids)
        self._check_fits(needed)
        self._prefetched += self._load(needed)

    def adopt(self, table: SlotTable) -> None:
        self._refuse_capture()
        if self._asynchronous:
            torch.cuda.synchronize(self.device)
        with self._keep_whole():
            self._table = table
            self._carry_out(
                [Load(expert, slot) for slot, expert in enumerate(table.expert_of) if expert >= 0]
            )

    def read_stats(self) -> CacheStats:
        return CacheStats(self._calls, self._hits, self._misses, prefetched=self._prefetched)

    def read_table(self) -> SlotTable:
        self._mend()
        return self._table

    @property
    def state_bytes(self) -> int:
        return self._lookup.nbytes + self._group_lookup.nbytes

    def _replace_padding(self, ids: torch.Tensor) -> torch.Tensor:
        """Return `ids` [T, K] with the first row in place of those that are padding."""
        if self.rows is None or not ids.numel():
            return ids
        real = torch.arange(len(ids), device=ids.device) < self.rows.to(ids.device)  # [T]
        return torch.where(real[:, None], ids, ids[:1])

    def _find_needed(self, ids: torch.Tensor) -> list[int]:
        """The distinct experts, ascending."""
        self._refuse_capture()
        self._mend()
        host = ids.to("cpu")  # the one synchronization
        needed = host.unique().tolist() if ids.numel() > _FEW else sorted(set(host.flatten().tolist()))
        if needed:
            check_bounds(needed[0], needed[-1], self.store.num_experts)
        return needed[1:] if needed and needed[0] < 0 else needed

    def _refuse_capture(self) -> None:
        """Raise RuntimeError in a capture: the host decides what is copied, and a replay asks it nothing."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("engine 'host' cannot be captured in a CUDA graph: use engine='device'")

    def _check_fits(self, needed: list[int]) -> None:
        if len(needed) > self.capacity:
            raise CacheOverflow(len(needed), self.capacity)

    def _make_resident(self, needed: list[int]) -> None:
        misses = self._load(needed)
        self._misses += misses
        self._hits += len(needed) - misses
        if self._pending:
            torch.cuda.current_stream(self.device).wait_event(self._ready)
            self._pending = False

    def _load(self, needed: list[int]) -> int:
        """Load those of `needed` that are not resident, and return their number."""
        with self._keep_whole():
            loads = self._table.plan(needed)
            if loads:
                self._carry_out(loads)
        return len(loads)

    @contextmanager
    def _keep_whole(self) -> Iterator[None]:
        """Around a plan and its copies. If Ctrl-C comes in between, all experts are forgotten."""
        self._torn = True
        try:
            yield
            self._torn = False
        finally:
            with suppress(Exception):  # the caller needs the first error; the next call tries again
                self._mend()

    def _mend(self) -> None:
        """Make no expert resident if a call broke off between its plan and its copies."""
        if self._torn:
            self._table = SlotTable(self.store.num_experts, self.capacity, self.policy)
            self._publish()

    def _carry_out(self, loads: list[Load]) -> None:
        """Copy, and upload the mapping. An expert whose copy fails is forgotten."""
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
        self._torn = False

    def _upload(self, lookup: torch.Tensor, staging: torch.Tensor) -> None:
        lookup.copy_(staging, non_blocking=self._asynchronous)
        if self._asynchronous:
            self._staged.record(torch.cuda.current_stream(self.device))

    def _look_up(self, ids: torch.Tensor, lookup: torch.Tensor) -> torch.Tensor:
        return lookup[ids.to(self.device)].to(ids.dtype)  # [T, K]
