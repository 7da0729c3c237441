"""What the measurements of the expert cache share: a model's shape, its weights on the host, its routes.

Layers have slots of their own. `Model.host_layers` sets of host tensors serve all of them in turn, which
saves host memory and changes no transfer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from moedoctor.bench.timing import elapsed
from moedoctor.fixes.expert_cache import ExpertStore
from moedoctor.trace.format import shipped_trace
from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

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
    host_layers: int = 4
    skew: float = 1.0
    """Of the Zipf distribution that routes."""
    drift: float = 0.1
    seed: int = 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's two matrices in bfloat16."""
        return 2 * 3 * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class Host:
    """What several measurements share: host weights, their stores as they are and packed, the bus."""

    weights: list[dict[str, torch.Tensor]]
    plain: list[ExpertStore]
    packed: list[ExpertStore]
    pinned_gb_s: float | None
    """Of a plain pinned copy; None without a GPU."""

    @classmethod
    def make(cls, model: Model, device: str) -> Host:
        weights = host_weights(model, device)
        return cls(
            weights,
            [ExpertStore(layer) for layer in weights],
            [ExpertStore(layer, packed=True) for layer in weights],
            pinned_bandwidth(device) / 1e9 if torch.device(device).type == "cuda" else None,
        )


@dataclass(frozen=True)
class Inputs:
    """Routes and activations of a number of steps, on the device."""

    ids: torch.Tensor
    """int32 [steps, layers, T, K]"""
    topk_weights: torch.Tensor
    """float32 [T, K]"""
    x: torch.Tensor
    """bfloat16 [T, H]"""

    @classmethod
    def make(cls, model: Model, ids: torch.Tensor, device: str) -> Inputs:
        """Draw weights and activations for `ids` int32 [steps, layers, T, K]."""
        batch = ids.shape[2]
        draw = torch.Generator(device).manual_seed(model.seed)
        topk_weights = torch.rand(batch, model.top_k, generator=draw, device=device)  # [T, K]
        x = torch.randn(batch, model.hidden_size, generator=draw, device=device).bfloat16()  # [T, H]
        return cls(ids.to(device).contiguous(), topk_weights / topk_weights.sum(1, keepdim=True), x)


@functools.lru_cache(maxsize=2)  # for the timed steps, and for those that `pr_wrong_steps` counts
def trace_ids(model: Model, batch: int, steps: int, *, recorded: bool) -> torch.Tensor:
    """Return int32 [steps, layers, T, K] on the CPU, of `recorded_ids` or of Zipf routes with drift.

    Fewer steps of a Zipf trace are the start of more steps.
    """
    if recorded:
        return recorded_ids(model, steps)
    rows = steps * batch
    shape = {"experts": model.experts, "top_k": model.top_k, "layers": model.layers, "rows": rows}
    settings = ZipfSettings(**shape, streams=batch, skew=model.skew, drift=model.drift, seed=model.seed)
    ids = torch.tensor(zipf_trace(settings).topk_ids, dtype=torch.int32)
    return ids.view(steps, batch, model.layers, model.top_k).transpose(1, 2).contiguous()


def recorded_ids(model: Model, steps: int) -> torch.Tensor:
    """Return int32 [steps, layers, 1, K] on the CPU, of the trace that ships with moedoctor.

    A model with more layers gets the trace's layers again, from further on in the text. Raises ValueError for
    a model with other experts or top-k, or if the trace is too short.
    """
    trace = shipped_trace()
    layers, repeats = len(trace.layers), -(-model.layers // len(trace.layers))
    if (model.experts, model.top_k) != (trace.num_experts, trace.top_k) or steps > trace.rows:
        raise ValueError(
            f"the trace has {trace.rows} tokens of {trace.num_experts} experts, top-{trace.top_k}"
        )
    ids = torch.tensor(list(trace.topk_ids), dtype=torch.int32).view(-1, layers, 1, model.top_k)
    apart = (trace.rows - steps) // max(repeats - 1, 1)
    parts = [ids[start * apart : start * apart + steps] for start in range(repeats)]
    return torch.cat(parts, dim=1)[:, : model.layers]


def host_weights(model: Model, device: str) -> list[dict[str, torch.Tensor]]:
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


def pinned_bandwidth(device: str) -> float:
    """Return bytes a second of asynchronous copies from pinned memory, the best of ten of 256 MB."""
    source = torch.empty(PLAIN_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return source.nbytes / min(
        elapsed(lambda: target.copy_(source, non_blocking=True), device) for _ in range(10)
    )
