"""What runs in the child for PARITY: one backend, one layer."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from moedoctor.bench.moe.parity import bounds_of, check_parity, unusual_ids
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_layer import make_layer, make_problem
from moedoctor.results import Observation, UnavailableError

if TYPE_CHECKING:
    from moedoctor.faults.selection.backend_parity import BackendParityParameters


def observe(
    parameters: BackendParityParameters, device: str, backend: Any, must_be_available: bool
) -> Observation:
    """Compare `backend` with the reference. Raises UnavailableError where it cannot run on `device`."""
    shape = LayerShape(
        parameters.hidden,
        parameters.intermediate,
        parameters.experts,
        parameters.top_k,
        parameters.activation,
    )
    reason = backend.unavailable(shape, device) if must_be_available else None
    if reason is None and parameters.ids == "empty":
        reason = backend.refuses_empty_slots()
    if reason is not None:
        raise UnavailableError(reason)
    variant = backend.variant
    layer = make_layer(shape, variant.quantization, seed=parameters.seed, device=device)
    problem = make_problem(layer, parameters.tokens, variant.activations, seed=parameters.seed, device=device)
    problem = replace(problem, topk_ids=unusual_ids(problem.topk_ids, parameters.ids))
    result = check_parity(backend, problem)
    return Observation(
        {
            "computed_by": variant.label,
            "activations_quantised": variant.activations,
            "bounds": asdict(bounds_of(variant.activations)),
            **result.evidence(),
        }
    )
