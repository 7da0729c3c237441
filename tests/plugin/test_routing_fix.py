"""The fix `routing` on the functions of a stub of vLLM 0.19.1."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_stub import write_files

from moedoctor.plugin import routing_fix

FUNCTION = """
import torch


def {name}(
    topk_weights,
    topk_ids,
    token_expert_indices,
    gating_output,
    renormalize=False,
    e_score_correction_bias=None,
):
    torch.ops._moe_C.{name}(topk_weights)
"""


@pytest.fixture
def operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    functions = "".join(FUNCTION.format(name=name) for name in ("topk_softmax", "topk_sigmoid"))
    write_files(tmp_path, {"vllm/_custom_ops.py": functions})
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("vllm._custom_ops")


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64, torch.uint32])
def test_nan_rows_get_distinct_experts(operations: Any, scoring: str, ids: torch.dtype) -> None:
    routing_fix.apply("0.19.1")
    logits = torch.randn(6, 16)
    logits[2] = float("nan")
    weights, chosen = torch.empty(6, 4), torch.empty(6, 4, dtype=ids)
    places = torch.empty(6, 4, dtype=torch.int32)
    getattr(operations, f"topk_{scoring}")(weights, chosen, places, logits, True)
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    assert bool(weights.isfinite().all())
    scores = logits[0].softmax(-1) if scoring == "softmax" else logits[0].sigmoid()
    best = scores.topk(4)
    assert chosen[0].tolist() == best.indices.tolist()
    torch.testing.assert_close(weights[0], best.values / best.values.sum())
    assert places[:, 1].tolist() == [6, 7, 8, 9, 10, 11]
