"""A cache of MoE experts on the device: every call computes with the experts that it asked for.

All experts live in host memory, `capacity` of them also in fixed slots on the device. `acquire` makes the
experts of a call resident and translates their ids to slots. What it does better than the cache of
vllm-project/vllm#37190: an expert that a call needs is never evicted by that call; there is one mapping
tensor, updated in place; copies do not block the host; with the engine ``device`` nothing synchronizes
and everything has a fixed address, so it can be captured in a CUDA graph.

Engines, by ``engine``:

- ``device``: lookup, eviction and copies are Triton kernels that read pinned host memory. `acquire` knows
  only by shape whether a call fits: T * K ids, or all experts, must not exceed the slots.
- ``host``: one read of the ids a call, bookkeeping in Python, copies on a stream of their own. Works on any
  device, and without pinned memory, where copies block.
- ``resident``: as many slots as experts. All are loaded at the start, ids are slots, nothing is counted.
- ``auto``: ``resident`` if the capacity suffices, else ``device`` if there are a CUDA device, Triton and
  pinned memory that kernels can read in place (WSL may refuse that), else ``host``.

A cache belongs to one thread at a time: the slots that a call got are valid until the next call. A thread
that enters while another one is inside gets CacheBusy.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moedoctor.fixes.cache.engine import CachedExperts, Engine, ResidentEngine, predict_table
from moedoctor.fixes.cache.store import ExpertStore, count_experts
from moedoctor.fixes.eviction import ONLINE_POLICIES, CacheOverflow, CacheStats
from moedoctor.kernels.device_guard import make_current

__all__ = [
    "ENGINES",
    "CacheBusy",
    "CacheMemory",
    "CacheOverflow",
    "CachedExperts",
    "ExpertCache",
    "ExpertStore",
]

FOLLOWED = 48
"""Tokens of a prompt that `seed_from` looks at, at least. `aging` halves its counts once in so many calls."""
ENGINES = ("auto", "device", "host", "resident")


class CacheBusy(RuntimeError):  # noqa: N818  beside CacheOverflow
    """A second thread entered the cache."""


@dataclass(frozen=True)
class CacheMemory:
    """The bytes that one cache holds."""

    pinned: int
    """Locked host memory; no profiler of GPU memory shows it. For tensors that came pinned it is their own
    bytes, which torch's allocator may have rounded up to a power of two."""
    pageable: int
    """Host memory that could not be pinned."""
    device: int
    """Slots, mapping and state: what a KV-cache planner must subtract from the GPU's memory."""
    uncached: int
    """The bytes that all experts would need on the device without a cache."""

    @property
    def saved(self) -> int:
        """Device bytes that the cache leaves to a KV-cache planner; negative with more slots than experts."""
        return self.uncached - self.device


