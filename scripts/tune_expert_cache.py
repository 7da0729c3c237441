"""Print what the expert cache's settings give on this GPU: tiles of groups, and programs that read the bus.

    python scripts/tune_expert_cache.py tiles|bus

`Tiles` are chosen in `moedoctor.kernels.moe_launch`, numbers of programs in `moedoctor.kernels.cache_copies`.
Needs an NVIDIA GPU and a host that nothing else uses.
"""

from __future__ import annotations

import functools
import sys
from unittest.mock import patch

import torch

from moedoctor.bench import expert_cache_groups, expert_cache_misses
from moedoctor.bench.timing import compare_times
from moedoctor.kernels import cache_copies, moe_launch
from moedoctor.kernels.moe_launch import Tiles

_TOKENS, _GROUPS = 1024, (2, 4, 8)
_TILES = (
    Tiles(64, 64, 128, 64, 4, 3, 2),
    Tiles(64, 64, 128, 32, 4, 4, 2),
    Tiles(64, 64, 64, 64, 4, 3, 2),
    Tiles(64, 64, 64, 32, 4, 4, 2),
    Tiles(128, 64, 128, 64, 8, 3, 1),
    Tiles(128, 64, 128, 32, 8, 4, 1),
)
_PROGRAMS = ((16, 48), (16, 96), (8, 128), (16, 128), (16, 192), (16, 264))


def tiles() -> None:
    """One call and its groups with each way to cut the products up; all give the same bits."""
    for one in _TILES:
        with patch.object(moe_launch, "choose_tiles", lambda *_, one=one: one):
            calls, whole, _ = expert_cache_groups.grouped_calls("cuda:0", tokens=_TOKENS, groups=_GROUPS)
            equal = all(torch.equal(call(), whole) for call in calls.values())
            times = compare_times(calls, baseline="1", launches=4, replays=60)
        added = ", ".join(f"{count} groups {times.ratios[str(count)].median - 1:+.1%}" for count in _GROUPS)
        print(
            f"{one}: {times.times['1'].median:.1f} us, {added}{'' if equal else ', DIFFERENT BITS'}",
            flush=True,
        )


def bus() -> None:
    """GB/s of experts where every access is a miss, by programs that copy and programs that unpack."""
    for copying, unpacking in _PROGRAMS:
        with patch.object(cache_copies.Transfer.launch, "__defaults__", (copying, unpacking)):
            rows = expert_cache_misses.miss_bandwidth("cuda:0", rounds=8)
        found = ", ".join(f"{row['engine']} {row['miss_gb_s']:.1f}" for row in rows)
        print(f"{copying} programs copy, {unpacking} unpack: {found} GB/s", flush=True)


if __name__ == "__main__":
    for module in (expert_cache_groups, expert_cache_misses):
        module.host_weights = functools.lru_cache(module.host_weights)
    {"tiles": tiles, "bus": bus}[sys.argv[1]]()
