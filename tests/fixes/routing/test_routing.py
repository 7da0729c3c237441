"""The fixed routing against the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from routing_cases import GROUP_EDGES, Call, assert_well_formed, calls, rows_of_every_kind

from moedoctor.fixes import routing
from moedoctor.reference import routing as reference

NAN, INF = float("nan"), float("inf")
UNGROUPED = (routing.topk_softmax, routing.topk_sigmoid)


def assert_equals_reference(call: Call) -> None:
    weights, ids = call.of(routing)
    assert_well_formed(weights, ids, call)
    expected_weights, expected_ids = call.of(reference)
    assert torch.equal(ids, expected_ids), call
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0)


@settings(max_examples=100)
@given(calls())
def test_agrees_with_the_reference(call: Call) -> None:
    """The reference follows the module's rule: tests/reference/test_routing.py checks it row by row."""
    assert_equals_reference(call)


@pytest.mark.parametrize(("row", "bias", "policy", "expected"), GROUP_EDGES)
def test_groups_with_nan_or_infinity(row, bias, policy, expected):
    assert Call.group_edge(row, bias, policy).of(routing).ids.tolist() == [expected]


def test_the_last_bits_of_a_strided_sigmoid_are_those_of_a_contiguous_one() -> None:
    logits = torch.zeros(3, 11)  # [T, E]
    logits[1, 10] = -13.0
    strided = torch.zeros(11, 6)[:, ::2].t().copy_(logits)  # [T, E]
    assert not strided.is_contiguous()
    assert torch.equal(routing.topk_sigmoid(strided, 11).weights, routing.topk_sigmoid(logits, 11).weights)


def test_results_have_no_gradient_and_inputs_are_unchanged() -> None:
    x = rows_of_every_kind(16, torch.float32).requires_grad_()
    before = x.detach().clone()
    assert not routing.topk_softmax(x, 2, nan_policy="finite", renormalize=True).weights.requires_grad
    torch.testing.assert_close(x.detach(), before, rtol=0, atol=0, equal_nan=True)


_X = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("logits", "top_k", "options", "error", "message"),
    [
        ([[1.0]], 1, {}, TypeError, r"logits must be a torch.Tensor, got list"),
        (_X.int(), 1, {}, TypeError, r"logits must be float16, .*, got torch.int32"),
        (_X[0], 1, {}, ValueError, r"logits must have two dimensions .*, got shape \[8\]"),
        (_X[:, :0], 1, {}, ValueError, r"top_k must be between 1 and the number of experts 0, got 1"),
        (_X, 9, {}, ValueError, r"top_k must be between 1 and the number of experts 8, got 9"),
        (_X, 0, {}, ValueError, r"top_k must be .*, got 0"),
        (_X, 2.0, {}, TypeError, r"top_k must be an int, got float"),
        (_X, True, {}, TypeError, r"top_k must be an int, got bool"),
        (_X, 2, {"bias": torch.zeros(7)}, ValueError, r"bias must have shape \[8\], .*, got \[7\]"),
        (_X, 2, {"bias": torch.zeros(8).int()}, TypeError, r"bias must be float16, .*, got torch.int32"),
        (_X, 2, {"bias": torch.zeros(8, device="meta")}, ValueError, r"bias must be on the device .* cpu"),
        (_X, 2, {"nan_policy": "drop"}, ValueError, r"nan_policy must be one of zero, finite, got 'drop'"),
    ],
)
def test_wrong_arguments_are_refused(logits, top_k, options, error, message):
    for function in UNGROUPED:
        with pytest.raises(error, match=message):
            function(logits, top_k, **options)
    with pytest.raises(error, match=message):
        routing.grouped_topk(logits, top_k, num_groups=2, topk_groups=2, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_groups": 3}, ValueError, r"num_groups must divide the number of experts 8, got 3"),
        ({"num_groups": 4.0}, TypeError, r"num_groups must be an int, got float"),
        ({"topk_groups": 5}, ValueError, r"topk_groups must be between 1 and num_groups 4, got 5"),
        ({"topk_groups": "2"}, TypeError, r"topk_groups must be an int, got str"),
        ({"top_k": 5}, ValueError, r"top_k must be at most 4, the experts of topk_groups 2, got 5"),
        ({"scoring": "relu"}, ValueError, r"scoring must be one of softmax, sigmoid, got 'relu'"),
        ({"routed_scaling_factor": "2"}, TypeError, r"routed_scaling_factor must be a number, got str"),
        ({"routed_scaling_factor": INF}, ValueError, r"routed_scaling_factor must be a finite float32"),
    ],
)
def test_wrong_groups_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logits": _X, "top_k": 2, "num_groups": 4, "topk_groups": 2} | options
    with pytest.raises(error, match=message):
        routing.grouped_topk(**arguments)
