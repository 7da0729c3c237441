"""What offloaded weights cost: bytes over PCIe for one token, and the bound on tokens per second from it.

The bound is for one request that decodes one token a step, with copies perfectly hidden behind each other
and compute free. Nothing real is faster; batches move more experts a step, shared by their tokens.

Only decoder layers can be offloaded: vLLM hands its offloader the modules that `make_layers` builds
(vllm/model_executor/models/utils.py), and embeddings and lm_head are none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from moedoctor.diagnose.plan.kv_cache import PlanError
from moedoctor.models.shape import ModelShape

MODES = ("uva", "copy")


@dataclass(frozen=True)
class Traffic:
    """Where offloaded weights lie and what a token moves. Bytes."""

    host_bytes: int
    """Weights that lie in host memory."""
    device_bytes: int
    """Device memory that holds copies of them: the slots of an expert cache."""
    bytes_per_token: float
    tokens_per_second: float | None
    """The bound; None where nothing moves."""
    how: str


def offload_traffic(
    shape: ModelShape,
    *,
    expert_bytes: int,
    layer_bytes: int,
    offload_bytes: int,
    mode: str,
    cache_slots: int | None,
    hit_rate: float | None,
    bandwidth: float,
) -> Traffic:
    """Traffic of an offload of `offload_bytes`, or of an expert cache of `cache_slots` slots a layer.

    `expert_bytes` are those of all routed experts, `layer_bytes` those of all else in the decoder layers,
    `bandwidth` is in bytes a second. Raises PlanError for values that cannot be.
    """
    experts = shape.experts
    one = expert_bytes / (experts.count * experts.layer.experts)
    active = experts.count * experts.layer.top_k * one
    if cache_slots is not None:
        if offload_bytes:
            raise PlanError("--offload and --expert-cache exclude each other; give one of them")
        if not experts.layer.top_k <= cache_slots <= experts.layer.experts:
            raise PlanError(
                f"--expert-cache {cache_slots}: expected {experts.layer.top_k} (top_k) to "
                f"{experts.layer.experts} slots a layer"
            )
        rate = cache_slots / experts.layer.experts if hit_rate is None else hit_rate
        how = f"hit rate {rate:.3f}" + (
            " of uniform routing; measure yours with bench --cache" if hit_rate is None else ""
        )
        moved = active * (1 - rate)
        return Traffic(
            expert_bytes, round(experts.count * cache_slots * one), moved, _bound(moved, bandwidth), how
        )
    if hit_rate is not None:
        raise PlanError(f"--hit-rate {hit_rate:g}: is of an expert cache; give --expert-cache SLOTS as well")
    if offload_bytes < 0 or offload_bytes > expert_bytes + layer_bytes:
        raise PlanError(
            f"--offload {offload_bytes / (1 << 30):g}: expected 0 to "
            f"{(expert_bytes + layer_bytes) / (1 << 30):.2f} GiB, the size of the decoder layers; embeddings "
            "and lm_head are not offloaded"
        )
    if not offload_bytes:
        return Traffic(0, 0, 0.0, None, "nothing is offloaded")
    if mode == "copy":
        how = "every offloaded byte is copied in every step (no UVA, or --offload-backend prefetch)"
        return Traffic(offload_bytes, 0, float(offload_bytes), _bound(offload_bytes, bandwidth), how)
    # Offloaded layer by layer, so experts and the rest are offloaded in the proportion that they have.
    share = offload_bytes / (expert_bytes + layer_bytes)
    moved = share * (active + layer_bytes)
    how = "UVA: kernels read what a token needs, the active experts and all the rest of an offloaded layer"
    return Traffic(offload_bytes, 0, moved, _bound(moved, bandwidth), how)


def _bound(moved: float, bandwidth: float) -> float | None:
    return bandwidth / moved if moved else None
