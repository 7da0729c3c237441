"""MD006: the control loses experts, the fix does not, and the judge and the claims notice wrong figures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_cases import by_figures, by_rows, claim_of, judge, run

from moedoctor.faults.cache import self_evicting_cache_lab as lab
from moedoctor.faults.cache.self_evicting_cache import SelfEvictingCache, SelfEvictingCacheParameters
from moedoctor.fixes.eviction import SlotTable
from moedoctor.reference.expert_cache import Problem
from moedoctor.results import CaseVerdict, ClaimVerdict
from moedoctor.trace.format import save
from moedoctor.trace.synthetic import ZipfSettings, draw_zipf_trace

FAULT = SelfEvictingCache()


def test_the_same_calls_are_computed_for_both_and_wrong_ones_are_among_them() -> None:
    point = {"experts": 64, "capacity": 16, "top_k": 8, "calls": 500, "computed": 16}
    faulty, fixed = (run(FAULT, subject, **point).evidence for subject in ("faulty", "fixed"))
    assert faulty["computed"] == fixed["computed"]
    assert 0 < faulty["wrong_calls"] < 50, "rare here, so that choosing calls matters"
    assert faulty["wrong_outputs"] == min(8, faulty["wrong_calls"])


def wrong_weights(parameters: SelfEvictingCacheParameters, problem: Problem) -> lab.TestedCache:
    """Right bookkeeping, but weights of another expert."""
    cache = lab.make_control(parameters, problem)

    def acquire(ids: torch.Tensor) -> Any:
        slots, slot_ids = cache.acquire(ids)
        return {name: tensor * 1.01 for name, tensor in slots.items()}, slot_ids

    return cache._replace(table=SlotTable(parameters.experts, parameters.capacity), acquire=acquire)


def test_a_wrong_output_counts_even_if_the_bookkeeping_is_right() -> None:
    point = {"experts": 8, "capacity": 8, "top_k": 2, "calls": 50, "computed": 8}
    evidence = lab.measure(SelfEvictingCacheParameters(**point), "cpu", wrong_weights)
    assert evidence["wrong_calls"] == 0
    assert judge(FAULT, evidence, **point).verdict is CaseVerdict.REPRODUCED


def test_calls_that_need_more_experts_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="MD007"):
        run(FAULT, "fixed", experts=32, capacity=4, top_k=4, tokens=8)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small trace instead of the shipped trace."""
    (tmp_path / "traces").mkdir()
    trace = draw_zipf_trace(ZipfSettings(experts=32, top_k=4, layers=3, rows=90, streams=3))
    save(trace, tmp_path / "traces" / "small_moe_decode.safetensors")
    monkeypatch.setattr("moedoctor.bench.cache.replay.find_reports_folder", lambda: tmp_path)


@pytest.mark.usefixtures("shipped")
def test_the_shipped_trace_can_be_the_routing() -> None:
    point = {"routing": "trace", "experts": 32, "capacity": 4, "top_k": 4, "calls": 90, "computed": 16}
    assert run(FAULT, **point).evidence["wrong_calls"] > 0
    with pytest.raises(ValueError, match="32 experts and top-4"):
        run(FAULT, **{**point, "experts": 64})


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("key", ["lfru_at_half", "lru_monopoly"])
def test_claims_are_measured_and_judged(key: str) -> None:
    test = claim_of(FAULT, key)
    limits = dict.fromkeys(test.thresholds, 0.0)
    judged = by_figures(test, limits, test.measure("", "cpu", {}).evidence)
    assert judged.verdict in (ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED)


def rates(lfru_8: float, lru_16: float) -> dict[str, Any]:
    return {"trace": "t", "lfru_8": lfru_8, "belady_8": 0.4, "lru_16": lru_16, "belady_16": 0.6}


def times(slots: int, ratio: float) -> dict[str, Any]:
    hits = {"lfru_hit_rate": 0.5, "lru_hit_rate": 0.4, "belady_hit_rate": 0.6, "lfru_wrong": 0.8}
    return {"slots": slots, "lru_over_lfru_time": ratio, **hits}


def layers(*gains: float) -> list[dict[str, Any]]:
    alone = {"lru_layer": 0.5, "lfru_layer": 0.5, "lfru_global": 0.5, "belady_layer": 0.6}
    return [
        {"slots": 8, "layer": index, "lru_global": 0.5 + gain, **alone} for index, gain in enumerate(gains)
    ]


ALL_LAYERS = [{"slots": 8, "lru_layer": 0.5, "lru_global": 0.51, "belady_layer": 0.61, "belady_global": 0.72}]


LIMITS = {"min_gain": 0.05, "min_tilt": 0.05}


@pytest.mark.parametrize(
    ("key", "rows", "confirmed", "words"),
    [
        ("lfru_at_half", [rates(0.3, 0.2), rates(0.3, 0.24)], True, ""),
        ("lfru_at_half", [rates(0.3, 0.2), rates(0.3, 0.5)], False, "On 1 of 2 traces not even the optimum"),
        ("lru_monopoly", layers(0.2, 0.0, -0.2), True, "50.0% with a cache a layer, of at most 61.0%"),
        ("lru_monopoly", layers(0.1, 0.1, 0.1), False, "51.0% with one for all, of at most 72.0%"),
        ("lru_monopoly", layers(-0.2, 0.0, 0.2), False, ""),
        ("lfru_speed", [times(8, 1.08), times(16, 1.06)], True, "8 slots: +8.0%"),
        ("lfru_speed", [times(8, 1.08), times(16, 1.01)], False, ""),
    ],
)
def test_the_worst_row_decides(key: str, rows: list[dict[str, Any]], confirmed: bool, words: str) -> None:
    judgement = by_rows(claim_of(FAULT, key), LIMITS, *rows, all_layers=ALL_LAYERS)
    assert judgement.verdict is (ClaimVerdict.CONFIRMED if confirmed else ClaimVerdict.REFUTED)
    assert words in str(judgement.reason)


@pytest.mark.usefixtures("shipped")
def test_no_rate_is_above_the_optimum_of_its_scope() -> None:
    evidence = lab.measure_lru_monopoly()
    assert [total["slots"] for total in evidence["all_layers"]] == [16, 32]
    for total in evidence["all_layers"]:
        for scope in ("layer", "global"):
            assert max(total[f"lru_{scope}"], total[f"lfru_{scope}"]) <= total[f"belady_{scope}"]
        rows = [row for row in evidence["rows"] if row["slots"] == total["slots"]]
        assert sum(row["lru_global"] for row in rows) / len(rows) == pytest.approx(total["lru_global"])
        assert all("belady_layer" in row and "belady_global" not in row for row in rows)
    assert evidence["all_layers"][0]["belady_global"] > evidence["all_layers"][0]["belady_layer"]
