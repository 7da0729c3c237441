"""Runs one call of the real kernels in Triton's interpreter, on the CPU; a script for `test_routing`.

Triton decides at import whether it interprets, so this needs a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, about NaN

import torch  # noqa: E402
from kernel_calls import assert_kernel_agrees, launch  # noqa: E402
from routing_cases import GROUP_EDGES, Call  # noqa: E402

from moedoctor.kernels.routing import half_softmax  # noqa: E402
from moedoctor.kernels.routing.launch import Shape  # noqa: E402


def _group_edges() -> None:
    for row, bias, policy, expected in GROUP_EDGES:
        _, ids = launch(Call.group_edge(row, bias, policy), device="cpu", shape=Shape(2, 4, 1, 1))
        assert ids.tolist() == [expected], (row, bias, policy, ids)


def _clean_rows_once() -> None:
    """Rows without special values must not be routed a second time: it would be right, and slow."""
    stored = []
    store = half_softmax.store_routes

    def counted(*arguments: Any) -> None:
        stored.append(1)
        store(*arguments)

    half_softmax.store_routes = counted
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    for policy in ("zero", "finite", None):
        launch(Call("topk_softmax", x, 3, {"nan_policy": policy}), device="cpu", shape=Shape(2, 8, 2, 1))
        assert len(stored) == 4, (policy, stored)
        stored.clear()
    x[0] = float("nan")
    launch(Call("topk_softmax", x, 3, {"nan_policy": "zero"}), device="cpu", shape=Shape(2, 8, 2, 1))
    assert len(stored) == 5, stored


def _inf_ranks_by_logit() -> None:
    """Under "finite" a row that holds an Inf is ranked by its logits, although these scores are all 1."""
    x = torch.tensor([[30.0, 20.0, float("inf"), 25.0], [30.0, 20.0, 26.0, 25.0]])
    _, ids = launch(
        Call("topk_sigmoid", x, 3, {"nan_policy": "finite"}), device="cpu", shape=Shape(2, 4, 1, 1)
    )
    assert ids.tolist() == [[2, 0, 3], [0, 1, 2]], ids


_CHECKS = {
    "group edges": _group_edges,
    "clean rows once": _clean_rows_once,
    "inf ranks by logit": _inf_ranks_by_logit,
}

if __name__ == "__main__":
    for text in sys.argv[1:]:
        if text in _CHECKS:
            _CHECKS[text]()
            continue
        case = json.loads(text)
        assert_kernel_agrees(
            case["name"],
            case["experts"],
            case["top_k"],
            getattr(torch, case["dtype"]),
            device="cpu",
            shape=Shape(*case["shape"]),
            bias=case["bias"],
            **case["options"],
        )
