"""Ranks that exchange tensors through gloo: a thread each, in one process, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Rank:
    """One rank of a group, and the collectives that it has called."""

    number: int
    count: int
    group: Any
    calls: list[str]
    """Names of the collectives, also of the one that waits now."""

    def reduce(self, value: torch.Tensor, name: str = "all_reduce") -> torch.Tensor:
        """Return the sum of `value` over the ranks. Raises RuntimeError after the group's time limit."""
        self.calls.append(name)
        total = value.clone()
        self.group.allreduce([total]).wait()
        return total

    def gather(self, value: torch.Tensor, name: str = "all_gather") -> torch.Tensor:
        """Return the `value` [N, ...] of all ranks, [ranks * N, ...]. Raises RuntimeError as above."""
        self.calls.append(name)
        parts = [torch.empty_like(value) for _ in range(self.count)]
        self.group.allgather([parts], [value.contiguous()]).wait()
        return torch.cat(parts)

    def take_shard(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of `value` along a dimension."""
        return value.chunk(self.count, dim)[self.number]


@dataclass(frozen=True)
class Ended:
    """The end of one rank: what its function returned or raised, and the collectives it called."""

    result: Any
    error: Exception | None
    calls: Sequence[str]


def run_ranks(count: int, work: Callable[[Rank], Any], seconds: float) -> list[Ended]:
    """Run `work` on each of `count` ranks. A collective that others do not join fails after `seconds`."""
    if not dist.is_gloo_available():
        raise RuntimeError("this torch was built without gloo")
    c10d: Any = dist  # its types lack HashStore
    store = c10d.HashStore()

    def connect(number: int) -> Rank:
        group = dist.ProcessGroupGloo(store, number, count, timedelta(seconds=seconds))
        return Rank(number, count, group, [])

    def run(rank: Rank) -> Ended:
        try:
            return Ended(work(rank), None, rank.calls)
        except (RuntimeError, AssertionError) as error:
            return Ended(None, error, rank.calls)

    # All groups live until the last rank has ended: one that is gone would be reported at once.
    with ThreadPoolExecutor(count) as pool:
        ranks = list(pool.map(connect, range(count)))
        return list(pool.map(run, ranks))
