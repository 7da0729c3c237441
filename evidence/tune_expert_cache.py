"""Print the effect of tiles on the products of a layer in groups on this GPU.

    python evidence/tune_expert_cache.py

Tiles are chosen in `moedoctor.kernels.moe.tiles`. Needs an NVIDIA GPU and a host that nothing else uses.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import triton

from moedoctor.bench.cache.model import Model
from moedoctor.bench.timing import time_graph
from moedoctor.kernels.moe.launch import Rows, launch_products
from moedoctor.kernels.moe.tiles import Tile

_TOKENS, _GROUPS = 1024, (1, 2, 4, 8)
_COMPILERS = 12
_TILES = {
    "w13": (
        Tile(64, 64, 64, 4, 3, splits=2),
        Tile(64, 64, 64, 4, 4, splits=2),
        Tile(64, 64, 64, 8, 3, splits=2),
        Tile(64, 64, 128, 4, 2, splits=2),
        Tile(64, 32, 64, 4, 3, splits=2),
        Tile(64, 32, 64, 4, 5, splits=2),
        Tile(64, 32, 128, 4, 3, splits=2),
        Tile(64, 128, 64, 8, 2, splits=2),
        Tile(64, 128, 64, 4, 2, splits=2),
        Tile(64, 64, 64, 8, 3, tall_m=128),
        Tile(64, 64, 64, 4, 3, tall_m=128),
        Tile(64, 32, 64, 4, 4, tall_m=128),
        Tile(64, 32, 64, 8, 3, tall_m=128),
        Tile(128, 32, 64, 8, 3),
        Tile(128, 64, 64, 8, 3),
    ),
    "w2": (
        Tile(64, 128, 64, 4, 3, splits=2),
        Tile(64, 128, 64, 8, 3, splits=2),
        Tile(64, 128, 128, 4, 2, splits=2),
        Tile(64, 128, 64, 4, 4, splits=2),
        Tile(64, 64, 64, 4, 4, splits=2),
        Tile(64, 64, 128, 4, 3, splits=2),
        Tile(64, 256, 64, 8, 3, splits=2),
        Tile(64, 128, 32, 8, 5, tall_m=128),
        Tile(64, 128, 64, 4, 3, tall_m=128),
        Tile(64, 64, 64, 4, 4, tall_m=128),
        Tile(128, 64, 64, 4, 3),
        Tile(128, 128, 64, 8, 3),
    ),
}


def tiles() -> None:
    """Print microseconds of each product of a layer with each tile, in one call and in groups."""
    candidates = [(weight, tile) for weight, tiles in _TILES.items() for tile in tiles]
    # Compiling holds Python's lock, so processes do it side by side. Each has 1.3 GB of the GPU.
    with ProcessPoolExecutor(_COMPILERS, get_context("spawn")) as pool:
        errors = list(pool.map(_compile, candidates))
    print(f"microseconds of {_TOKENS} tokens in {', '.join(map(str, _GROUPS))} groups one after another")
    layer = _Layer()
    first: dict[str, torch.Tensor] = {}
    for (weight, tile), error in zip(candidates, errors, strict=True):
        if error:
            print(f"{weight:4} {tile}: {error}", flush=True)
            continue
        result = layer.compute(weight, tile, 4)
        same = torch.equal(first.setdefault(weight, result), result)
        times = [layer.time(weight, tile, groups) for groups in _GROUPS]
        figures = "  ".join(f"{time:6.1f} {time / times[0] - 1:+6.1%}" for time in times)
        print(f"{weight:4} {tile}: {figures}{'' if same else '  DIFFERENT BITS'}", flush=True)


def _compile(candidate: tuple[str, Tile]) -> str | None:
    try:
        _Layer().compute(*candidate, 4)
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
        self._rows = Rows.sort(x, ids, model.experts, model.intermediate_size)
        self._rows.h.normal_(generator=draw)

    def run(self, weight: str, tile: Tile, groups: int) -> None:
        """Launch one product once a group."""
        size = len(self._experts) // groups
        for start in range(0, len(self._experts), size):
            weights = {name: tensor[start : start + size] for name, tensor in self._weights.items()}
            experts = self._experts[start : start + size]
            launch_products(
                self._rows, weights, experts, activation="silu", tiles=(tile, tile), products=(weight,)
            )

    def time(self, weight: str, tile: Tile, groups: int) -> float:
        """Return microseconds."""
        return time_graph(lambda: self.run(weight, tile, groups), launches=4, replays=25).median

    def compute(self, weight: str, tile: Tile, groups: int) -> torch.Tensor:
        """Return a copy of the product."""
        self.run(weight, tile, groups)
        torch.cuda.synchronize()
        return (self._rows.h if weight == "w13" else self._rows.product).clone()


if __name__ == "__main__":
    tiles()
