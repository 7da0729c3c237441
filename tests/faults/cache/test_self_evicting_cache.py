"""MD006: the control loses experts, the fix does not, and the judge and the claims notice wrong figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from moedoctor.faults.cache import self_evicting_cache_lab as lab
from moedoctor.faults.cache.self_evicting_cache import SelfEvictingCache, SelfEvictingCacheParameters
from moedoctor.fixes.eviction import SlotTable
from moedoctor.interfaces import Measurement
from moedoctor.reference.expert_cache import Problem
from moedoctor.results import Case, CaseVerdict, ClaimVerdict, Observation, Tier
from moedoctor.trace.format import save
from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

torch.set_num_threads(1)


def case(subject: str, **given: Any) -> Case:
    parameters = SelfEvictingCacheParameters(**{"calls": 200, "computed": 16, **given})
    return Case("MD006", subject, Tier.MODEL, parameters.model_dump())


def observed(subject: str, **given: Any) -> Observation:
    return SelfEvictingCache().observe(case(subject, **given), None)


POINTS = [
    {"experts": 8, "capacity": 2, "top_k": 2},
    {"experts": 32, "capacity": 8, "top_k": 8},
    {"experts": 32, "capacity": 8, "top_k": 8, "clock": "call"},
    {"experts": 64, "capacity": 16, "top_k": 8},
    {"experts": 32, "capacity": 12, "top_k": 4, "tokens": 2, "calls": 400},
]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_control_is_wrong_in_bookkeeping_and_output_and_the_fix_in_neither(point: dict[str, Any]) -> None:
    fault = SelfEvictingCache()
    faulty, fixed = observed("faulty", **point), observed("fixed", **point)
    assert fault.judge(case("faulty", **point), faulty).verdict is CaseVerdict.REPRODUCED
    assert faulty.evidence["wrong_calls"] > 0
    assert faulty.evidence["wrong_outputs"] > 0
    assert faulty.evidence["worst_error"] > 0.1
    assert fault.judge(case("fixed", **point), fixed).verdict is CaseVerdict.CLEAN
    assert (fixed.evidence["wrong_calls"], fixed.evidence["wrong_outputs"]) == (0, 0)
    assert fixed.evidence["worst_error"] < 1e-4
    assert fixed.evidence["hit_rate"] <= fixed.evidence["belady_hit_rate"]


def test_the_same_calls_are_computed_for_both_and_wrong_ones_are_among_them() -> None:
    point = {"experts": 64, "capacity": 16, "top_k": 8, "calls": 500}
    faulty, fixed = observed("faulty", **point).evidence, observed("fixed", **point).evidence
    assert faulty["computed"] == fixed["computed"]
    assert 0 < faulty["wrong_calls"] < 50, "rare here, so that choosing calls matters"
    assert faulty["wrong_outputs"] == min(8, faulty["wrong_calls"])


def wrong_weights(parameters: SelfEvictingCacheParameters, problem: Problem) -> lab.TestedCache:
    """Right bookkeeping, but weights of another expert."""
    cache = lab.control(parameters, problem)

    def acquire(ids: torch.Tensor) -> Any:
        slots, slot_ids = cache.acquire(ids)
        return {name: tensor * 1.01 for name, tensor in slots.items()}, slot_ids

    return cache._replace(table=SlotTable(parameters.experts, parameters.capacity), acquire=acquire)


def test_a_wrong_output_counts_even_if_the_bookkeeping_is_right() -> None:
    given = case("faulty", experts=8, capacity=8, top_k=2, calls=50, computed=8)
    observation = lab.measure(SelfEvictingCacheParameters(**given.parameters), "cpu", wrong_weights)
    assert observation.evidence["wrong_calls"] == 0
    assert SelfEvictingCache().judge(given, observation).verdict is CaseVerdict.REPRODUCED


def test_parameters_that_cannot_show_the_fault_are_refused() -> None:
    for given in ({"top_k": 9, "capacity": 8}, {"capacity": 200}, {"calls": 4, "computed": 8}, {"slots": 3}):
        with pytest.raises(ValidationError):
            SelfEvictingCacheParameters(**given)
    with pytest.raises(ValueError, match="MD007"):
        observed("fixed", experts=32, capacity=4, top_k=4, tokens=8)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small trace instead of the shipped trace."""
    (tmp_path / "traces").mkdir()
    trace = zipf_trace(ZipfSettings(experts=32, top_k=4, layers=3, rows=90, streams=3))
    save(trace, tmp_path / "traces" / "small_moe_decode.safetensors")
    monkeypatch.setattr("moedoctor.trace.format.reports_folder", lambda: tmp_path)


@pytest.mark.usefixtures("shipped")
def test_the_shipped_trace_can_be_the_routing() -> None:
    point = {"routing": "trace", "experts": 32, "capacity": 4, "top_k": 4, "calls": 90}
    assert observed("faulty", **point).evidence["wrong_calls"] > 0
    with pytest.raises(ValueError, match="32 experts and top-4"):
        observed("faulty", **{**point, "experts": 64})


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("key", ["wrong_share", "lfru_at_half", "lru_monopoly"])
def test_claims_are_measured_and_judged(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "_GRID", ((16, 4, 4), (16, 4, 8), (64, 4, 16)))
    monkeypatch.setattr(lab, "_CALLS", 200)
    test = next(claim for claim in SelfEvictingCache.claims if claim.key == key)
    assert test.measure is not None
    measurement = Measurement("", test.measure("", "cpu", {}))
    limits = dict.fromkeys(test.thresholds, 0.0)
    assert test.judge([], [measurement], limits).verdict in (ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED)


