"""The bench of the expert cache: its inputs, and on a GPU that what is wrong is not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moedoctor.bench import expert_cache as bench
from moedoctor.bench.expert_cache_decode import Inputs, Model
from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

SMALL = Model(layers=3, experts=16, top_k=2, hidden=256, inner=128, host_layers=2)


def test_inputs_are_the_trace_by_step_layer_and_token() -> None:
    inputs = Inputs.make(SMALL, 4, 5, "cpu")
    settings = ZipfSettings(experts=16, top_k=2, layers=3, rows=20, streams=4, skew=1.0, drift=0.1, seed=0)
    ids = list(zipf_trace(settings).topk_ids)  # by token, layer, choice
    assert inputs.ids.shape == (5, 3, 4, 2)
    for step, layer, token in ((0, 0, 0), (2, 1, 3), (4, 2, 1)):
        start = ((step * 4 + token) * 3 + layer) * 2
        assert inputs.ids[step, layer, token].tolist() == ids[start : start + 2]
    assert torch.allclose(inputs.shares.sum(1), torch.ones(4))
    assert SMALL.expert_bytes == 2 * (256 * 256 + 256 * 128)


def test_hit_rates_of_the_policies_come_with_their_bound() -> None:
    row = bench.expected("cpu", batch=1, capacity=8, model=SMALL)
    rates = [row[f"hit_rate_{policy}"] for policy in ("lru", "lfu", "lfru")]
    assert all(0 < rate <= row["hit_rate_belady"] < 1 for rate in rates)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    def measured(**options: Any) -> dict[str, dict[str, Any]]:
        found = bench.decode("cuda:0", model=SMALL, rounds=3, warm=12, **options)
        return {row["engine"]: row for row in found}

    return measured


@pytest.mark.gpu
def test_every_variant_is_right_and_timed(rows: Any) -> None:
    found = rows(batch=1, capacity=6)
    assert set(found) == {"device", "packed", "host", "pr37190"}
    for name in ("device", "packed", "host"):
        assert found[name]["correct"]
        assert found[name]["tokens_per_second"] > 0
        assert found[name]["one_graph"] is (name != "host")
    hit_rates = {found[name]["hit_rate"] for name in ("device", "packed", "host")}
    assert len(hit_rates) == 1, "all engines decide alike"


@pytest.mark.gpu
def test_a_full_cache_is_compared_with_none(rows: Any) -> None:
    found = rows(batch=2, capacity=16)
    assert set(found) == {"resident", "uncached", "pr37190"}
    assert found["resident"]["against"] == "uncached"


@pytest.mark.gpu
def test_a_call_that_the_pr_refuses_is_said(rows: Any) -> None:
    found = rows(batch=4, capacity=3)
    assert "the PR raises an error" in found["pr37190"]["reason"]
    assert found["device"]["correct"]
    assert found["host"]["correct"]


@pytest.mark.gpu
def test_what_is_wrong_is_not_timed(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its copies the host engine computes with empty slots."""
    monkeypatch.setattr("moedoctor.fixes.expert_cache_host.HostEngine._copy", lambda self, load: None)
    found = rows(batch=1, capacity=6)
    assert found["host"]["correct"] is False
    assert "tokens_per_second" not in found["host"]
    assert "tokens_per_second" in found["device"]
