"""The speed of the expert cache: inputs, the whole bench in Triton's interpreter, and runs on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.bench.cache import speed as bench
from moedoctor.bench.cache.model import Inputs, Model, host_weights, trace_ids
from moedoctor.bench.cache.speed import Run, Variant, pr_wrong_steps
from moedoctor.fixes.eviction import SlotTable, replay
from moedoctor.fixes.expert_cache import ExpertStore
from moedoctor.reference.expert_cache import PrRule
from moedoctor.trace.format import shipped_trace
from moedoctor.trace.synthetic import ZipfSettings, zipf_trace
from tests.interpreted import run_check

SMALL = Model(layers=3, experts=16, top_k=2, hidden_size=256, intermediate_size=128, host_layers=2)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
def test_the_whole_bench_interpreted() -> None:
    run_check(Path(__file__).parent / "interpreted_speed.py")


def test_inputs_are_indexed_by_step_layer_and_token() -> None:
    inputs = Inputs.make(SMALL, trace_ids(SMALL, 4, 5, recorded=False), "cpu")
    settings = ZipfSettings(experts=16, top_k=2, layers=3, rows=20, streams=4, skew=1.0, drift=0.1, seed=0)
    ids = list(zipf_trace(settings).topk_ids)  # by token, layer, choice
    assert inputs.ids.shape == (5, 3, 4, 2)
    for step, layer, token in ((0, 0, 0), (2, 1, 3), (4, 2, 1)):
        start = ((step * 4 + token) * 3 + layer) * 2
        assert inputs.ids[step, layer, token].tolist() == ids[start : start + 2]
    assert torch.allclose(inputs.topk_weights.sum(1), torch.ones(4))
    assert SMALL.expert_bytes == 2 * (256 * 256 + 256 * 128)


def test_the_recorded_trace_continues_when_layers_repeat() -> None:
    model = Model(layers=10, hidden_size=16, intermediate_size=16)
    ids = trace_ids(model, 1, 100, recorded=True)
    stored = torch.tensor(list(shipped_trace().topk_ids)).view(-1, 8, 8)
    assert ids.shape == (100, 10, 1, 8)
    assert torch.equal(ids[:, 3, 0], stored[:100, 3])
    assert torch.equal(ids[:, 9, 0], stored[-100:, 1])
    with pytest.raises(ValueError, match="128 experts, top-8"):
        trace_ids(SMALL, 1, 10, recorded=True)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, Any]]]:
    monkeypatch.setattr(bench, "VARIANTS", (Variant("host", "host"), Variant("aging", "host", "aging")))

    def measured(**options: Any) -> dict[str, dict[str, Any]]:
        return {row["engine"]: row for row in bench.decode("cpu", model=SMALL, rounds=2, **options)}

    return measured


def test_a_seeded_cache_hits_like_a_cache_that_ran_the_trace(on_cpu: Any) -> None:
    found = on_cpu(batch=1, capacity=6, skip=60)
    ids = trace_ids(SMALL, 1, 68, recorded=False)
    for name, policy in (("host", "lfru"), ("aging", "aging"), ("pr37190", None)):
        hits = misses = 0
        for calls in ids.transpose(0, 1).flatten(2).tolist():
            table = SlotTable(16, 6, policy) if policy else PrRule(16, 6)
            replay(calls[:60], table)
            stats = replay(calls[60:], table)
            hits, misses = hits + stats.hits, misses + stats.misses
        assert found[name]["hit_rate"] == hits / (hits + misses)
        assert found[name]["misses_a_layer"] == misses / (8 * 3)
        assert found[name]["gigabytes_a_step"] == pytest.approx(misses * SMALL.expert_bytes / 8 * 1e-9)
    assert found["host"]["correct"]
    assert found["host"]["speedup"] > 0
    assert found["host"]["against"] == "pr37190"


def test_wrong_steps_of_the_pr_are_counted_over_a_longer_trace() -> None:
    run = Run.make(SMALL, "cpu", batch=1, capacity=2, rounds=1, skip=20, recorded=False)
    wrong, steps = pr_wrong_steps(run)
    assert steps == 2000 > run.last + 1
    lost = set()
    ids = trace_ids(SMALL, 1, 2000, recorded=False)
    for calls in ids.transpose(0, 1).flatten(2).tolist():
        rule = PrRule(16, 2)
        for step, call in enumerate(calls):
            rule.step(sorted(call))
            if any(rule.expert_of[rule.slot_of[expert]] != expert for expert in call):
                lost.add(step)
    assert 0 < wrong == len(lost) < 2000
    assert torch.equal(ids[: run.last + 1], run.inputs.ids), "the same trace, longer"
    full = Run.make(SMALL, "cpu", batch=1, capacity=16, rounds=1, skip=20, recorded=False)
    assert pr_wrong_steps(full) == (0, 2000)


def test_the_speedup_bound_follows_from_the_bytes(on_cpu: Any) -> None:
    weights = host_weights(SMALL, "cpu")
    stores = [ExpertStore(weight) for weight in weights]
    found = on_cpu(batch=1, capacity=6, skip=60, host=bench.Host(weights, stores, stores, 50.0))
    ours, pr = found["host"], found["pr37190"]
    assert ours["bus_us"] == pytest.approx(ours["gigabytes_a_step"] / 50.0 * 1e6)
    assert ours["speedup_bound"] == pytest.approx(pr["step_us"] / ours["bus_us"])
    assert "speedup_bound" not in pr


@pytest.fixture(scope="module")
def host() -> bench.Host:
    return bench.Host.make(SMALL, "cuda:0")


@pytest.fixture
def rows(host: bench.Host) -> Any:
    def measured(**options: Any) -> dict[str, dict[str, Any]]:
        found = bench.decode("cuda:0", model=SMALL, host=host, rounds=3, skip=40, **options)
        return {row["engine"]: row for row in found}

    return measured


@pytest.mark.gpu
def test_every_variant_is_right_and_timed(rows: Any) -> None:
    found = rows(batch=1, capacity=6)
    ours = [variant.name for variant in bench.VARIANTS]
    assert set(found) == {*ours, "pr37190"}
    for name in ours:
        assert found[name]["correct"]
        assert found[name]["tokens_per_second"] > 0
        assert found[name]["one_graph"] is (name != "host")
    for policy in ("lfru", "aging"):
        rates = {found[variant.name]["hit_rate"] for variant in bench.VARIANTS if variant.policy == policy}
        assert len(rates) == 1, "all engines decide alike"
    assert found["packed"]["gigabytes_a_step"] < 0.75 * found["aging"]["gigabytes_a_step"]


@pytest.mark.gpu
def test_a_full_cache_is_compared_with_no_cache(rows: Any) -> None:
    found = rows(batch=2, capacity=16)
    assert set(found) == {"resident", "uncached", "pr37190"}
    assert found["resident"]["against"] == "uncached"


@pytest.mark.gpu
def test_a_call_that_the_pr_refuses_is_reported(rows: Any) -> None:
    found = rows(batch=4, capacity=3)
    assert "the PR raises an error" in found["pr37190"]["reason"]
    assert found["device"]["correct"]
    assert found["host"]["correct"]


@pytest.mark.gpu
def test_a_wrong_variant_is_not_timed(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its copies the host engine computes with empty slots."""
    monkeypatch.setattr("moedoctor.fixes.cache.host.HostEngine._copy", lambda self, load: None)
    found = rows(batch=1, capacity=6)
    assert found["host"]["correct"] is False
    assert "tokens_per_second" not in found["host"]
    assert "tokens_per_second" in found["device"]