class ExpertCache:
    """The experts of one layer, `capacity` of them on the device."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor] | ExpertStore,
        capacity: int,
        *,
        policy: str = "lfru",
        device: torch.device | str | None = None,
        engine: str = "auto",
        pin: bool = True,
        packed: bool = False,
    ) -> None:
        """Cache `weights`, any set of host tensors [E, ...]: weights, scales, biases.

        Tensors that are contiguous and pinned are used as they are, others are copied; leave them unchanged
        while the cache lives. Caches that share host tensors share an `ExpertStore`, which has its own `pin`
        and `packed`. `device` is by default the current CUDA device, or the CPU without one; `policy` is one
        of `eviction.ONLINE_POLICIES`. Without `pin`, or if pinning fails (`pin_failure` says why), copies
        block and the engine ``device`` is refused. `packed` keeps bfloat16 tensors on the host in some 69 %
        of their bytes, without loss, and the engine ``device`` unpacks them on the way; if all experts are
        resident it does nothing. Raises ValueError or TypeError that names the argument, RuntimeError if the
        engine cannot work here.
        """
        if type(capacity) is not int:
            raise TypeError(f"capacity must be an int, got {type(capacity).__name__}")
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 slot, got {capacity}")
        if policy not in ONLINE_POLICIES:
            raise ValueError(f"policy must be one of {', '.join(ONLINE_POLICIES)}, got {policy!r}")
        if engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        self.device = _resolve_device(device)
        if isinstance(weights, ExpertStore):
            self._store = weights
        else:
            packed = packed and engine != "resident" and capacity < count_experts(weights)
            with make_current(self.device):
                self._store = ExpertStore(weights, pin=pin and self.device.type == "cuda", packed=packed)
        self.capacity, self.policy = capacity, policy
        self.num_experts = self._store.num_experts
        triton = importlib.util.find_spec("triton") is not None
        if engine == "auto" and capacity >= self.num_experts:
            engine = "resident"
        elif engine == "auto":
            pinned = self.device.type == "cuda" and self._store.pinned
            engine = "device" if pinned and triton and self._store.is_readable(self.device) else "host"
        if engine == "device" and not triton:
            raise RuntimeError("engine 'device' needs Triton, which is not installed: use engine='host'")
        with make_current(self.device):
            self._engine = _choose_engine(engine)(self._store, capacity, policy, self.device)
        self._inside: dict[str, threading.Thread] = {}

    @property
    def engine(self) -> str:
        """The engine at work: ``device``, ``host`` or ``resident``."""
        return self._engine.name

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The slots, [capacity, ...] each, at addresses that never change."""
        return self._engine.slots

    @property
    def mapping(self) -> torch.Tensor:
        """int32 [E] on the device: each expert's slot, or -1. Always the same tensor, updated in place."""
        return self._engine.mapping

    @property
    def state(self) -> Any:
        """The `LookupState` of the engine ``device``, for kernels that work beside it; else None."""
        return getattr(self._engine, "_state", None)

    def acquire(self, ids: torch.Tensor) -> CachedExperts:
        """Make the experts of `ids` [T, K] resident; an id of -1 means no expert and stays -1.

        Copies are ordered before whatever the current stream does next. Raises CacheOverflow if the call
        needs more experts than there are slots, CacheBusy for a second thread, TypeError or ValueError that
        names `ids`. An id out of range raises ValueError if the host reads the ids: with ``host``, and with
        ``resident`` if they are on the CPU. Otherwise it is ignored as -1 is. ``device`` gives it slot -1.
        ``resident`` gives it back as it is, since a check would cost more kernels than the rest of the call;
        the kernels of `moe_forward` then read no weight for it (or zeros, in a slot that no expert has), and
        other kernels must do the same. After an error the mapping is still right: an expert whose copy failed
        is not resident, and the next call loads it. ``device`` then forgets all experts.
        """
        _check_ids(ids)
        with self._exclude_threads():
            return self._engine.acquire(ids)

    def groups(self, ids: torch.Tensor, *, overlap: bool = False) -> Iterator[CachedExperts]:
        """Make the experts of `ids` [T, K] resident in groups that fit.

        Resident experts come first, then the least used ones. So the most used are resident in the next call.
        Each group is valid until the next group is taken; `slot_ids` are -1 outside of it. Compute each and
        add up the results: in float32 the sum differs from that of a single call only by rounding, see
        `moe_forward.group_bound`. A call that fits is one group, or with `overlap` two: the hits, then the
        misses; both stay valid until the next call, unless `may_need_groups`. The engine ``device`` cannot
        know how many experts there are, and gives as many groups as the shape may need; some may be empty.

        Take all groups of a call before the next call. The engine ``device`` raises RuntimeError if a group
        is taken after another call in several groups has begun, or, with `overlap`, after any other call; it
        does not notice the replay of a CUDA graph. Other errors as `acquire`.
        """
        _check_ids(ids)
        parts = self._engine.groups(ids, overlap)
        while True:
            with self._exclude_threads():
                part = next(parts, None)
            if part is None:
                return
            yield part

    def may_need_groups(self, ids: torch.Tensor) -> bool:
        """Return True if a call of the shape of `ids` may need more experts than there are slots."""
        return min(ids.numel(), self.num_experts) > self.capacity

    def skip_padding(self, rows: torch.Tensor) -> None:
        """From now on load nothing for rows of `ids` [T, K] that are padding: they count as the first row.

        `rows` int32 [1] on the device is read at each call, in a CUDA graph at each replay: how many rows are
        no padding, at least 1. More rows than a call has are all of them.
        """
        if rows.dtype != torch.int32 or rows.numel() != 1 or rows.device != self.device:
            got = f"{rows.dtype} {list(rows.shape)} on {rows.device}"
            raise ValueError(f"rows must be int32 [1] on {self.device}, got {got}")
        self._engine.skip_padding(rows)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start loading the experts of `ids`, any shape, that a later call is expected to need.

        Returns at once; the next `acquire` waits for the copies on the device. It may evict, and a
        prefetched expert is counted as used once. It counts no call, hit or miss. Errors as `acquire`.
        """
        _check_ids(ids)
        with self._exclude_threads():
            self._engine.prefetch(ids)

    def seed(self, ids: torch.Tensor) -> None:
        """Start from what a prefill routed: `ids` [T, K], the tokens in order, or [calls, T, K].

        Sets the state that a call for every token, or for each of `calls`, would have left, and loads the
        experts that are resident at its end. Replaces the present state; may synchronize.
        Raises TypeError or ValueError that names `ids`, also for an id out of range.
        """
        _check_ids(ids)
        if ids.dim() not in (2, 3):
            raise ValueError(f"ids must be [T, K] or [calls, T, K], got {tuple(ids.shape)}")
        with self._exclude_threads():
            self._engine.adopt(predict_table(ids.flatten(1), self.num_experts, self.capacity, self.policy))

    def seed_from(self, ids: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
        """Start from what a prompt routed, whose experts are all on the device: no byte crosses the bus.

        `ids` [T, K], the tokens in order; `weights` [E, ...] each. Sets the state that a call for each of
        about `FOLLOWED` tokens would have left, the last one and others at equal distances before it; calls,
        hits and misses are not counted. The engine ``device`` does not synchronize, and an id out of range
        is ignored; ``host`` reads the ids, raises ValueError for such an id and copies from the host.
        """
        _check_ids(ids)
        with self._exclude_threads():
            self._engine.seed_from(choose_followed(ids, self._engine.rows), weights)

    @property
    def layout(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Name -> shape and type of one expert's tensor, with the number of experts in front."""
        return {
            name: (torch.Size((self.num_experts, *shape)), dtype)
            for name, (shape, dtype) in self._store.shapes.items()
        }

    def allocate_all(self) -> dict[str, torch.Tensor]:
        """Return room for all experts on the device, [E, ...] each, not initialized."""
        return {
            name: torch.empty(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self.layout.items()
        }

    def make_copier(self, buffers: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Return what copies all experts to `buffers`, [E, ...] each, on the stream that is current then.

        With the engine ``device`` experts in slots do not cross the bus, nothing synchronizes, and the copies
        can be captured in a CUDA graph. No other call of this cache may run meanwhile.
        """
        return self._engine.make_copier(buffers)

    @property
    def stats(self) -> CacheStats:
        """Calls, hits and misses since the start. Reads them off the device, which synchronizes."""
        return self._engine.read_stats()

    @property
    def packed(self) -> bool:
        """Return True if host tensors are packed."""
        return bool(self._store.packed)

    @property
    def pin_failure(self) -> str | None:
        """The reason that the host tensors are not pinned; None if they are."""
        return self._store.reason

    @property
    def memory(self) -> CacheMemory:
        """The memory that this cache holds."""
        total = self._store.nbytes
        slots = sum(tensor.nbytes for tensor in self._engine.slots.values())
        pinned = total if self._store.pinned else 0
        device = slots + self._engine.state_bytes
        return CacheMemory(pinned, total - pinned, device, self._store.uncached_bytes)

    def resident(self) -> list[int]:
        """The expert in each slot, -1 for a free one. Reads the state, which may synchronize."""
        return list(self._engine.read_table().expert_of)

    @contextmanager
    def _exclude_threads(self) -> Iterator[None]:
        own = threading.current_thread()
        inside = self._inside.setdefault("thread", own)
        if inside is not own and inside.is_alive():
            raise CacheBusy(
                "another thread is inside this ExpertCache: its slots are valid for one call at a time; "
                "use one cache a thread, or a lock around acquire and the computation"
            )
        self._inside["thread"] = own
        try:  # if Ctrl-C comes before, this thread is not locked out, as a lock would do
            yield
        finally:
            self._inside.clear()


def choose_followed(ids: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rows of `ids` [T, K] that `ExpertCache.seed_from` follows: at most ``2 * FOLLOWED - 1``.

    Only of the first `rows`, as in `ExpertCache.skip_padding`; then some may come twice.
    """
    count, step = len(ids), max(len(ids) // FOLLOWED, 1)
    if rows is None or not count:
        return ids[(count - 1) % step :: step] if count else ids
    place = torch.arange((count - 1) % step, count, step, device=ids.device)  # [calls]
    return ids[place * rows.to(ids.device).clamp(1, count) // count]


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _choose_engine(name: str) -> type[Engine]:
    if name == "resident":
        return ResidentEngine
    if name == "host":
        from moedoctor.fixes.cache.host import HostEngine

        return HostEngine
    from moedoctor.fixes.cache.device import DeviceEngine

    return DeviceEngine


def _check_ids(ids: torch.Tensor) -> None:
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"ids must be an int32 or int64 tensor, got {type(ids).__name__}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be int32 or int64, got {ids.dtype}")
