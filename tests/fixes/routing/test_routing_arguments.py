"""What the routing functions refuse: one line with the argument, what was given and what was expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moedoctor.fixes import routing

UNGROUPED = (routing.topk_softmax, routing.topk_sigmoid)
INF = float("inf")

_X = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("logits", "top_k", "options", "error", "message"),
    [
        ([[1.0]], 1, {}, TypeError, r"logits must be a torch.Tensor, got list"),
        (_X.int(), 1, {}, TypeError, r"logits must be float16, .*, got torch.int32"),
        (_X.bool(), 1, {}, TypeError, r"logits must be float16, .*, got torch.bool"),
        (_X[0], 1, {}, ValueError, r"logits must have two dimensions .*, got shape \[8\]"),
        (_X[None], 1, {}, ValueError, r"logits must have two dimensions .*, got shape \[1, 2, 8\]"),
        (_X[:, :0], 1, {}, ValueError, r"top_k must be between 1 and the number of experts 0, got 1"),
        (_X, 9, {}, ValueError, r"top_k must be between 1 and the number of experts 8, got 9"),
        (_X, 0, {}, ValueError, r"top_k must be .*, got 0"),
        (_X, -1, {}, ValueError, r"top_k must be .*, got -1"),
        (_X, 2.0, {}, TypeError, r"top_k must be an int, got float"),
        (_X, True, {}, TypeError, r"top_k must be an int, got bool"),
        (_X, 2, {"bias": torch.zeros(7)}, ValueError, r"bias must have shape \[8\], .*, got \[7\]"),
        (_X, 2, {"bias": torch.zeros(1, 8)}, ValueError, r"bias must have shape \[8\], .*, got \[1, 8\]"),
        (_X, 2, {"bias": torch.zeros(8).int()}, TypeError, r"bias must be float16, .*, got torch.int32"),
        (_X, 2, {"bias": [0.0] * 8}, TypeError, r"bias must be a torch.Tensor, got list"),
        (
            _X,
            2,
            {"bias": torch.zeros(8, device="meta")},
            ValueError,
            r"bias must be on the device .* cpu, got meta",
        ),
        (_X, 2, {"nan_policy": "drop"}, ValueError, r"nan_policy must be one of zero, finite, got 'drop'"),
        (_X, 2, {"nan_policy": None}, ValueError, r"nan_policy must be one of zero, finite, got None"),
    ],
)
def test_wrong_arguments_are_refused(
    logits: Any, top_k: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    for function in UNGROUPED:
        with pytest.raises(error, match=message):
            function(logits, top_k, **options)
    with pytest.raises(error, match=message):
        routing.grouped_topk(logits, top_k, num_groups=2, topk_groups=2, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_groups": 3}, ValueError, r"num_groups must divide the number of experts 8, got 3"),
        ({"num_groups": 0}, ValueError, r"num_groups must divide .*, got 0"),
        ({"num_groups": 4.0}, TypeError, r"num_groups must be an int, got float"),
        ({"topk_groups": 5}, ValueError, r"topk_groups must be between 1 and num_groups 4, got 5"),
        ({"topk_groups": 0}, ValueError, r"topk_groups must be .*, got 0"),
        ({"topk_groups": "2"}, TypeError, r"topk_groups must be an int, got str"),
        ({"top_k": 5}, ValueError, r"top_k must be at most 4, the experts of topk_groups 2, got 5"),
        ({"scoring": "relu"}, ValueError, r"scoring must be one of softmax, sigmoid, got 'relu'"),
        ({"routed_scaling_factor": "2"}, TypeError, r"routed_scaling_factor must be a number, got str"),
        (
            {"routed_scaling_factor": INF},
            ValueError,
            r"routed_scaling_factor must be a finite float32, got inf",
        ),
        ({"routed_scaling_factor": 1e39}, ValueError, r"routed_scaling_factor must be .*, got 1e\+39"),
    ],
)
def test_wrong_groups_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logits": _X, "top_k": 2, "num_groups": 4, "topk_groups": 2} | options
    with pytest.raises(error, match=message):
        routing.grouped_topk(**arguments)
