"""Print what the expert cache's settings give on this GPU: tiles of groups, and programs that read the bus.

    python scripts/tune_expert_cache.py tiles|bus

`Tiles` are chosen in `moedoctor.kernels.moe_cuts`, numbers of programs in `moedoctor.kernels.cache_copies`.
Needs an NVIDIA GPU and a host that nothing else uses.
"""

from __future__ import annotations

import functools
import sys
import time
from unittest.mock import patch

import torch
import triton

from moedoctor.bench import expert_cache_groups, expert_cache_misses
from moedoctor.bench.expert_cache_decode import Model
from moedoctor.bench.expert_cache_run import Host
from moedoctor.bench.timing import compare_times
from moedoctor.kernels import cache_copies, moe_launch
from moedoctor.kernels.moe_cuts import Cut, Tiles

_TOKENS, _GROUPS = 1024, (2, 4, 8)
_UP, _DOWN = Cut(64, 128, 64, 64, 8, 3), Cut(64, 128, 128, 32, 8, 5)
_TILES = (
    Tiles(_UP, _DOWN),
    Tiles(Cut(64, 64, 64, 64, 4, 3), Cut(64, 64, 128, 64, 4, 3), 2),
    Tiles(Cut(64, 128, 64, 32, 8, 5), _DOWN),
    Tiles(_UP, Cut(64, 128, 64, 64, 8, 3)),
    Tiles(Cut(64, 128, 64, 64, 4, 3), Cut(64, 128, 128, 64, 4, 3)),
    Tiles(Cut(64, 128, 32, 64, 8, 3), _DOWN),
)
"""The most promising first."""
_SECONDS = 40
_PROGRAMS = ((16, 48), (16, 96), (8, 128), (16, 128), (16, 192), (16, 264))


def tiles() -> None:
    """One call and its groups with each way to cut the products up."""
    until = time.monotonic() + _SECONDS
    for one in _TILES:
        if time.monotonic() > until:
            print(f"{one}: not measured within {_SECONDS} s")
            continue
        try:
            print(f"{one}: {_times(one)}", flush=True)
        except (RuntimeError, triton.TritonError) as error:
            print(f"{one}: {type(error).__name__}: {error}", flush=True)


def _times(tiles: Tiles) -> str:
    with patch.object(moe_launch, "choose_tiles", lambda *_: tiles):
        calls, whole, _ = expert_cache_groups.grouped_calls("cuda:0", tokens=_TOKENS, groups=_GROUPS)
        equal = all(torch.equal(call(), whole) for call in calls.values())
        times = compare_times(calls, baseline="1", launches=4, replays=60)
    found = [f"one call {times.times['1'].median:.1f} us"]
    for count in _GROUPS:
        spread, ratio = times.times[str(count)], times.ratios[str(count)]
        found.append(f"{count} groups {spread.median:.1f} us {ratio.median - 1:+.1%}")
    return ", ".join(found if equal else [*found, "DIFFERENT BITS"])


def bus() -> None:
    """GB/s of experts where every access is a miss, by programs that copy and programs that unpack."""
    model = Model(host_layers=1)
    host = Host.make(model, "cuda:0")
    for copying, unpacking in _PROGRAMS:
        with patch.object(cache_copies.Transfer.launch, "__defaults__", (copying, unpacking)):
            rows = expert_cache_misses.miss_bandwidth("cuda:0", model=model, host=host, rounds=8)
        found = ", ".join(f"{row['engine']} {row['miss_gb_s']:.1f}" for row in rows)
        print(f"{copying} programs copy, {unpacking} unpack: {found} GB/s", flush=True)


if __name__ == "__main__":
    expert_cache_groups.host_weights = functools.lru_cache(expert_cache_groups.host_weights)
    {"tiles": tiles, "bus": bus}[sys.argv[1]]()
