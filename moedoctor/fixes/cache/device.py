"""The engine ``device``: lookup, eviction and copies in kernels; the host only launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from moedoctor.fixes.cache.engine import CachedExperts, Engine
from moedoctor.fixes.cache.packed import LANES, SIZE
from moedoctor.fixes.cache.store import ExpertStore
from moedoctor.fixes.eviction import CacheOverflow, CacheStats, SlotTable
from moedoctor.kernels.cache.lookup import (
    MOST_EXPERTS,
    LookupState,
    launch_groups,
    launch_lookup,
)
from moedoctor.kernels.cache.transfer import Transfer
from moedoctor.kernels.device_guard import interprets, make_current


class DeviceEngine(Engine):
    """Never synchronizes in `acquire`, `groups` and `prefetch`; all of them can be captured in a CUDA graph.

    A captured `prefetch` must be followed by an `acquire` of the same capture, which joins its copies. A
    prefetch outside of a capture must be followed by an `acquire` before the capture.
    """

    name = "device"

    def __init__(self, store: ExpertStore, capacity: int, policy: str, device: torch.device) -> None:
        """Raises RuntimeError without a GPU or pinned memory, ValueError for too many experts."""
        super().__init__(store, capacity, policy, device)
        if device.type != "cuda" and not interprets():
            raise RuntimeError(f"engine 'device' needs a CUDA device, got {device}: use engine='host'")
        if device.type == "cuda" and not store.pinned:
            raise RuntimeError(
                f"engine 'device' reads pinned host memory; there is none: {store.reason}; use engine='host'"
            )
        if store.num_experts > MOST_EXPERTS:
            raise ValueError(
                f"engine 'device' takes {MOST_EXPERTS} experts at most, got {store.num_experts}: use 'host'"
            )
        self.slots = store.make_slots(capacity, device)
        self._state = LookupState.make(store.num_experts, capacity, policy, device)
        self._transfer = self._transfer_to(self.slots)
        self.mapping = self._state.slot_of
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._copies is not None:
            # If the cache is dropped under a copy, the memory is given out again only after it.
            for tensor in (*self.slots.values(), self._state.copies, *self._transfer.tables):
                tensor.record_stream(self._copies)
        self._prefetched: torch.cuda.Event | None = None
        """Set while copies are under way that the current stream has not waited for."""
        self._captured = False
        """True if `_prefetched` was recorded in a capture; nothing outside of it can wait for it."""
        self._torn = False
        """True from before a lookup until its copies are queued; also if the reset after an error failed."""
        self._moves = 0
        """Lookups so far: each may evict."""
        self._partings = 0
        """Calls so far that were split into several groups: all of them share one list of groups."""

    def _transfer_to(self, targets: Mapping[str, torch.Tensor]) -> Transfer:
        store = self.store
        packed = {
            name: (part.blocks, part.elements, part.tail, part.listed) for name, part in store.packed.items()
        }
        return Transfer(store.tensors, packed, targets, (SIZE, LANES))

    def skip_padding(self, rows: torch.Tensor) -> None:
        super().skip_padding(rows)
        self._state = self._state._replace(rows=rows)

    def acquire(self, ids: torch.Tensor) -> CachedExperts:
        return self._run(self._join_prefetch(ids), None)

    def groups(self, ids: torch.Tensor, overlap: bool) -> Iterator[CachedExperts]:
        count = -(-self._count_at_most(ids) // self.capacity)
        if count <= 1:
            yield from self._give_hits_then_misses(ids) if overlap else (self.acquire(ids),)
            return
        self._join()
        ids = ids.contiguous()  # [T, K]
        self._partings += 1
        mine = self._partings
        launch_groups(self._state, ids)
        for group in range(count):
            if self._partings != mine:
                raise RuntimeError(
                    "another groups() of this cache has begun, which gave the experts other groups: take all "
                    "groups of a call before the next call"
                )
            self._join()  # a prefetch between two groups
            yield self._run(ids, group)

    def _give_hits_then_misses(self, ids: torch.Tensor) -> Iterator[CachedExperts]:
        """Give the hits while the misses are copied on a stream of their own; then the misses."""
        ids = self._join_prefetch(ids)
        early, late = torch.empty_like(ids), torch.empty_like(ids)  # [T, K] each
        with self._keep_whole():
            launch_lookup(self._state, ids, early, late=late)
            self._copy_beside()
        mine = self._moves
        try:
            yield CachedExperts(self.slots, early, self._state.group_experts)
        except GeneratorExit:  # the caller's loop broke off, and a capture must end with every stream joined
            if self._captured and self._captures():
                with suppress(RuntimeError):  # a void capture records nothing more
                    self._join()
            raise
        if self._moves != mine:
            raise RuntimeError(
                "another call of this cache has begun, which may have evicted the second group's experts: "
                "take both groups before the next call"
            )
        self._join()
        yield CachedExperts(self.slots, late, self._state.late_experts)

    def _copy_beside(self) -> None:
        """Copy while the current stream goes on, until its next `_join`."""
        copies = self._copies
        if copies is None:  # the interpreter has no streams
            self._transfer.launch(self._state.copies)
            return
        copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(copies):
            self._transfer.launch(self._state.copies)
            self._captured = torch.cuda.is_current_stream_capturing()
            self._prefetched = torch.cuda.Event()
            self._prefetched.record()

    def prefetch(self, ids: torch.Tensor) -> None:
        ids = self._join_prefetch(ids)
        with self._keep_whole():
            launch_lookup(self._state, ids, torch.empty_like(ids), counted=False)
            self._copy_beside()

    def adopt(self, table: SlotTable) -> None:
        self._join()
        state = self._state
        held = [(expert, slot) for slot, expert in enumerate(table.expert_of) if expert >= 0]
        copies = [0] * (1 + 2 * self.capacity)
        copies[0] = len(held)
        for number, (expert, slot) in enumerate(held):
            copies[1 + number], copies[1 + self.capacity + number] = expert, slot
        with self._keep_whole():
            for tensor, values in (
                (state.slot_of, table.slot_of),
                (state.expert_of, table.expert_of),
                (state.uses, table.uses),
                (state.last, table.last),
                (state.clock, [table.clock]),
                (state.loaded, [0] * self.store.num_experts),  # by the clock that was
                (state.copies, copies),
            ):
                tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
            self._transfer.launch(state.copies)

    def make_copier(self, buffers: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        experts = self.store.num_experts
        transfer = self._transfer_to(buffers)
        copies = torch.zeros(1 + 2 * experts, dtype=torch.int32, device=self.device)
        rows = [(_view_rows(self.slots[name]), _view_rows(buffer)) for name, buffer in buffers.items()]

        def copy() -> None:
            self._join()
            slot_of = self._state.slot_of  # [E]
            missing = slot_of < 0  # [E]
            for slots, buffer in rows:  # those that are missing get any row here, and their own below
                torch.index_select(slots, 0, slot_of.clamp(min=0), out=buffer)
            order = torch.argsort(missing.int(), descending=True, stable=True)  # [E]: missing ones first
            copies[:1] = missing.sum()
            copies[1 : 1 + experts], copies[1 + experts :] = order, order
            transfer.launch(copies)

        return copy

    def seed_from(self, ids: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
        self._join()
        state = self._state
        with self._keep_whole():
            counts = state.counts.clone()
            for tensor in (state.slot_of, state.expert_of):
                tensor.fill_(-1)
            for tensor in (state.uses, state.last, state.loaded, state.clock):
                tensor.zero_()
            ids = ids.contiguous()  # [calls, K]
            slot_ids = torch.empty_like(ids[:1])  # [1, K]
            groups = -(-self._count_at_most(ids[:1]) // self.capacity)
            self._partings += groups > 1
            for row in ids.unbind(0):
                if groups > 1:
                    launch_groups(state, row)
                for group in range(groups):
                    launch_lookup(state, row, slot_ids, group=group if groups > 1 else None)
            state.counts.copy_(counts)
            held = state.expert_of.clamp(min=0)  # [capacity]; a free slot gets any expert
            for name, slots in self.slots.items():
                torch.index_select(_view_rows(weights[name]), 0, held, out=_view_rows(slots))

    def read_stats(self) -> CacheStats:
        calls, hits, misses, prefetched = self._state.counts.tolist()
        return CacheStats(calls, hits, misses, prefetched=prefetched)

    def read_table(self) -> SlotTable:
        self._mend()
        state = self._state
        return SlotTable.restore(
            self.capacity,
            self.policy,
            state.slot_of.tolist(),
            state.uses.tolist(),
            state.last.tolist(),
            int(state.clock),
        )

    @property
    def state_bytes(self) -> int:
        return self._state.nbytes + sum(table.nbytes for table in self._transfer.tables)

    def _count_at_most(self, ids: torch.Tensor) -> int:
        """Return how many experts `ids` can name at most, by its shape."""
        if ids.device != self.device:
            raise ValueError(f"ids are on {ids.device}, the cache is on {self.device}: move them with .to()")
        return min(ids.numel(), self.store.num_experts)

    def _join_prefetch(self, ids: torch.Tensor) -> torch.Tensor:
        """Return `ids`, contiguous, after the copies of a prefetch; raises CacheOverflow by their shape."""
        most = self._count_at_most(ids)
        if most > self.capacity:
            raise CacheOverflow(most, self.capacity, at_most=True)
        self._join()
        return ids.contiguous()

    def _run(self, ids: torch.Tensor, group: int | None) -> CachedExperts:
        slot_ids = torch.empty_like(ids)  # [T, K]
        if ids.numel():
            with self._keep_whole():
                launch_lookup(self._state, ids, slot_ids, group=group)
                self._transfer.launch(self._state.copies)
        return CachedExperts(self.slots, slot_ids, None if group is None else self._state.group_experts)

    def _join(self) -> None:
        """Make the current stream wait for the copies of a prefetch."""
        self._mend()
        if self._prefetched is None:
            return
        if not self._captured:
            torch.cuda.current_stream(self.device).wait_event(self._prefetched)
        elif self._captures():
            self._join_in_capture()
        # Else the capture has failed, and none of its copies runs.
        self._prefetched = None

    def _join_in_capture(self) -> None:
        """Make the capture of the current stream wait for the copies in it.

        Unlike the event, this is right too if the copies were those of an earlier capture, which failed.
        """
        assert self._copies is not None
        current = torch.cuda.current_stream(self.device)
        self._copies.wait_stream(current)
        current.wait_stream(self._copies)

    @contextmanager
    def _keep_whole(self) -> Iterator[None]:
        """Around a lookup and its copies: if the copies are not queued, nothing is resident after it.

        The lookup writes who is resident before a byte has arrived. Which copies were queued before an error,
        Ctrl-C included, is not known here, so all experts are forgotten.
        """
        self._moves += 1
        self._torn = True
        try:
            yield
        except BaseException:
            self._prefetched = None
            with suppress(Exception):  # the caller needs the first error; `_mend` tries again
                if self._captures():
                    # Nothing of a capture has run: the cache is as it was before. The error voids the
                    # capture, and a reset in it would empty the cache at each replay.
                    self._torn = False
                    self._join_in_capture()  # else its end would raise another error
                else:
                    self._forget_all()
            raise
        self._torn = False

    def _mend(self) -> None:
        """Reset what an earlier call left, if its own reset failed or was interrupted."""
        if self._torn:
            if self._captures():
                raise RuntimeError("the call before broke off: call acquire() once outside of the capture")
            self._forget_all()

    def _forget_all(self) -> None:
        """Make no expert resident."""
        self._prefetched = None
        if self._copies is not None:
            # They may still read the list of copies and write to slots.
            torch.cuda.current_stream(self.device).wait_stream(self._copies)
        self._state.slot_of.fill_(-1)
        self._state.expert_of.fill_(-1)
        self._state.copies[:1].zero_()
        self._torn = False

    def _captures(self) -> bool:
        """Return True if the current stream records a CUDA graph."""
        with make_current(self.mapping):
            return self._copies is not None and torch.cuda.is_current_stream_capturing()


def _view_rows(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor [N, ...] as [N, words], because not every type can be indexed."""
    rows = tensor.view(len(tensor), tensor[0].numel())
    aligned = tensor[0].nbytes % 8 == 0 and tensor.data_ptr() % 8 == 0
    return rows.view(torch.int64 if aligned else torch.uint8)