def judged(
    key: str, rows: list[dict[str, Any]], all_layers: list[dict[str, Any]] | None = None, **limits: float
) -> tuple[ClaimVerdict, str]:
    test = next(claim for claim in SelfEvictingCache.claims if claim.key == key)
    evidence = {"rows": rows, "calls": 1, "all_layers": all_layers or []}
    judgement = test.judge([], [Measurement("", Observation(evidence))], limits)
    return judgement.verdict, judgement.reason or ""


def share(slots: int, wrong: float, ours: float = 0.0) -> dict[str, Any]:
    rest = {"clock_by_call_share": 0.5, "plain_lru_share": 0.0, "ours_share": ours}
    return {"experts": 64, "top_k": 8, "slots": slots, "pr_share": wrong, **rest}


def test_the_share_of_wrong_calls_decides() -> None:
    limits = {"min_share_tight": 0.5, "max_share_ample": 0.01}
    assert judged("wrong_share", [share(8, 0.8), share(32, 0.0)], **limits)[0] is ClaimVerdict.CONFIRMED
    assert judged("wrong_share", [share(8, 0.4), share(32, 0.0)], **limits)[0] is ClaimVerdict.REFUTED
    assert judged("wrong_share", [share(8, 0.8), share(32, 0.1)], **limits)[0] is ClaimVerdict.REFUTED
    wrong_ours = [share(8, 0.8, ours=0.1), share(32, 0.0)]
    assert judged("wrong_share", wrong_ours, **limits)[0] is ClaimVerdict.REFUTED


def rates(lfru_8: float, lru_16: float) -> dict[str, Any]:
    return {"trace": "t", "lfru_8": lfru_8, "belady_8": 0.4, "lru_16": lru_16, "belady_16": 0.6}


def test_half_the_slots_must_do_better_on_every_trace() -> None:
    assert (
        judged("lfru_at_half", [rates(0.3, 0.2), rates(0.3, 0.25)], min_gain=0.0)[0] is ClaimVerdict.CONFIRMED
    )
    verdict, reason = judged("lfru_at_half", [rates(0.3, 0.2), rates(0.3, 0.5)], min_gain=0.0)
    assert verdict is ClaimVerdict.REFUTED
    assert "On 1 of 2 traces not even the optimum" in reason


def layer(index: int, gain: float) -> dict[str, Any]:
    alone = {"lru_layer": 0.5, "lfru_layer": 0.5, "lfru_global": 0.5, "belady_layer": 0.6}
    return {"slots": 8, "layer": index, "lru_global": 0.5 + gain, **alone}


ALL_LAYERS = [{"slots": 8, "lru_layer": 0.5, "lru_global": 0.51, "belady_layer": 0.61, "belady_global": 0.72}]


def test_a_monopoly_is_what_early_layers_gain_and_late_ones_lose() -> None:
    def verdict(rows: list[dict[str, Any]]) -> ClaimVerdict:
        return judged("lru_monopoly", rows, ALL_LAYERS, min_tilt=0.05)[0]

    unfair = [layer(0, 0.2), layer(1, 0.0), layer(2, -0.2)]
    assert verdict(unfair) is ClaimVerdict.CONFIRMED
    assert verdict([layer(0, 0.1), layer(1, 0.1), layer(2, 0.1)]) is ClaimVerdict.REFUTED
    assert verdict(unfair[::-1]) is ClaimVerdict.REFUTED


def test_each_scope_is_shown_beside_its_own_optimum() -> None:
    _, reason = judged("lru_monopoly", [layer(index, 0.0) for index in range(3)], ALL_LAYERS, min_tilt=0.05)
    assert "LRU 50.0% with a cache a layer, of at most 61.0%" in reason
    assert "51.0% with one for all, of at most 72.0%" in reason


@pytest.mark.usefixtures("shipped")
def test_no_rate_is_above_the_optimum_of_its_scope() -> None:
    evidence = lab.lru_monopoly()
    assert [total["slots"] for total in evidence["all_layers"]] == [16, 32]
    for total in evidence["all_layers"]:
        for scope in ("layer", "global"):
            assert max(total[f"lru_{scope}"], total[f"lfru_{scope}"]) <= total[f"belady_{scope}"]
        rows = [row for row in evidence["rows"] if row["slots"] == total["slots"]]
        assert sum(row["lru_global"] for row in rows) / len(rows) == pytest.approx(total["lru_global"])
        assert all("belady_layer" in row and "belady_global" not in row for row in rows)
    assert evidence["all_layers"][0]["belady_global"] > evidence["all_layers"][0]["belady_layer"]


def test_the_speed_claim_is_judged_by_the_slowest_gain() -> None:
    row = {"lfru_hit_rate": 0.5, "lru_hit_rate": 0.4, "belady_hit_rate": 0.6, "lfru_wrong": 0.8}
    rows = [{"slots": 8, "lru_over_lfru_time": 1.08, **row}, {"slots": 16, "lru_over_lfru_time": 1.06, **row}]
    assert judged("lfru_speed", rows, min_gain=0.05)[0] is ClaimVerdict.CONFIRMED
    rows[1]["lru_over_lfru_time"] = 1.01
    assert judged("lfru_speed", rows, min_gain=0.05)[0] is ClaimVerdict.REFUTED
