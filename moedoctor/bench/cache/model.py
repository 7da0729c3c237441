"""Shared by the measurements of the expert cache: a model's shape, its weights on the host, its routes.

Layers have slots of their own. `Model.host_layers` sets of host tensors serve all of them in turn, which
saves host memory and changes no transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moedoctor.bench.cache.replay import load_shipped_trace
from moedoctor.bench.timing import measure_seconds

# E = experts, T = tokens, K = top_k

PLAIN_BYTES = 1 << 28
"""Of a plain copy from pinned memory."""


@dataclass(frozen=True)
class Model:
    """The shape that is measured; by default Qwen3-30B-A3B's."""

    layers: int = 48
    experts: int = 128
    top_k: int = 8
    hidden_size: int = 2048
    intermediate_size: int = 768
    host_layers: int = 1
    seed: int = 0


def list_recorded_ids(model: Model, steps: int) -> torch.Tensor:
    """Return int32 [steps, layers, 1, K] on the CPU, of the trace that ships with moedoctor.

    A model with more layers gets the trace's layers again, from further on in the text. Raises ValueError for
    a model with other experts or top-k, or if the trace is too short.
    """
    trace = load_shipped_trace()
    layers, repeats = len(trace.layers), -(-model.layers // len(trace.layers))
    if (model.experts, model.top_k) != (trace.num_experts, trace.top_k) or steps > trace.rows:
        raise ValueError(
            f"the trace has {trace.rows} tokens of {trace.num_experts} experts, top-{trace.top_k}"
        )
    ids = torch.tensor(list(trace.topk_ids), dtype=torch.int32).view(-1, layers, 1, model.top_k)
    apart = (trace.rows - steps) // max(repeats - 1, 1)
    parts = [ids[start * apart : start * apart + steps] for start in range(repeats)]
    return torch.cat(parts, dim=1)[:, : model.layers]


def make_host_weights(model: Model, device: str) -> list[dict[str, torch.Tensor]]:
    """Return `host_layers` layers of random bfloat16 experts in pinned memory; drawn on `device`."""
    pin = torch.device(device).type == "cuda"
    layers = []
    for layer in range(model.host_layers):
        draw = torch.Generator(device).manual_seed(model.seed + layer)
        weights = {}
        for name, rows, columns in (
            ("w13", 2 * model.intermediate_size, model.hidden_size),
            ("w2", model.hidden_size, model.intermediate_size),
        ):
            values = torch.randn(model.experts, rows, columns, generator=draw, device=device) / columns**0.5
            pinned = torch.empty(values.shape, dtype=torch.bfloat16, pin_memory=pin)
            weights[name] = pinned.copy_(values)  # [E, rows, columns]
        layers.append(weights)
    return layers


def measure_pinned_bandwidth(device: str) -> float:
    """Return bytes a second of asynchronous copies from pinned memory, the best of ten of 256 MB."""
    source = torch.empty(PLAIN_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return source.nbytes / min(
        measure_seconds(lambda: target.copy_(source, non_blocking=True), device) for _ in range(10)
    )
