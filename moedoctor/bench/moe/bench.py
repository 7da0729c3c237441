"""Backends on the layers of a benchmark: checked first, timed after. Runs in a child process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from moedoctor.bench.moe import backends
from moedoctor.bench.moe.parity import ParityResult, check_parity, expect
from moedoctor.bench.moe.task import LayerTask, Routing
from moedoctor.bench.roofline import Roofline
from moedoctor.bench.timing import LayerTimes, time_layer
from moedoctor.models.layer_shape import BITS, LayerShape
from moedoctor.reference.agreement import agree, choose_bounds
from moedoctor.reference.moe_backend import Backend, Prepared
from moedoctor.reference.moe_layer import Problem, make_input, make_layer, make_problem
from moedoctor.results import UnavailableError

_FEW_EXPERTS, _FEW_TOP_K, _FEW_TOKENS = 8, 2, 17
"""The layer whose weights get planted faults: each fault needs a copy, and a model's layer is too large."""


class _WrongWhenTimedError(Exception):
    """A backend that was right before gave a wrong result in the calls that were timed."""


def measure(task: LayerTask, device: str, roofline: Roofline) -> Iterator[dict[str, Any]]:
    """Yield an event ``point`` before each number of tokens is measured, and then an event ``row``.

    If the backend cannot run here, the only event is a row with ``unavailable``.
    """
    variant = task.variant
    head = {"backend": variant.name, "quantization": variant.quantization, "model": task.model}
    backend = backends.create(variant)
    reason = backend.unavailable(task.shape, device)
    if reason is None:
        try:
            few = _check_few_experts(task, device, backend)
            layer = make_layer(task.shape, variant.quantization, device=device)
            prepared = backend.prepare(layer)
        except UnavailableError as error:
            reason = str(error)
    if reason is not None:
        yield {"event": "row", **head, "unavailable": reason}
        return
    for tokens in task.tokens:
        yield {"event": "point", "tokens": tokens}
        weights, ids = make_routes(task.shape, tokens, task.routing, device=device)
        x = make_input(layer, tokens, variant.activations, device=device)  # [T, H]
        problem = Problem(layer, x, weights, ids)
        yield {
            "event": "row",
            **head,
            "tokens": tokens,
            **_measure_point(backend, prepared, problem, roofline, few, tune=task.tune),
        }
    del layer, prepared, problem
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def make_routes(
    shape: LayerShape, tokens: int, routing: Routing, *, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights float32 [T, K] that add up to 1, ids int32 [T, K], distinct in a row).

    A trace with fewer tokens is repeated from its start. Raises ValueError for a trace with another number of
    experts a token, or with ids out of range.
    """
    draw = torch.Generator().manual_seed(0)
    if routing.kind == "trace":
        ids = _read_trace(shape, routing)[torch.arange(tokens) % len(routing.rows)]  # [T, K]
    elif routing.kind == "zipf":
        rank = torch.randperm(shape.experts, generator=draw).double() + 1  # [E]
        noise = torch.rand(tokens, shape.experts, generator=draw, dtype=torch.float64)  # [T, E]
        # The K largest of log-weight plus Gumbel noise are a draw without replacement.
        scores = -routing.skew * rank.log() - (-noise.clamp(min=1e-12).log()).log()  # [T, E]
        ids = scores.topk(shape.top_k, dim=1).indices  # [T, K]
    else:  # the experts of a random order in turn: none is chosen twice more than another
        order = torch.randperm(shape.experts, generator=draw)  # [E]
        pair = torch.arange(tokens * shape.top_k).view(tokens, shape.top_k)  # [T, K]
        ids = order[pair % shape.experts]  # [T, K]
    weights = torch.softmax(torch.rand(tokens, shape.top_k, generator=draw), dim=1)  # [T, K]
    return weights.to(device), ids.int().to(device)


def _read_trace(shape: LayerShape, routing: Routing) -> torch.Tensor:
    """Return the ids [R, K] of the trace."""
    if not routing.rows:
        raise ValueError("routing: the trace holds no tokens")
    ids = torch.tensor(routing.rows)  # [R, K]
    if ids.ndim != 2 or ids.shape[1] != shape.top_k:
        raise ValueError(f"routing: the trace has {len(routing.rows[0])} experts a token, not {shape.top_k}")
    if int(ids.min()) < 0 or int(ids.max()) >= shape.experts:
        raise ValueError(f"routing: the trace has experts outside 0 to {shape.experts - 1}")
    return ids


def _check_few_experts(task: LayerTask, device: str, backend: Backend) -> ParityResult:
    """Run `check_parity` with every control on a layer of the same sizes with few experts.

    Takes the task's own layer if the backend cannot compute one with few experts. Raises UnavailableError.
    """
    experts, top_k = min(task.shape.experts, _FEW_EXPERTS), min(task.shape.top_k, _FEW_TOP_K)
    shape = replace(task.shape, experts=experts, top_k=top_k)
    if backend.unavailable(shape, device) is not None:
        shape = task.shape
    layer = make_layer(shape, task.variant.quantization, device=device)
    return check_parity(backend, make_problem(layer, _FEW_TOKENS, task.variant.activations, device=device))


def _measure_point(
    backend: Backend,
    prepared: Prepared,
    problem: Problem,
    roofline: Roofline,
    few: ParityResult,
    *,
    tune: bool,
) -> dict[str, Any]:
    started = time.perf_counter()
    device, activations = str(problem.x.device), backend.variant.activations
    output = prepared(problem.x, problem.topk_weights, problem.topk_ids)  # [T, H]
    expected = expect(problem, activations, output)  # [T, H]
    parity = check_parity(backend, problem, prepared, weights=False, expected=expected)
    work = _count_work(problem, prepared.bits or BITS[backend.variant.quantization])
    row: dict[str, Any] = {**_describe_parity(parity, few), **work}
    if row["right"]:

        def call() -> torch.Tensor:
            return prepared(problem.x, problem.topk_weights, problem.topk_ids)

        memory = _measure_memory(prepared, call, device)
        check = partial(_check_timed, expected, activations)
        try:
            times = time_layer(call, device, capturable=backend.capturable, check=check)
        except _WrongWhenTimedError as error:
            row |= {"right": False, "wrong": str(error)}
        else:
            row |= memory | _describe_times(times, work, roofline, activations)
            if tune:
                from moedoctor.bench.moe.triton_tiles import tune_tiles

                shape, tokens = problem.layer.shape, problem.x.shape[0]
                right = partial(check, "with other tiles")
                row["tiles"] = tune_tiles(call, shape, backend.variant.quantization, tokens, device, right)
    row["seconds"] = round(time.perf_counter() - started, 2)
    return row


def _check_timed(expected: torch.Tensor, activations: str, how: str, output: object) -> None:
    """Raise _WrongWhenTimedError if `output` is not `expected` [T, H]."""
    assert isinstance(output, torch.Tensor)
    agreement = agree(output, expected, choose_bounds(activations))
    if agreement.reason is not None:
        wrong = f"{agreement.wrong_tokens} of {agreement.tokens} tokens: {agreement.reason}"
        raise _WrongWhenTimedError(f"once it was timed ({how}): {wrong}")


def _describe_parity(parity: ParityResult, few: ParityResult) -> dict[str, Any]:
    """Return the comparison. ``failed``: it missed a planted fault, and then no figure can be trusted."""
    agreement = parity.agreement
    controls = {**few.controls, **parity.controls}
    missed = [name for name in controls if name in few.missed or name in parity.missed]
    facts: dict[str, Any] = {
        "right": agreement.right and few.agreement.right and not missed,
        "wrong": None if missed else _find_wrong(parity, few),
        "cosine": agreement.cosine,
        "norm_ratio": agreement.norm_ratio,
        "matched": agreement.matched,
        "worst_error": agreement.error,
        "worst_token": agreement.error_token,
        "worst_element": agreement.error_element,
        "deterministic": parity.deterministic,
        "controls_noticed": f"{len(controls) - len(missed)} of {len(controls)}",
        "controls_missed": missed,
    }
    if missed:
        facts["failed"] = f"the comparison did not notice {', '.join(missed)}"
    return facts


def _find_wrong(parity: ParityResult, few: ParityResult) -> str | None:
    for where, result in (("", parity), ("in the layer that faults are planted in: ", few)):
        agreement = result.agreement
        if agreement.reason is not None:
            return f"{where}{agreement.wrong_tokens} of {agreement.tokens} tokens: {agreement.reason}"
    return None


def _count_work(problem: Problem, bits: float) -> dict[str, int]:
    """Return the least that has to be moved and computed: the chosen experts, the input, the output."""
    shape, active = problem.layer.shape, int(problem.topk_ids.unique().numel())
    outside = 2 * problem.x.nbytes + problem.topk_ids.numel() * 8
    return {
        "active_experts": active,
        "bytes": shape.count_weight_bytes(active, bits) + outside,
        "flops": shape.count_flops(problem.topk_ids.numel()),
    }


def _measure_memory(prepared: Prepared, call: Callable[[], object], device: str) -> dict[str, Any]:
    """Return bytes at the peak of one call beyond weights and input, buffers that outlive a call included."""
    if not device.startswith("cuda"):
        return {}
    buffers = sum(buffer.nbytes for buffer in prepared.list_workspaces())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device)
    return {"workspace_bytes": buffers + peak - before, "peak_memory_bytes": peak}


def _describe_times(
    times: LayerTimes, work: Mapping[str, int], roofline: Roofline, activations: str
) -> dict[str, Any]:
    facts: dict[str, Any] = {"timed": times.how, "rounds": times.time.samples}
    for name, spread in (("time_us", times.time), ("warm_us", times.warm), ("eager_us", times.eager)):
        if spread is not None:
            facts |= spread.to_row(name, digits=3)
    seconds = max(times.time.median, 1e-3) * 1e-6  # never 0, which noise can make of a cold time
    operands = "fp8" if activations.startswith("fp8") else "bf16"
    least = roofline.compute_least_seconds(work["bytes"], work["flops"], operands)
    return facts | {
        "tflops": round(work["flops"] / seconds / 1e12, 4),
        "gigabytes_per_second": round(work["bytes"] / seconds / 1e9, 3),
        "roofline_share": round(least / seconds, 4),
    }
