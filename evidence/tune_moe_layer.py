"""Measure tiles of a whole MoE layer on this GPU.

    python evidence/tune_moe_layer.py nvfp4 --tokens 1,8,64 --models qwen3-30b-a3b --seconds 280 -o tiles.json

Both products of a layer are timed by themselves with each tile of `tune_moe_layer.yaml`, in CUDA graphs,
with other experts from call to call, so that weights come from memory. Then the whole layer with the fastest
tiles, also with launches that begin early (`Tile.early`), is timed in turn with the tiles of today, and its
output is compared with the float32 reference. For few tokens the kernels without tensor cores (`RowTile`) are
measured too, in the whole layer. The file is written after each model, so a run that is cut leaves what it
measured. Tiles are chosen in `moedoctor.kernels.moe.tiles`. `moedoctor bench --backend OURS,MARLIN` compares
with vLLM's backends.

Needs an NVIDIA GPU that nothing else uses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml

from moedoctor import environment
from moedoctor.bench.moe.own_backends import convert_weights
from moedoctor.bench.timing import CallGraph, compare_times, time_cold
from moedoctor.kernels.moe.expert_weights import ExpertWeights
from moedoctor.kernels.moe.launch import launch_block_product, plan_blocks, run_experts
from moedoctor.kernels.moe.tiles import (
    TABLE,
    RowTile,
    Tile,
    choose_block_tiles,
    choose_row_tiles,
    find_measured_tiles,
    read_tile,
)
from moedoctor.models.layer_shape import LayerShape
from moedoctor.models.presets import find_model, list_presets
from moedoctor.processes.files import write
from moedoctor.reference.agreement import agree, choose_bounds
from moedoctor.reference.moe_layer import Problem, compute_expected, make_input, make_layer

_DEVICE = "cuda:0"
_REPLAYS = 5
_MOST_ROUTES = 8
_CHOICES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_KINDS = {"bf16": "none", "fp8": "fp8", "nvfp4": "nvfp4"}
"""The names of weights in `moedoctor.kernels.moe`."""
_MOST_ROW_TOKENS = {"nvfp4": 4, "fp8": 8, "bf16": 0}
"""With more tokens `RowTile` are not measured."""


@dataclass(frozen=True)
class Job:
    """One product with one tile."""

    shape: LayerShape
    quantization: str
    second: bool
    tile: Tile
    tokens: int

    @property
    def width(self) -> int:
        return self.shape.hidden if self.second else self.shape.intermediate

    @property
    def depth(self) -> int:
        return self.shape.intermediate if self.second else self.shape.hidden

    def make_weights(self) -> ExpertWeights:
        """Return weights of the right shape that need no memory."""
        types = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.int32}
        size = (self.shape.experts, self.shape.hidden if self.second else self.shape.w13_rows)
        groups = -(-self.depth // 64)
        columns = groups * 8 if self.quantization == "nvfp4" else self.depth
        values = torch.empty((1, 1, columns), dtype=types[self.quantization], device=_DEVICE)
        scale = None if self.quantization == "bf16" else torch.ones(self.shape.experts, device=_DEVICE)
        blocks = torch.empty((1, 1, 1), dtype=torch.int32, device=_DEVICE).expand(*size, groups)
        return ExpertWeights(
            values.expand(*size, columns), blocks if self.quantization == "nvfp4" else None, scale
        )

    def make_output(self) -> torch.Tensor:
        """Return room for the product: [pairs, N], or [splits, pairs, N] in float32."""
        pairs, splits = self.tokens * self.shape.top_k, self.tile.depth_splits
        size = (pairs, self.width) if splits == 1 else (splits, pairs, self.width)
        return torch.zeros(size, dtype=torch.bfloat16 if splits == 1 else torch.float32, device=_DEVICE)

    def launch(self, a: Any, weights: Any, out: Any, ids: Any, plan: Any) -> Any:
        """Compute the product and return it."""
        activation = "none" if self.second else self.shape.activation
        launch_block_product(a, weights, out, ids, plan, self.tile, activation=activation, second=self.second)
        return out


def list_tiles(shape: LayerShape, quantization: str, second: bool, tokens: int) -> list[Tile]:
    """Return the tiles to measure, the default first."""
    pairs, gated = tokens * shape.top_k, "gated" if shape.gated and not second else "plain"
    default = choose_block_tiles(pairs, shape.experts, _KINDS[quantization], gated=shape.gated)
    tiles = [default[second]]
    if tokens > 64:
        rows = pairs / shape.experts
        tiles += [Tile(*sizes) for sizes in _CHOICES["many"][gated] if rows / 4 <= sizes[0] <= 6 * rows]
        return list(dict.fromkeys(tiles))
    tiles += [Tile(16, *sizes) for sizes in _CHOICES["few"][quantization][gated]]
    if second:
        split = itertools.product(_CHOICES["split"][quantization], (2, 4))
        tiles += [Tile(16, *sizes, depth_splits=splits) for sizes, splits in split]
    if quantization == "nvfp4" and tokens <= _MOST_ROW_TOKENS[quantization]:
        # A warp or two without shared memory: many programs wait for memory beside each other.
        small = itertools.product((16, 32), (128, 256, 512), (1, 2), (1, 2, 4) if second else (1,))
        tiles += [Tile(8, *sizes, 1, depth_splits=splits) for *sizes, splits in small]
    return list(dict.fromkeys(tiles))


def list_row_tiles(shape: LayerShape, second: bool) -> list[RowTile]:
    """Return tiles with 4 to 32 words of weights a thread in a step, whose rows all threads share evenly.

    With more, or with more than 64 values that are asked for ahead, registers do not suffice. Programs take
    all experts of a token, in up to four turns, or those of one turn.
    """
    top_k = shape.top_k
    padded = 2 ** math.ceil(math.log2(top_k))
    lanes = [count for count in (2, 8) if top_k / 4 <= count < padded] + [padded] if second else [1]
    sizes = itertools.product(lanes, (1, 2, 4, 8), (2, 4, 8, 16, 32), (1, 2, 4), (True, False), (False, True))
    return [
        RowTile(columns, groups, warps, count, ahead, -(-top_k // count) if shared else 1)
        if second
        else RowTile(columns, groups, warps)
        for count, columns, groups, warps, ahead, shared in sizes
        if 16 * warps <= count * columns * groups
        and count * columns * groups * (2 if (ahead if second else shape.gated) else 1) / warps <= 128
        and not (second and ahead and count * groups / warps > 32)
        and not (shared and (count >= top_k or columns < 2 or groups > 16))
        and (second or not (ahead or shared))
    ]


def describe(error: Exception) -> str:
    """Return an error in a line."""
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def compile_product(job: Job) -> str | None:
    """Launch the kernel without any work, in a process of its own; return the error, or None."""
    try:
        pairs = job.tokens * job.shape.top_k
        ids = torch.full((job.tokens, job.shape.top_k), -1, dtype=torch.int32, device=_DEVICE)
        none = torch.full((1, 3), -1, dtype=torch.int32, device=_DEVICE)
        plan = (torch.empty(pairs, dtype=torch.int32, device=_DEVICE), none)
        a = torch.empty(1, job.depth, dtype=torch.bfloat16, device=_DEVICE)
        job.launch(a, job.make_weights(), job.make_output(), ids, plan)
        torch.cuda.synchronize()
    except Exception as error:
        return describe(error)
    return None


def compile_layer(shape: LayerShape, quantization: str, tokens: int, tiles: Any = None) -> str | None:
    """Call a layer without any work, in a process of its own; return the error, or None.

    Without `tiles` it gets those of the table.
    """
    try:
        weights = [
            Job(shape, quantization, second, Tile(16, 16, 16, 4, 1), tokens).make_weights()
            for second in (False, True)
        ]
        x = torch.zeros(tokens, shape.hidden, dtype=torch.bfloat16, device=_DEVICE)
        ids = torch.full((tokens, shape.top_k), -1, dtype=torch.int32, device=_DEVICE)
        topk_weights = torch.zeros(ids.shape, device=_DEVICE)
        run_experts(x, *weights, topk_weights, ids, activation=shape.activation, tiles=tiles)
        torch.cuda.synchronize()
    except Exception as error:
        return describe(error)
    return None


class Bench:
    """One model's layer, and the calls that are timed."""

    def __init__(self, shape: LayerShape, quantization: str) -> None:
        self.shape, self.quantization = shape, quantization
        self.layer = make_layer(shape, quantization, device=_DEVICE)
        self.weights = convert_weights(self.layer.w13), convert_weights(self.layer.w2)

    def call(self, x: Any, topk_weights: Any, ids: Any, tiles: Any) -> Callable[[], torch.Tensor]:
        """Return a call of the whole layer; without `tiles` it gets those of today."""
        activation = self.shape.activation
        return lambda: run_experts(x, *self.weights, topk_weights, ids, activation=activation, tiles=tiles)

    def draw_routes(self, tokens: int) -> list[torch.Tensor]:
        """Return sets of ids int32 [T, K]: balanced, and with other experts in each set."""
        experts, pairs = self.shape.experts, tokens * self.shape.top_k
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))  # [E]
        count = min(_MOST_ROUTES, max(2, experts // pairs))
        return [
            order[(torch.arange(pairs) + index * pairs) % experts].view(tokens, -1).int().to(_DEVICE)
            for index in range(count)
        ]

    def draw_inputs(self, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (x, topk_weights, topk_ids) for each set of routes."""
        for seed, ids in enumerate(self.draw_routes(tokens)):
            draw = torch.Generator(_DEVICE).manual_seed(seed)
            weights = torch.rand(ids.shape, generator=draw, device=_DEVICE).softmax(dim=1)  # [T, K]
            yield make_input(self.layer, tokens, "none", seed=seed, device=_DEVICE), weights, ids

    def time_products(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Return microseconds of each of these jobs, which are of one product and number of tokens."""
        routes = self.draw_routes(jobs[0].tokens)
        rows, expected = [], None
        for job in jobs:
            draw = torch.Generator(_DEVICE).manual_seed(7)
            height = job.tokens * self.shape.top_k if job.second else job.tokens
            a = torch.randn(height, job.depth, generator=draw, device=_DEVICE).bfloat16()
            # Always with a plan, so that numbers of tokens share kernels; the tiles matter alike without it.
            plans = [plan_blocks(ids, self.shape.experts, job.tile.block_m) for ids in routes]
            row: dict[str, Any] = {"second": job.second, "tile": asdict(job.tile)}
            rows.append(row)
            try:
                out = job.make_output()
                calls = [
                    lambda ids=ids, plan=plan, out=out, a=a, job=job: job.launch(
                        a, self.weights[job.second], out, ids, plan
                    )
                    for ids, plan in zip(routes, plans, strict=True)
                ]
                first = calls[0]()
                total = first.float() if first.dim() == 2 else first.sum(0)  # [P, N]
                if not job.second:  # rows are in the order of the plan
                    total = total[plans[0][0].long().argsort()]
                expected = total if expected is None else expected
                row["difference"] = float((total - expected).norm() / expected.norm())
                graph = CallGraph(calls, len(calls) * _repeat(job.tokens))
                graph()
                row["us"] = sorted(graph() for _ in range(_REPLAYS))[_REPLAYS // 2]
                del graph
            except Exception as error:
                row["error"] = describe(error)
        return rows

    def time_rows(self, tokens: int) -> tuple[tuple[RowTile, RowTile], list[dict[str, Any]]]:
        """Return the fastest pair of `RowTile` for the layer, first products first, and all times.

        Each call alone, with a cold L2 cache, as `moedoctor bench` does: calls that follow each other hide
        what a launch waits for at its start.
        """
        inputs, rows, fastest = next(self.draw_inputs(tokens)), [], math.inf
        best = choose_row_tiles(1, self.shape.top_k, self.shape.experts, self.quantization, gated=True)
        assert best is not None
        for second in (False, True):
            for tile in list_row_tiles(self.shape, second):
                tiles = (best[0], tile) if second else (tile, best[1])
                row: dict[str, Any] = {"second": second, "tile": asdict(tile)}
                rows.append(row)
                call = self.call(*inputs, tiles)
                try:
                    call()
                    row["us"] = time_cold(call, _DEVICE, rounds=_REPLAYS).median
                except Exception as error:
                    row["error"] = str(error)[:200]
                    continue
                if row["us"] < fastest:
                    fastest, best = row["us"], tiles
        return best, rows

    def compare(
        self, tokens: int, tiles: tuple[Tile, Tile], rows: tuple[RowTile, RowTile] | None
    ) -> dict[str, Any]:
        """Time the layer with `tiles`, also early, and with today's in turn; check it."""
        sets = list(self.draw_inputs(tokens))
        early = (tiles[0], replace(tiles[1], early=True))
        choices: dict[str, Any] = {"default": self._find_today(tokens), "tuned": tiles, "early": early}
        if rows is not None:
            choices["rows"] = rows
        calls = {
            name: [self.call(*inputs, None if name == "default" else chosen) for inputs in sets]
            for name, chosen in choices.items()
        }
        expected = compute_expected(Problem(self.layer, *sets[0]), "none")  # [T, H]
        wrong = {
            name: reason
            for name, rotation in calls.items()
            if (reason := agree(rotation[0](), expected, choose_bounds("none")).reason) is not None
        }
        launches = len(sets) * _repeat(tokens)
        times = compare_times(calls, baseline="tuned", launches=launches, replays=15)
        microseconds = {name: spread.median for name, spread in times.times.items()}
        # The fastest of ours that is right; what is best for each product may not be for the layer.
        right = [name for name in choices if name not in wrong] or ["default"]
        fastest = min(right, key=lambda name: microseconds[name])
        return {
            "wrong": wrong,
            "us": microseconds,
            "tuned_over": {name: 1 / spread.median for name, spread in times.ratios.items()},
            "fastest": fastest,
            "tiles": [asdict(tile) for tile in choices[fastest]],
        }

    def _find_today(self, tokens: int) -> tuple[Any, Any]:
        """Return the tiles that a call would get today."""
        shape, kind, pairs = self.shape, _KINDS[self.quantization], tokens * self.shape.top_k
        sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate}
        return (
            find_measured_tiles(pairs, shape.experts, kind, **sizes, gated=shape.gated)
            or choose_row_tiles(tokens, shape.top_k, shape.experts, kind, gated=shape.gated)
            or choose_block_tiles(pairs, shape.experts, kind, gated=shape.gated)
        )


def _repeat(tokens: int) -> int:
    """Return how often a graph calls each set of routes."""
    return 4 if tokens <= 4 else 2 if tokens <= 64 else 1


def tune(given: argparse.Namespace, shapes: dict[str, LayerShape], tokens: Sequence[int]) -> None:
    """Measure, print, and write the report."""
    quantization, until = given.quantization, time.monotonic() + given.seconds
    jobs = {
        (name, second, count): [
            Job(shape, quantization, second, tile, count)
            for tile in list_tiles(shape, quantization, second, count)
        ]
        for name, shape in shapes.items()
        for second in (False, True)
        for count in tokens
    }
    report: dict[str, Any] = {"quantization": quantization, "environment": environment.collect(), "rows": []}
    workers = max(1, min(15, (os.cpu_count() or 2) - 1))
    # Compiling holds Python's lock, so processes do it. Each has about half a GB of the GPU.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        # The number of tokens is no part of a kernel.
        kernels = {replace(job, tokens=0): job for job in itertools.chain(*jobs.values())}
        compiled = {key: pool.submit(compile_product, job) for key, job in kernels.items()}
        print(f"{len(compiled)} kernels, {workers} processes", flush=True)
        if min(tokens) <= _MOST_ROW_TOKENS[quantization]:
            _print_errors(
                pool.submit(compile_layer, shape, quantization, 1, tiles)
                for shape in shapes.values()
                for tiles in _pair_all(list_row_tiles(shape, False), list_row_tiles(shape, True))
            )
        for name, shape in shapes.items():
            if until - time.monotonic() < 15:
                print(f"no time is left for {name}")
                break
            try:
                for row in _tune_model(name, Bench(shape, quantization), tokens, jobs, compiled, until):
                    report["rows"].append(row)
            except Exception as error:
                report["rows"].append({"model": name, "error": describe(error)})
                print(name, describe(error), flush=True)
            torch.cuda.empty_cache()
            write(given.output, json.dumps(report, indent=1))
            if given.table:
                write_table(report, shapes)
        for future in compiled.values():
            future.cancel()
        if given.table:
            few = {
                replace(shape, experts=8, top_k=2): None for shape in shapes.values()
            }  # of `moedoctor bench`
            layers = [*itertools.product(shapes.values(), tokens), *((shape, 17) for shape in few)]
            _print_errors(pool.submit(compile_layer, shape, quantization, count) for shape, count in layers)


def _pair_all(first: Sequence[RowTile], second: Sequence[RowTile]) -> Iterator[tuple[RowTile, RowTile]]:
    """Yield as many pairs as the longer list is long; the other begins again."""
    for place in range(max(len(first), len(second))):
        yield first[place % len(first)], second[place % len(second)]


def _print_errors(waiting: Iterator[Future[str | None]]) -> None:
    for future in list(waiting):
        if error := future.result():
            print(error, flush=True)


def _tune_model(
    name: str,
    bench: Bench,
    tokens: Sequence[int],
    jobs: dict[tuple[str, bool, int], list[Job]],
    compiled: dict[Job, Future[str | None]],
    until: float,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model: the products for each number of tokens, then the layer for each."""
    best: dict[int, tuple[Tile, Tile]] = {}
    for count in tokens:
        measured = []
        for second in (False, True):
            ready = []
            for job in jobs[name, second, count]:
                error = compiled[replace(job, tokens=0)].result(timeout=max(1.0, until - time.monotonic()))
                if error is None:
                    ready.append(job)
                else:
                    yield {"model": name, "tile": asdict(job.tile), "error": error}
            measured += bench.time_products(ready)
        best[count] = _choose_fastest(measured)
        yield {"model": name, "tokens": count, "products": measured}
        print(f"{name} {bench.quantization} {count}: best {best[count]}", flush=True)
    for count in tokens:
        row: dict[str, Any] = {"model": name, "tokens": count, "tiles": list(map(asdict, best[count]))}
        rows = None
        if count <= _MOST_ROW_TOKENS[bench.quantization]:
            rows, row["row_tiles"] = bench.time_rows(count)
        try:
            row |= bench.compare(count, best[count], rows)
        except Exception as error:
            row["error"] = describe(error)
        yield row
        shown = {key: row.get(key) for key in ("us", "fastest", "tiles", "wrong", "error")}
        print(f"{name} {bench.quantization} {count}: {shown}", flush=True)


def _choose_fastest(measured: Sequence[dict[str, Any]]) -> tuple[Tile, Tile]:
    """Return the fastest pair of tiles with the same BLOCK_M."""
    right = [row for row in measured if row.get("us") and row.get("difference", math.inf) < 0.02]
    pairs = [
        (first["us"] + second["us"], Tile(**first["tile"]), Tile(**second["tile"]))
        for first, second in itertools.product(right, right)
        if not first["second"] and second["second"] and first["tile"]["block_m"] == second["tile"]["block_m"]
    ]
    _, first, second = min(pairs, key=lambda pair: pair[0])
    return first, second


def write_table(report: dict[str, Any], shapes: dict[str, LayerShape]) -> None:
    """Add the fastest tiles to `TABLE`, in place of older ones of the same layer and number of pairs."""
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {"layers": []}
    table["gpus"] = sorted({*table.get("gpus", ()), report["environment"]["gpu"]})
    layers = {tuple(each["layer"]): {row["pairs"]: row for row in each["tiles"]} for each in table["layers"]}
    for row in (row for row in report["rows"] if "us" in row):
        shape = shapes[row["model"]]
        key = (_KINDS[report["quantization"]], shape.hidden, shape.intermediate, shape.gated, shape.experts)
        pairs = row["tokens"] * shape.top_k
        first, second = (_omit_defaults(tile) for tile in row["tiles"])
        layers.setdefault(key, {})[pairs] = {"pairs": pairs, "first": first, "second": second}
    table["layers"] = [
        {"layer": list(key), "tiles": [tiles for _, tiles in sorted(rows.items())]}
        for key, rows in sorted(layers.items(), key=lambda layer: str(list(layer[0])))
    ]
    write(TABLE, json.dumps(table, indent=1) + "\n")


def _omit_defaults(tile: dict[str, Any]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(read_tile(tile))}
    return {name: value for name, value in tile.items() if value != defaults[name]}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("quantization", choices=tuple(_KINDS))
    parser.add_argument("--models", default=",".join(list_presets()))
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--table", action="store_true", help="write the fastest tiles to the table")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    shapes = {name: find_model(name).experts.layer for name in given.models.split(",")}
    tune(given, shapes, [int(text) for text in given.tokens.split(",")])


if __name__ == "__main__":
    main()
