"""Measure tiles of a whole MoE layer on this GPU.

    python evidence/tune_moe_layer.py nvfp4 --tokens 1,8,64 --models qwen3-30b-a3b --seconds 280 -o tiles.json

Both products of a layer are timed by themselves with each tile, in CUDA graphs, with other experts from call
to call, so that weights come from memory. Then the whole layer with the fastest tiles, also with launches
that begin early (`Tile.early`), is timed in turn with the tiles of today, and its output is compared with the
float32 reference. For few tokens the kernels without tensor cores (`RowTile`) are measured too, in the whole
layer. The file is written after each model, so a run that is cut leaves what it measured. Tiles are chosen in
`moedoctor.kernels.moe.tiles`. `moedoctor bench --backend OURS,MARLIN` compares with vLLM's backends.

Needs an NVIDIA GPU that nothing else uses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

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
from moedoctor.reference.moe_layer import Layer, Problem, compute_expected, make_input, make_layer

_DEVICE = "cuda:0"
_REPLAYS = 5
_MOST_ROUTES = 8

# (BLOCK_N, BLOCK_K, warps, stages) for blocks of 16 tokens
_FEW = {
    ("nvfp4", True): (
        *((64, 256, 4, stages) for stages in (2, 3, 4)),
        *((64, 128, 4, stages) for stages in (3, 4, 6)),
        (64, 512, 4, 2),
        (128, 128, 8, 3),
        (128, 128, 4, 3),
    ),
    ("nvfp4", False): (
        *((128, 128, 4, stages) for stages in (3, 4)),
        *((64, 256, 4, stages) for stages in (2, 3, 4)),
        *((64, 128, 4, stages) for stages in (3, 4, 6)),
        *((128, 256, 4, stages) for stages in (2, 3)),
        (64, 512, 4, 2),
        (32, 256, 4, 4),
        (128, 128, 8, 4),
        (128, 256, 8, 3),
    ),
    ("bf16", True): (
        *((64, 64, 4, stages) for stages in (3, 4, 5)),
        *((64, 128, 4, stages) for stages in (2, 3, 4)),
        *((32, 128, 4, stages) for stages in (3, 4)),
        (64, 256, 4, 2),
        (32, 256, 4, 2),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
    ),
    ("bf16", False): (
        *((64, 64, 4, stages) for stages in (3, 4, 6)),
        *((64, 128, 4, stages) for stages in (2, 3, 4)),
        *((128, 64, 4, stages) for stages in (3, 4)),
        *((128, 128, 4, stages) for stages in (2, 3)),
        (64, 256, 4, 2),
        (32, 128, 4, 4),
        (128, 128, 8, 3),
    ),
}
_FEW["fp8", True] = _FEW["fp8", False] = (
    *((64, 64, 4, stages) for stages in (3, 4)),
    *((64, 128, 4, stages) for stages in (2, 3, 4)),
    *((128, 64, 4, stages) for stages in (3, 4)),
    *((64, 256, 4, stages) for stages in (2, 3)),
    (32, 128, 4, 4),
    (32, 256, 4, 3),
    (128, 128, 4, 3),
    (128, 128, 8, 3),
    (64, 128, 8, 3),
)
_MOST_ROW_TOKENS = {"nvfp4": 4, "fp8": 8, "bf16": 0}
"""With more tokens `RowTile` are not measured."""
_SPLITS = {
    "nvfp4": ((64, 256, 4, 3), (128, 256, 4, 3), (64, 128, 4, 4), (128, 128, 4, 4)),
    "bf16": ((64, 128, 4, 3), (128, 64, 4, 4), (64, 64, 4, 4)),
    "fp8": ((64, 128, 4, 3), (128, 128, 4, 3)),
}
"""Tiles of second products whose depth is also shared by 2 and 4 programs."""
# (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) if an expert has more tokens
_MANY = {
    True: (
        (16, 64, 128, 4, 3),
        (32, 64, 64, 4, 4),
        (32, 64, 128, 4, 3),
        (32, 128, 64, 8, 3),
        (64, 64, 64, 4, 3),
        (64, 64, 64, 4, 4),
        (64, 64, 128, 4, 2),
        (64, 128, 64, 8, 3),
        (128, 64, 64, 4, 3),
        (128, 64, 64, 8, 3),
        (128, 64, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (256, 64, 64, 8, 3),
    ),
    False: (
        (16, 128, 64, 4, 4),
        (16, 64, 128, 4, 3),
        (32, 64, 128, 4, 3),
        (32, 128, 64, 4, 4),
        (32, 128, 128, 4, 3),
        (64, 128, 64, 4, 3),
        (64, 128, 64, 4, 4),
        (64, 256, 64, 8, 3),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (256, 128, 64, 8, 3),
    ),
}


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

    @property
    def activation(self) -> str:
        return "none" if self.second else self.shape.activation


def known(shape: LayerShape, quantization: str, pairs: int) -> tuple[Any, Any]:
    """Return the tiles that a call would get today."""
    kind = "none" if quantization == "bf16" else quantization
    rows = choose_row_tiles(pairs // shape.top_k, shape.top_k, shape.experts, kind, gated=shape.gated)
    return (
        find_measured_tiles(
            pairs,
            shape.experts,
            kind,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            gated=shape.gated,
        )
        or rows
        or choose_block_tiles(pairs, shape.experts, kind, gated=shape.gated)
    )


def candidates(shape: LayerShape, quantization: str, second: bool, tokens: int) -> list[Tile]:
    """Return the tiles to measure, the default first."""
    pairs = tokens * shape.top_k
    kind = "none" if quantization == "bf16" else quantization
    tiles = [choose_block_tiles(pairs, shape.experts, kind, gated=shape.gated)[second]]
    gated = shape.gated and not second
    if tokens <= 64:
        tiles += [Tile(16, *sizes) for sizes in _FEW[quantization, gated]]
        if second:
            tiles += [
                Tile(16, *sizes, depth_splits=splits)
                for sizes, splits in itertools.product(_SPLITS[quantization], (2, 4))
            ]
        if quantization == "nvfp4" and tokens <= _MOST_ROW_TOKENS[quantization]:
            # A warp or two without shared memory: many programs wait for memory beside each other.
            tiles += [
                Tile(8, *sizes, 1, depth_splits=splits)
                for *sizes, splits in itertools.product(
                    (16, 32), (128, 256, 512), (1, 2), (1, 2, 4) if second else (1,)
                )
            ]
    else:
        rows = pairs / shape.experts
        tiles += [Tile(*sizes) for sizes in _MANY[gated] if rows / 4 <= sizes[0] <= 6 * rows]
    return list(dict.fromkeys(tiles))


def row_candidates(shape: LayerShape, second: bool) -> list[RowTile]:
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


def zip_all(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return as many tuples as the longest list is long; the others begin again."""
    return [
        tuple(entries[place % len(entries)] for entries in lists) for place in range(max(map(len, lists)))
    ]


