"""The interface of an engine of the expert cache: it owns slots, mapping and state, and moves the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from moedoctor.fixes.cache.store import ExpertStore
from moedoctor.fixes.eviction import CacheStats, SlotTable


@dataclass(frozen=True)
class CachedExperts:
    """Resident experts of one call, or of one group of it; valid until the next `acquire`."""

    weights: Mapping[str, torch.Tensor]
    """[capacity, ...] each, on the device: always the same tensors, at the same addresses."""
    slot_ids: torch.Tensor
    """[T, K], the ids' own type: rows of `weights`; -1 where the id is -1 or belongs to another group."""
    experts: torch.Tensor | None = None
    """int32 [capacity] on the device: the expert of this group that each slot holds, -1 for none, as
    `moedoctor.fixes.moe.forward.GroupedForward` takes it; None if the call is one group, which
    `moedoctor.fixes.moe.forward.moe_forward` takes."""


def check_range(ids: torch.Tensor, num_experts: int, name: str = "ids") -> None:
    """Raise ValueError for an id that is neither -1 nor an expert, naming the argument. Reads the ids."""
    if ids.numel():
        low, high = ids.aminmax()
        check_bounds(int(low), int(high), num_experts, name)


def check_bounds(low: int, high: int, num_experts: int, name: str = "ids") -> None:
    """Raise ValueError if ids from `low` to `high` hold one that is neither -1 nor an expert."""
    if low < -1:
        raise ValueError(f"{name}: {low} is not an expert; -1 means no expert")
    if high >= num_experts:
        raise ValueError(f"{name}: expert {high} of {num_experts}")


def predict_table(ids: torch.Tensor, num_experts: int, capacity: int, policy: str) -> SlotTable:
    """Return the state that calls for each row of `ids` [calls, N] leave. Reads the ids.

    A call that does not fit goes in groups. Raises ValueError for an id out of range.
    """
    ids = ids.to("cpu")
    check_range(ids, num_experts)
    table = SlotTable(num_experts, capacity, policy)
    for row in ids.tolist():
        for part in table.split(row):
            table.plan(part)
    return table


class Engine(ABC):
    """One way of looking up, evicting and copying. `ExpertCache` checks arguments and threads before."""

    name: str
    slots: dict[str, torch.Tensor]
    """[capacity, ...] each."""
    mapping: torch.Tensor
    """int32 [E] on the device: slot or -1, updated in place."""
    rows: torch.Tensor | None = None
    """int32 [1] on the device: rows of a call that are no padding; None for all of them."""

    def __init__(self, store: ExpertStore, capacity: int, policy: str, device: torch.device) -> None:
        self.store, self.capacity, self.policy, self.device = store, capacity, policy, device

    def skip_padding(self, rows: torch.Tensor) -> None:
        """As `ExpertCache.skip_padding`."""
        self.rows = rows

    @abstractmethod
    def acquire(self, ids: torch.Tensor) -> CachedExperts:
        """Make the experts of `ids` [T, K] resident. Raises CacheOverflow, with nothing changed."""

    @abstractmethod
    def groups(self, ids: torch.Tensor, overlap: bool) -> Iterator[CachedExperts]:
        """Make them resident in groups that fit; `ExpertCache.groups` describes their order and `overlap`."""

    @abstractmethod
    def prefetch(self, ids: torch.Tensor) -> None:
        """Start loading the experts of `ids`, without counting a call."""

    @abstractmethod
    def adopt(self, table: SlotTable) -> None:
        """Replace state and slots by those of `table`. May synchronize."""

    def make_copier(self, buffers: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Return what copies all experts to `buffers`, [E, ...] each."""
        waits = self.device.type != "cuda" or not self.store.pinned

        def copy() -> None:
            for name, tensor in self.store.tensors.items():
                buffers[name].copy_(tensor, non_blocking=not waits)

        return copy

    def seed_from(self, ids: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
        """As `ExpertCache.seed_from`; `ids` [calls, K] are those to follow. May synchronize."""
        self.adopt(predict_table(ids, self.store.num_experts, self.capacity, self.policy))

    @abstractmethod
    def read_stats(self) -> CacheStats:
        """Return the counts since the start. May synchronize."""

    @abstractmethod
    def read_table(self) -> SlotTable:
        """Return the state as a table of its own. May synchronize."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes on the device besides the slots."""


class ResidentEngine(Engine):
    """Costs nothing a call: no lookup, no synchronization, no counting.

    Ids on the CPU are checked. Those on a GPU are not: the check would be the whole cost of a call.
    """

    name = "resident"

    def __init__(self, store: ExpertStore, capacity: int, policy: str, device: torch.device) -> None:
        """Raises ValueError if there are fewer slots than experts."""
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
        self.slots = store.make_slots(capacity, device)
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
        """Do nothing: every expert is resident."""
        if ids.device.type == "cpu":
            check_range(ids, self.store.num_experts)

    def adopt(self, table: SlotTable) -> None:
        """Do nothing: every expert is resident."""

    def read_stats(self) -> CacheStats:
        """Return zeros: no call is counted, and every access is a hit."""
        return CacheStats(0, 0, 0)

    def read_table(self) -> SlotTable:
        table = SlotTable(self.store.num_experts, self.capacity, self.policy)
        table.plan(range(self.store.num_experts))
        return table

    @property
    def state_bytes(self) -> int:
        return self.mapping.nbytes
