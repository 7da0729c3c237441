"""The lab of PARITY: one backend and one layer, compared with the reference."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from moedoctor.bench.moe.backends import create
from moedoctor.bench.moe.own_backends import Ours, Reference
from moedoctor.bench.moe.parity import check_parity, make_unusual_ids
from moedoctor.faults.selection.backend_parity import BackendParityParameters
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.agreement import choose_bounds
from moedoctor.reference.moe_layer import make_layer, make_problem
from moedoctor.results import Case, Evidence, UnavailableError


def model(case: Case, parameters: BackendParityParameters, release: None) -> Evidence:
    """Compare the reference, or our backend, with the reference."""
    variant = parameters.variant
    own = Reference if case.subject == "faulty" else Ours
    return observe(parameters, case.device, own(variant.quantization, variant.activations))


def kernel(case: Case, parameters: BackendParityParameters, release: None) -> Evidence:
    """Compare the installed backend. Raises UnavailableError if it cannot run here."""
    backend = create(parameters.variant)
    reason = backend.unavailable(_shape(parameters), case.device)
    if reason is not None:
        raise UnavailableError(reason)
    return observe(parameters, case.device, backend)


def observe(parameters: BackendParityParameters, device: str, backend: Any) -> Evidence:
    """Compare `backend` with the reference. Raises UnavailableError if it refuses ids of -1."""
    reason = backend.check_empty_slots() if parameters.ids in ("empty", "fewer") else None
    if reason is not None:
        raise UnavailableError(reason)
    variant = backend.variant
    layer = make_layer(_shape(parameters), variant.quantization, seed=parameters.seed, device=device)
    problem = make_problem(layer, parameters.tokens, variant.activations, seed=parameters.seed, device=device)
    problem = replace(problem, topk_ids=make_unusual_ids(problem.topk_ids, parameters.ids))
    result = check_parity(backend, problem)
    return {
        "computed_by": variant.label,
        "activations_quantised": variant.activations,
        "bounds": asdict(choose_bounds(variant.activations)),
        **result.to_evidence(),
    }


def _shape(parameters: BackendParityParameters) -> LayerShape:
    names = {"hidden", "intermediate", "experts", "top_k", "activation"}
    return LayerShape(**parameters.model_dump(include=names))