def compile_rows(shape: LayerShape, quantization: str, tiles: tuple[RowTile, RowTile]) -> str | None:
    """Launch both kernels without any work, in a process of its own; return the error, or None."""
    jobs = [Job(shape, quantization, second, Tile(16, 16, 16, 4, 1), 1) for second in (False, True)]
    return _compile(shape, 1, [_no_weights(job) for job in jobs], tiles)


def compile_job(job: Job) -> str | None:
    """Launch the kernel without any work, in a process of its own; return the error, or None."""
    try:
        pairs = job.tokens * job.shape.top_k
        ids = torch.full((job.tokens, job.shape.top_k), -1, dtype=torch.int32, device=_DEVICE)
        none = torch.full((1, 3), -1, dtype=torch.int32, device=_DEVICE)
        plan = (torch.empty(pairs, dtype=torch.int32, device=_DEVICE), none)
        a = torch.empty(1, job.depth, dtype=torch.bfloat16, device=_DEVICE)
        launch(job, a, _no_weights(job), _output(job), ids, plan)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200] if str(error) else ''}"
    return None


def _no_weights(job: Job) -> ExpertWeights:
    """Return weights of the right shape that need no memory."""
    shape = job.shape
    size = (shape.experts, shape.hidden if job.second else shape.w13_rows)
    types = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.int32}
    groups = -(-job.depth // 64)
    columns = groups * 8 if job.quantization == "nvfp4" else job.depth
    values = torch.empty((1, 1, columns), dtype=types[job.quantization], device=_DEVICE).expand(
        *size, columns
    )
    if job.quantization == "bf16":
        return ExpertWeights(values)
    scale = torch.ones(shape.experts, device=_DEVICE)
    if job.quantization == "fp8":
        return ExpertWeights(values, None, scale)
    block_scales = torch.empty((1, 1, 1), dtype=torch.int32, device=_DEVICE).expand(*size, groups)
    return ExpertWeights(values, block_scales, scale)


def _output(job: Job) -> torch.Tensor:
    """Return room for the product: [pairs, N], or [splits, pairs, N] in float32."""
    pairs, splits = job.tokens * job.shape.top_k, job.tile.depth_splits
    size = (pairs, job.width) if splits == 1 else (splits, pairs, job.width)
    return torch.zeros(size, dtype=torch.bfloat16 if splits == 1 else torch.float32, device=_DEVICE)


def launch(job: Job, a: Any, weights: Any, out: Any, ids: Any, plan: Any) -> Any:
    """Compute the product and return it."""
    launch_block_product(a, weights, out, ids, plan, job.tile, activation=job.activation, second=job.second)
    return out


class Bench:
    """One model's layer, and the calls that are timed."""

    def __init__(self, shape: LayerShape, quantization: str) -> None:
        self.shape, self.quantization = shape, quantization
        self.layer: Layer = make_layer(shape, quantization, device=_DEVICE)
        self.weights = convert_weights(self.layer.w13), convert_weights(self.layer.w2)

    def routes(self, tokens: int) -> list[torch.Tensor]:
        """Return sets of ids int32 [T, K]: balanced, and with other experts in each set."""
        experts, pairs = self.shape.experts, tokens * self.shape.top_k
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))  # [E]
        count = min(_MOST_ROUTES, max(2, experts // pairs))
        return [
            order[(torch.arange(pairs) + index * pairs) % experts].view(tokens, -1).int().to(_DEVICE)
            for index in range(count)
        ]

    def inputs(self, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (x, topk_weights, topk_ids) for each set of routes."""
        for seed, ids in enumerate(self.routes(tokens)):
            draw = torch.Generator(_DEVICE).manual_seed(seed)
            weights = torch.rand(ids.shape, generator=draw, device=_DEVICE).softmax(dim=1)  # [T, K]
            yield make_input(self.layer, tokens, "none", seed=seed, device=_DEVICE), weights, ids

    def time_products(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Return microseconds of each of these jobs, which are of one product and number of tokens."""
        routes = self.routes(jobs[0].tokens)
        rows, expected = [], None
        for job in jobs:
            draw = torch.Generator(_DEVICE).manual_seed(7)
            height = job.tokens * self.shape.top_k if job.second else job.tokens
            a = torch.randn(height, job.depth, generator=draw, device=_DEVICE).bfloat16()
            # Always with a plan, so that numbers of tokens share kernels; the tiles matter alike without it.
            plans = [plan_blocks(ids, self.shape.experts, job.tile.block_m) for ids in routes]
            row: dict[str, Any] = {"second": job.second, "tile": asdict(job.tile)}
            try:
                out = _output(job)
                calls = [
                    lambda ids=ids, plan=plan, out=out, a=a, job=job: launch(
                        job, a, self.weights[job.second], out, ids, plan
                    )
                    for ids, plan in zip(routes, plans, strict=True)
                ]
                first = calls[0]()
                total = first.float() if first.dim() == 2 else first.sum(0)  # [P, N]
                if not job.second:  # rows are in the order of the plan
                    total = total[plans[0][0].long().argsort()]
                expected = total if expected is None else expected
                row["difference"] = float((total - expected).norm() / expected.norm())
                launches = len(calls) * (4 if job.tokens <= 4 else 2 if job.tokens <= 64 else 1)
                graph = CallGraph(calls, launches)
                graph()
                row["us"] = sorted(graph() for _ in range(_REPLAYS))[_REPLAYS // 2]
                del graph
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            rows.append(row)
        return rows

    def time_rows(self, tokens: int) -> dict[str, Any]:
        """Return the fastest pair of `RowTile` for the layer, first products first, and all times.

        Each call alone, with a cold L2 cache, as `moedoctor bench` does: calls that follow each other hide
        what a launch waits for at its start.
        """
        (x, weights, ids), rows = next(self.inputs(tokens)), []
        best = choose_row_tiles(1, self.shape.top_k, self.shape.experts, self.quantization, gated=True)
        assert best is not None
        fastest = math.inf
        for second in (False, True):
            for tile in row_candidates(self.shape, second):
                tiles = (best[0], tile) if second else (tile, best[1])

                def call(tiles: Any = tiles) -> torch.Tensor:
                    return run_experts(
                        x, *self.weights, weights, ids, activation=self.shape.activation, tiles=tiles
                    )

                try:
                    call()
                    microseconds = time_cold(call, _DEVICE, rounds=_REPLAYS).median
                except Exception as error:
                    rows.append({"second": second, "tile": asdict(tile), "error": str(error)[:200]})
                    continue
                rows.append({"second": second, "tile": asdict(tile), "us": microseconds})
                if microseconds < fastest:
                    fastest, best = microseconds, tiles
        return {"tiles": best, "measured": rows}

    def compare(
        self,
        tokens: int,
        tiles: tuple[Tile, Tile],
        rows: tuple[Any, Any] | None = None,
    ) -> dict[str, Any]:
        """Time the layer with `tiles`, also early, and with today's in turn; check it."""
        sets = list(self.inputs(tokens))
        activation, row = self.shape.activation, {}

        def ours(chosen: tuple[Any, Any] | None) -> list[Any]:
            return [
                lambda x=x, weights=weights, ids=ids: run_experts(
                    x, *self.weights, weights, ids, activation=activation, tiles=chosen
                )
                for x, weights, ids in sets
            ]

        early = (tiles[0], replace(tiles[1], early=True))
        today = known(self.shape, self.quantization, tokens * self.shape.top_k)
        choices = {"default": today, "tuned": tiles, "early": early}
        if rows is not None:
            choices["rows"] = rows
        calls = {name: ours(None if name == "default" else chosen) for name, chosen in choices.items()}
        expected = compute_expected(Problem(self.layer, *sets[0]), "none")  # [T, H]
        row["wrong"] = {
            name: reason
            for name, rotation in calls.items()
            if (reason := agree(rotation[0](), expected, choose_bounds("none")).reason) is not None
        }
        launches = len(sets) * (4 if tokens <= 4 else 2 if tokens <= 64 else 1)
        times = compare_times(calls, baseline="tuned", launches=launches, replays=15)
        row["us"] = {name: spread.median for name, spread in times.times.items()}
        row["tuned_over"] = {name: 1 / spread.median for name, spread in times.ratios.items()}
        # The fastest of ours that is right; what is best for each product may not be for the layer.
        right = [name for name in choices if name not in row["wrong"]] or ["default"]
        fastest = min(right, key=lambda name: row["us"][name])
        row["fastest"], row["tiles"] = fastest, [asdict(tile) for tile in choices[fastest]]
        return row


def tune(
    quantization: str,
    models: Sequence[str],
    tokens: Sequence[int],
    seconds: float,
    output: Path,
    table: bool,
) -> None:
    """Measure, print, and write `output`."""
    began = time.monotonic()
    shapes = {name: find_model(name).experts.layer for name in models}
    jobs = {
        (name, second, count): [
            Job(shape, quantization, second, tile, count)
            for tile in candidates(shape, quantization, second, count)
        ]
        for name, shape in shapes.items()
        for second in (False, True)
        for count in tokens
    }
    report: dict[str, Any] = {"quantization": quantization, "environment": environment.collect(), "rows": []}
    workers = max(1, min(15, (os.cpu_count() or 2) - 1))
    # Compiling holds Python's lock, so processes do it. Each has about half a GB of the GPU.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures: dict[tuple[Any, ...], Future[str | None]] = {}
        for job in itertools.chain.from_iterable(jobs.values()):
            key = _kernel_key(job)
            if key not in futures:
                futures[key] = pool.submit(compile_job, job)
        print(f"{len(futures)} kernels, {workers} processes", flush=True)
        waiting = [
            pool.submit(compile_rows, shape, quantization, tiles)
            for shape in shapes.values()
            if min(tokens) <= _MOST_ROW_TOKENS[quantization]
            for tiles in zip_all(*(row_candidates(shape, second) for second in (False, True)))
        ]
        for error in filter(None, (future.result() for future in waiting)):
            print(error, flush=True)
        for name, shape in shapes.items():
            left = seconds - (time.monotonic() - began)
            if left < 15:
                print(f"no time is left for {name}")
                break
            try:
                _tune_model(name, shape, quantization, tokens, jobs, futures, report, began + seconds)
            except Exception as error:
                report["rows"].append({"model": name, "error": f"{type(error).__name__}: {str(error)[:300]}"})
                print(name, type(error).__name__, str(error)[:300], flush=True)
            torch.cuda.empty_cache()
            write(output, json.dumps(report, indent=1))
            if table:
                write_table(report, shapes, quantization)
        for future in futures.values():
            future.cancel()
        if not table:
            return
        few = {replace(shape, experts=8, top_k=2): None for shape in shapes.values()}  # of `moedoctor bench`
        layers = [
            *((shape, count) for shape in shapes.values() for count in tokens),
            *((shape, 17) for shape in few),
        ]
        for future in [pool.submit(compile_layer, shape, quantization, count) for shape, count in layers]:
            if error := future.result():
                print(error, flush=True)


def write_table(report: dict[str, Any], shapes: dict[str, LayerShape], quantization: str) -> None:
    """Add the fastest tiles to `TABLE`, in place of older ones of the same layer and number of pairs."""
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {"layers": []}
    table["gpus"] = sorted({*table.get("gpus", ()), report["environment"]["gpu"]})
    kind = "none" if quantization == "bf16" else quantization
    for row in report["rows"]:
        if "us" not in row:
            continue
        shape = shapes[row["model"]]
        key = [kind, shape.hidden, shape.intermediate, shape.gated, shape.experts]
        layer = next((layer for layer in table["layers"] if layer["layer"] == key), None)
        if layer is None:
            layer = {"layer": key, "tiles": []}
            table["layers"].append(layer)
        pairs = row["tokens"] * shape.top_k
        first, second = (_without_defaults(tile) for tile in row["tiles"])
        layer["tiles"] = [kept for kept in layer["tiles"] if kept["pairs"] != pairs]
        layer["tiles"].append({"pairs": pairs, "first": first, "second": second})
        layer["tiles"].sort(key=lambda entry: int(entry["pairs"]))
    table["layers"].sort(key=lambda layer: str(layer["layer"]))
    write(TABLE, json.dumps(table, indent=1) + "\n")


def _without_defaults(tile: dict[str, Any]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(read_tile(tile))}
    return {name: value for name, value in tile.items() if value != defaults[name]}


def compile_layer(shape: LayerShape, quantization: str, tokens: int) -> str | None:
    """Compile what a call with the tiles of the table needs, in a process of its own; return the error."""
    jobs = [Job(shape, quantization, second, Tile(16, 16, 16, 4, 1), tokens) for second in (False, True)]
    return _compile(shape, tokens, [_no_weights(job) for job in jobs], None)


def _compile(shape: LayerShape, tokens: int, weights: Sequence[ExpertWeights], tiles: Any) -> str | None:
    try:
        x = torch.zeros(tokens, shape.hidden, dtype=torch.bfloat16, device=_DEVICE)
        ids = torch.full((tokens, shape.top_k), -1, dtype=torch.int32, device=_DEVICE)
        topk_weights = torch.zeros(ids.shape, device=_DEVICE)
        run_experts(x, *weights, topk_weights, ids, activation=shape.activation, tiles=tiles)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _kernel_key(job: Job) -> tuple[Any, ...]:
    return job.shape, job.quantization, job.second, job.tile


def _tune_model(
    name: str,
    shape: LayerShape,
    quantization: str,
    tokens: Sequence[int],
    jobs: dict[tuple[str, bool, int], list[Job]],
    futures: dict[tuple[Any, ...], Future[str | None]],
    report: dict[str, Any],
    until: float,
) -> None:
    bench = Bench(shape, quantization)
    best: dict[int, tuple[Tile, Tile]] = {}
    for count in tokens:
        measured = []
        for second in (False, True):
            ready = []
            for job in jobs[name, second, count]:
                error = futures[_kernel_key(job)].result(timeout=max(1.0, until - time.monotonic()))
                if error is None:
                    ready.append(job)
                else:
                    report["rows"].append({"model": name, "tile": asdict(job.tile), "error": error})
            measured += bench.time_products(ready)
        best[count] = _fastest(measured)
        row = {"model": name, "tokens": count, "products": measured}
        report["rows"].append(row)
        default = [
            next(part["us"] for part in measured if part["second"] == second) for second in (False, True)
        ]
        print(f"{name} {quantization} {count}: default {default}, best {best[count]}", flush=True)
    for count in tokens:
        row = {"model": name, "tokens": count, "tiles": [asdict(tile) for tile in best[count]]}
        rows = None
        if count <= _MOST_ROW_TOKENS[quantization]:
            timed = bench.time_rows(count)
            rows = timed["tiles"]
            row["row_tiles"] = timed["measured"]
            print(f"{name} {count}: rows {rows}", flush=True)
        try:
            row |= bench.compare(count, best[count], rows)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        report["rows"].append(row)
        print(
            f"{name} {quantization} {count}: {row.get('us')}, {row.get('wrong')} {row.get('error', '')}",
            flush=True,
        )


def _fastest(measured: Sequence[dict[str, Any]]) -> tuple[Tile, Tile]:
    """Return the fastest pair of tiles with the same BLOCK_M."""
    right = [row for row in measured if row.get("us") and row.get("difference", math.inf) < 0.02]
    pairs = [
        (first["us"] + second["us"], Tile(**first["tile"]), Tile(**second["tile"]))
        for first, second in itertools.product(
            (row for row in right if not row["second"]), (row for row in right if row["second"])
        )
        if first["tile"]["block_m"] == second["tile"]["block_m"]
    ]
    _, first, second = min(pairs, key=lambda pair: pair[0])
    return first, second


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("quantization", choices=("bf16", "fp8", "nvfp4"))
    parser.add_argument("--models", default=",".join(list_presets()))
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--table", action="store_true", help="write the fastest tiles to the table")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    counts = [int(text) for text in given.tokens.split(",")]
    tune(
        given.quantization,
        given.models.split(","),
        counts,
        given.seconds,
        given.output,
        given.table,
    )


if __name__ == "__main__":
    main()
