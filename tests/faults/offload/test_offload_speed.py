"""The speed of the offloader beside the path without UVA: what is timed, what is said, the guide's figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.bench import offload as bench
from moedoctor.faults.offload.speed_claims import judge_speedup
from moedoctor.fixes.offloader import Offload, offload
from moedoctor.interfaces import ClaimJudgement, Measurement
from moedoctor.results import ClaimVerdict, Observation
from moedoctor.scenario.targets import load_targets

ROOT = Path(__file__).parents[3]
SHAPE = bench.StackShape(layers=3, experts=4, hidden=128, intermediate=64, top_k=2, dtype=torch.float32)
MILLISECONDS = {
    "ours": 100.0,
    "ours_unpinned": 400.0,
    "functional_call": 500.0,
    "functional_call_pinned": 110.0,
}


def judged(times: Mapping[str, float], *, wrong: str = "") -> ClaimJudgement:
    """What is said of these milliseconds a pass; `wrong` gave a wrong result and is not timed."""

    def spread(value: float) -> dict[str, float]:
        return {"median": value, "p20": value, "p80": value, "samples": 5}

    rows = [
        {
            "way": way,
            "ms": spread(value),
            "gb_per_s": 5000 / value,
            "over_ours": None if way == "ours" else spread(value / times["ours"]),
        }
        for way, value in times.items()
        if way != wrong
    ]
    seen = {"right": {way: way != wrong for way in times}, "whose": {}, "rows": rows}
    return judge_speedup([], [Measurement("", Observation(seen))], {"min_speedup": 1.5})


def test_ours_is_timed_with_and_without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "compare", lambda names, device, **how: {"names": names})
    asked = bench.against_functional_call("cpu")["names"]
    assert asked == ("ours", "ours_unpinned", "functional_call", "functional_call_pinned")


@pytest.mark.parametrize(("name", "pinned"), [("ours", True), ("ours_unpinned", False)])
@torch.no_grad()
def test_both_are_the_offloader_and_give_the_bits_of_the_stack(
    name: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def recorded(*given: Any, **how: Any) -> Offload:
        asked.append(how["pin"])
        return offload(*given, **how)

    monkeypatch.setattr(bench, "offload", recorded)
    x = torch.randn(8, SHAPE.hidden, generator=torch.Generator().manual_seed(1))  # [T, H]
    runner = bench.make_runner(name, SHAPE, "cpu")
    assert asked == [pinned]
    assert runner.keep.report().host_bytes == SHAPE.layers * SHAPE.layer_bytes
    expected = bench.make_runner("resident", SHAPE, "cpu").stack(x)  # [T, H]
    assert all(torch.equal(runner.stack(x), expected) for _ in range(2))


def test_pinned_against_pageable_decides_and_unpinned_against_unpinned_is_said() -> None:
    found = judged(MILLISECONDS)
    assert found.verdict is ClaimVerdict.CONFIRMED
    assert found.reason == (
        "ours from pinned memory is 5.00 times as fast as it is from pageable memory, 1.10 times as fast"
        " as it is from pinned memory; both from pageable memory: 1.25 times as fast"
    )
    slow = judged({**MILLISECONDS, "functional_call": 140.0})
    assert slow.verdict is ClaimVerdict.REFUTED
    assert "both from pageable memory: 0.35 times as fast" in (slow.reason or "")


def test_ours_without_pinned_memory_must_be_right_too() -> None:
    found = judged(MILLISECONDS, wrong="ours_unpinned")
    assert (found.verdict, found.reason) == (
        ClaimVerdict.REFUTED,
        "wrong result, not timed: ours_unpinned",
    )


@pytest.mark.parametrize("file", ["untraceable_offload.yaml", "engine/offload_speed.yaml"])
def test_the_claim_says_what_is_pinned_and_promises_nothing_of_wsl(file: str) -> None:
    (scenario,) = load_targets((str(ROOT / "scenarios" / file),))
    (text,) = (one.text for one in scenario.claims if one.key == "against_functional_call")
    assert "with pinned memory" in text
    assert "from pageable memory" in text
    assert not [one.text for one in scenario.claims if "WSL" in one.text]


def test_the_guide_holds_the_reports_figures() -> None:
    report = ROOT / "reports" / "nvidia-h200" / "offload_speed.json"
    (scenario,) = json.loads(report.read_text(encoding="utf-8"))["scenarios"]
    guide = " ".join((ROOT / "docs" / "wsl.md").read_text(encoding="utf-8").split())

    def over_ours(text: str) -> dict[str, float]:
        (found,) = (one for one in scenario["claims"] if text in one["text"])
        return {
            row["way"]: row["over_ours"]["median"] for row in found["evidence"]["rows"] if row["over_ours"]
        }

    assert "not measured" not in guide
    times = over_ours("without UVA that copies from pageable")
    pageable, pinned = times["functional_call"], times["functional_call_pinned"]
    assert (
        f"the fix with pinned memory is {pageable:.1f} times as fast as copies from pageable memory" in guide
    )
    unpinned = pageable / times["ours_unpinned"]
    assert f"as on WSL without pinning, it is {unpinned:.2f} times as fast: no gain" in guide
    assert f"With pinned memory on both sides it is {pinned:.2f} times as fast" in guide
    assert f"takes {over_ours('For one token')['uva']:.3f} of its time" in guide
