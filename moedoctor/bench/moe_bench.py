"""Backends on the layers of a benchmark: checked first, timed after. Runs in a child process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moedoctor.bench.backends import registry
from moedoctor.bench.backends.base import Backend, Prepared, Variant
from moedoctor.bench.expert_load import Routing, make_routes
from moedoctor.bench.moe_layer import Layer, Problem, make_input, make_layer
from moedoctor.bench.moe_timing import LayerTimes, time_layer
from moedoctor.bench.parity import ParityResult, check_output, check_parity
from moedoctor.bench.roofline import Roofline
from moedoctor.bench.timing import Spread
from moedoctor.models.layer_shape import BITS, LayerShape
from moedoctor.subjects.base import UnavailableError

_CONTROL_BYTES = 2**28
"""Layers above this size are checked with the controls that change outputs; the others need copies of it."""


@dataclass(frozen=True)
class Task:
    """One backend on one layer."""

    variant: Variant
    model: str
    """What reports call the layer."""
    shape: LayerShape
    tokens: tuple[int, ...]
    routing: Routing
    device: str
    seed: int = 0


def measure(task: Task, roofline: Roofline) -> Iterator[dict[str, Any]]:
    """A row for each number of tokens, or one with ``unavailable`` where the backend cannot run here."""
    head = {"backend": task.variant.name, "quantization": task.variant.quantization, "model": task.model}
    backend = registry.create(task.variant)
    reason = backend.unavailable(task.shape, task.device)
    if reason is None:
        try:
            layer = make_layer(task.shape, task.variant.quantization, seed=task.seed, device=task.device)
            prepared = backend.prepare(layer)
        except UnavailableError as error:
            reason = str(error)
    if reason is not None:
        yield {**head, "unavailable": reason}
        return
    for index, tokens in enumerate(task.tokens):
        problem = _problem(task, layer, tokens)
        yield {**head, "tokens": tokens, **_row(task, backend, prepared, problem, roofline, first=index == 0)}
    del layer, prepared, problem
    gc.collect()
    if task.device.startswith("cuda"):
        torch.cuda.empty_cache()


def _problem(task: Task, layer: Layer, tokens: int) -> Problem:
    weights, ids = make_routes(task.shape, tokens, task.routing, seed=task.seed, device=task.device)
    x = make_input(layer, tokens, task.variant.activations, seed=task.seed, device=task.device)  # [T, H]
    return Problem(layer, x, weights, ids)


def _row(
    task: Task, backend: Backend, prepared: Prepared, problem: Problem, roofline: Roofline, *, first: bool
) -> dict[str, Any]:
    started = time.perf_counter()
    activations = task.variant.activations
    small = task.shape.weight_bytes(task.shape.experts, BITS["bf16"]) <= _CONTROL_BYTES
    if first and small:
        parity = check_parity(backend, problem, prepared)
    else:
        parity = check_output(prepared, problem, activations)
    row: dict[str, Any] = {
        **_parity_facts(parity),
        **_work(task, problem, prepared.bits or BITS[task.variant.quantization]),
    }
    if parity.right:

        def call() -> torch.Tensor:
            return prepared(problem.x, problem.topk_weights, problem.topk_ids)

        row |= _memory(prepared, problem, task.device)
        times = time_layer(call, task.device, capturable=backend.capturable)
        row |= _time_facts(times) | _speed(times, row, roofline, activations)
    row["seconds"] = round(time.perf_counter() - started, 2)
    return row


def _parity_facts(parity: ParityResult) -> dict[str, Any]:
    agreement = parity.agreement
    return {
        "right": parity.right,
        "wrong": None if parity.right else _what_is_wrong(parity),
        "cosine": agreement.cosine,
        "norm_ratio": agreement.norm_ratio,
        "matched": agreement.matched,
        "worst_error": agreement.error,
        "worst_token": agreement.error_token,
        "worst_element": agreement.error_element,
        "deterministic": parity.deterministic,
        "controls_noticed": f"{len(parity.controls) - len(parity.missed)} of {len(parity.controls)}",
    }


def _what_is_wrong(parity: ParityResult) -> str:
    if parity.agreement.reason is not None:
        return (
            f"{parity.agreement.wrong_tokens} of {parity.agreement.tokens} tokens: {parity.agreement.reason}"
        )
    return f"the comparison did not notice {', '.join(parity.missed)}"


def _work(task: Task, problem: Problem, bits: float) -> dict[str, Any]:
    """What has to be moved and computed at the least: the experts that are chosen, the input, the output."""
    active = int(problem.topk_ids.unique().numel())
    outside = 2 * problem.x.numel() * problem.x.element_size() + problem.topk_ids.numel() * 8
    return {
        "active_experts": active,
        "bytes": task.shape.weight_bytes(active, bits) + outside,
        "flops": task.shape.flops(problem.topk_ids.numel()),
    }


def _memory(prepared: Prepared, problem: Problem, device: str) -> dict[str, Any]:
    """Bytes at the peak of one call beyond weights and input, with buffers that stay between calls."""
    kept = sum(one.numel() * one.element_size() for one in prepared.workspaces())
    if not device.startswith("cuda"):
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    prepared(problem.x, problem.topk_weights, problem.topk_ids)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device)
    return {"workspace_bytes": kept + peak - before, "peak_memory_bytes": peak}


def _time_facts(times: LayerTimes) -> dict[str, Any]:
    facts: dict[str, Any] = {"timed": times.how, **_spread("time_us", times.time)}
    for name, spread in (("warm_us", times.warm), ("eager_us", times.eager)):
        if spread is not None:
            facts |= _spread(name, spread)
    return facts


def _spread(name: str, spread: Spread) -> dict[str, float]:
    return {
        name: round(spread.median, 3),
        f"{name}_p20": round(spread.p20, 3),
        f"{name}_p80": round(spread.p80, 3),
    }


def _speed(times: LayerTimes, row: Mapping[str, Any], roofline: Roofline, activations: str) -> dict[str, Any]:
    seconds = max(times.time.median, 1e-3) * 1e-6  # never 0, which noise can make of a cold time
    operands = "fp8" if activations == "fp8" else "bf16"
    return {
        "tflops": round(row["flops"] / seconds / 1e12, 4),
        "gigabytes_per_second": round(row["bytes"] / seconds / 1e9, 3),
        "roofline_share": round(roofline.least_seconds(row["bytes"], row["flops"], operands) / seconds, 4),
    }
