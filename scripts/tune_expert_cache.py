"""Print what the expert cache's settings give on this GPU: tiles of groups, and programs that read the bus.

    python scripts/tune_expert_cache.py tiles|bus

Tiles are chosen in `moedoctor.kernels.moe.cuts`, numbers of programs in `moedoctor.kernels.cache.transfer`.
Needs an NVIDIA GPU and a host that nothing else uses.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest.mock import patch

import torch
import triton

from moedoctor.bench.cache import speed as expert_cache_misses
from moedoctor.bench.cache.speed import Host, Model
from moedoctor.bench.timing import graph_time
from moedoctor.kernels.cache import transfer as cache_copies
from moedoctor.kernels.moe import launch as moe_launch
from moedoctor.kernels.moe.cuts import Cut

_TOKENS, _GROUPS = 1024, (1, 2, 4, 8)
_COMPILERS = 12
_UP = (
    Cut(64, 64, 64, 64, 4, 3, 2),
    Cut(64, 64, 64, 64, 4, 4, 2),
    Cut(64, 64, 64, 64, 8, 3, 2),
    Cut(64, 64, 64, 128, 4, 2, 2),
    Cut(64, 64, 32, 64, 4, 3, 2),
    Cut(64, 64, 32, 64, 4, 5, 2),
    Cut(64, 64, 32, 128, 4, 3, 2),
    Cut(64, 64, 128, 64, 8, 2, 2),
    Cut(64, 64, 128, 64, 4, 2, 2),
    Cut(64, 128, 64, 64, 8, 3),
    Cut(64, 128, 64, 64, 4, 3),
    Cut(64, 128, 32, 64, 4, 4),
    Cut(64, 128, 32, 64, 8, 3),
    Cut(128, 128, 32, 64, 8, 3),
    Cut(128, 128, 64, 64, 8, 3),
)
_DOWN = (
    Cut(64, 64, 128, 64, 4, 3, 2),
    Cut(64, 64, 128, 64, 8, 3, 2),
    Cut(64, 64, 128, 128, 4, 2, 2),
    Cut(64, 64, 128, 64, 4, 4, 2),
    Cut(64, 64, 64, 64, 4, 4, 2),
    Cut(64, 64, 64, 128, 4, 3, 2),
    Cut(64, 64, 256, 64, 8, 3, 2),
    Cut(64, 128, 128, 32, 8, 5),
    Cut(64, 128, 128, 64, 4, 3),
    Cut(64, 128, 64, 64, 4, 4),
    Cut(128, 128, 64, 64, 4, 3),
    Cut(128, 128, 128, 64, 8, 3),
)
_PROGRAMS = ((16, 48), (16, 96), (8, 128), (16, 128), (16, 192), (16, 264))


def tiles() -> None:
    """Microseconds of each product of a layer, cut up in each way, computed in one call and in groups."""
    cuts = [("up", one) for one in _UP] + [("down", one) for one in _DOWN]
    # Compiling holds Python's lock, so processes do it side by side. Each has 1.3 GB of the GPU.
    with ProcessPoolExecutor(_COMPILERS, get_context("spawn")) as pool:
        errors = list(pool.map(_compile, cuts))
    print(f"microseconds of {_TOKENS} tokens in {', '.join(map(str, _GROUPS))} groups one after another")
    layer = _Layer()
    first: dict[str, torch.Tensor] = {}
    for (product, cut), error in zip(cuts, errors, strict=True):
        if error:
            print(f"{product:4} {cut}: {error}", flush=True)
            continue
        result = layer.compute(product, cut, 4)
        same = torch.equal(first.setdefault(product, result), result)
        times = [layer.time(product, cut, groups) for groups in _GROUPS]
        found = "  ".join(f"{time:6.1f} {time / times[0] - 1:+6.1%}" for time in times)
        print(f"{product:4} {cut}: {found}{'' if same else '  DIFFERENT BITS'}", flush=True)


def _compile(of: tuple[str, Cut]) -> str | None:
    try:
        _Layer().compute(*of, 4)
    except (RuntimeError, triton.TritonError) as error:
        return f"{type(error).__name__}: {error}"
    return None


class _Layer:
    """One layer of Qwen3-30B-A3B with random weights, and tokens sorted by expert."""

    def __init__(self) -> None:
        model, draw = Model(), torch.Generator("cuda").manual_seed(0)
        shapes = {
            "w13": (model.experts, 2 * model.intermediate_size, model.hidden_size),
            "w2": (model.experts, model.hidden_size, model.intermediate_size),
        }
        self._weights = {
            name: torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=draw) / shape[-1] ** 0.5
            for name, shape in shapes.items()
        }
        self._experts = torch.randperm(model.experts, generator=draw, device="cuda").int()  # [slots]
        scores = torch.rand(_TOKENS, model.experts, generator=draw, device="cuda")  # [T, E]
        ids = scores.topk(model.top_k, dim=1).indices.int()  # [T, K]
        x = torch.randn(_TOKENS, model.hidden_size, generator=draw, device="cuda").bfloat16()  # [T, H]
        self._rows = moe_launch.Rows.sort(x, ids, model.experts, model.intermediate_size)
        self._rows.h.normal_(generator=draw)

    def run(self, product: str, cut: Cut, groups: int) -> None:
        """A launch a group."""
        size = len(self._experts) // groups
        for start in range(0, len(self._experts), size):
            weights = {name: one[start : start + size] for name, one in self._weights.items()}
            held = self._experts[start : start + size]
            if product == "up":
                moe_launch.launch_up(self._rows, weights, held, cut, activation="silu")
            else:
                moe_launch.launch_down(self._rows, weights, held, cut)

    def time(self, product: str, cut: Cut, groups: int) -> float:
        """Microseconds."""
        return graph_time(lambda: self.run(product, cut, groups), launches=4, replays=25).median

    def compute(self, product: str, cut: Cut, groups: int) -> torch.Tensor:
        """A copy of what it gives."""
        self.run(product, cut, groups)
        torch.cuda.synchronize()
        return (self._rows.h if product == "up" else self._rows.product).clone()


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
    {"tiles": tiles, "bus": bus}[sys.argv[1]]()
