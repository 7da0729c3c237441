"""The table of vllm#37883 with and without the fix, and the claim that it decides."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moedoctor.faults.offload.engine_table import both, marlin_crashes, same_tokens_with_fix
from moedoctor.faults.offload.offloaded_scales import OffloadedScales
from moedoctor.faults.offload.untraceable_offload import UntraceableOffload
from moedoctor.results import Case, CaseResult, CaseVerdict, ClaimVerdict, Observation, Tier
from moedoctor.upstream.engine.offload_cells import COPIES, ON_GPU, UVA


def cell(
    mode: str, experts: str, outcome: str, detail: str = "d", backend: str = "NVFP4 MARLIN"
) -> dict[str, Any]:
    return {"backend": backend, "mode": mode, "experts": experts, "outcome": outcome, "detail": detail}


def case(subject: str, mode: str, *cells: dict[str, Any], tier: Tier = Tier.ENGINE) -> CaseResult:
    return CaseResult(subject, tier, {"engine": mode}, CaseVerdict.REPRODUCED, {"table": list(cells)})


BOTH = [
    case("faulty", "eager", cell("eager", ON_GPU, "control"), cell("eager", COPIES, "crash 2", "b_scales")),
    case(
        "faulty",
        "compiled",
        cell("compiled", UVA, "same tokens"),
        cell("compiled", COPIES, "crash 1", "setattr"),
    ),
    case(
        "fixed",
        "eager",
        cell("eager", ON_GPU, "control"),
        cell("eager", COPIES, "same tokens", "same logprobs"),
    ),
]


def test_each_cell_is_there_once_with_both_outcomes() -> None:
    ((name, rows),) = both(BOTH).items()
    assert name == "table_of_vllm_37883"
    assert [(row["mode"], row["experts"]) for row in rows] == [
        ("eager", COPIES),
        ("compiled", UVA),
        ("compiled", COPIES),
    ]
    assert rows[0]["without_fix"] == "crash 2: b_scales"
    assert rows[0]["with_fix"] == "same tokens, same logprobs"
    assert "with_fix" not in rows[2]


def test_without_engines_there_is_no_table() -> None:
    assert both([case("faulty", "eager", cell("eager", COPIES, "crash"), tier=Tier.MODEL)]) == {}


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        (BOTH, ClaimVerdict.CONFIRMED),
        ([case("faulty", "eager", cell("eager", COPIES, "same tokens"))], ClaimVerdict.REFUTED),
        (
            [case("faulty", "eager", cell("eager", COPIES, "crash", backend="BF16 TRITON"))],
            ClaimVerdict.UNTESTED,
        ),
        ([], ClaimVerdict.UNTESTED),
    ],
)
def test_the_claim(results: list[CaseResult], verdict: ClaimVerdict) -> None:
    assert marlin_crashes(results, (), {}).verdict is verdict


@pytest.mark.parametrize(
    ("cells", "verdict", "figure"),
    [
        (
            [cell("eager", COPIES, "same tokens", "same logprobs")],
            ClaimVerdict.CONFIRMED,
            "1 of 1 cells .*, 1 the same",
        ),
        (
            [cell("compiled", COPIES, "rounding")],
            ClaimVerdict.REFUTED,
            "0 of 1 .*, 1 those of the same compiled",
        ),
        ([cell("eager", UVA, "other tokens")], ClaimVerdict.REFUTED, "0 of 1"),
        (
            [cell("eager", COPIES, "no fix"), cell("eager", UVA, "same tokens")],
            ClaimVerdict.REFUTED,
            "1 of 2",
        ),
        ([cell("eager", ON_GPU, "control")], ClaimVerdict.UNTESTED, ""),
    ],
)
def test_what_the_fix_is_said_to_do(cells: list[dict[str, Any]], verdict: ClaimVerdict, figure: str) -> None:
    judged = same_tokens_with_fix([*BOTH[:2], case("fixed", "eager", *cells)], (), {})
    assert judged.verdict is verdict
    assert re.search(figure, judged.reason or "")
    others = [one for one in cells if one["outcome"] not in ("same tokens", "control")]
    assert len(judged.evidence.get("others", ())) == len(others)


def test_cells_that_match_the_same_code_are_counted_whatever_their_outcome() -> None:
    cells = [
        {**cell("compiled", COPIES, outcome, "same logprobs"), "same_bits_in_the_same_code": same}
        for outcome, same in (
            *(("same tokens", True), ("same tokens", True), ("rounding", True)),
            *(("same tokens", False), ("same tokens", None)),
        )
    ]
    evidence = same_tokens_with_fix([case("fixed", "compiled", *cells)], (), {}).evidence
    assert (evidence["same_bits_in_the_same_compiled_code"], evidence["rounding"]) == (3, 1)


def test_where_an_engine_offloaded_nothing_neither_claim_is_decided() -> None:
    idle = cell("eager", COPIES, "no offload")
    for subject, judge in (("faulty", marlin_crashes), ("fixed", same_tokens_with_fix)):
        judged = judge([case(subject, "eager", cell("eager", COPIES, "same tokens"), idle)], (), {})
        assert judged.verdict is ClaimVerdict.UNTESTED


@pytest.mark.parametrize("fault", [OffloadedScales(), UntraceableOffload()])
def test_engine_points_are_for_engines_alone(fault: Any) -> None:
    parameters = fault.parameters(engine="compiled").model_dump()
    assert fault.has_point(Tier.ENGINE, parameters)
    assert not fault.has_point(Tier.MODEL, parameters)
    assert not fault.has_point(Tier.ENGINE, fault.parameters().model_dump())
    case = Case(fault.id, "faulty", Tier.ENGINE, parameters)
    assert (fault.faulty(case), fault.fixed(case)) == ("", "offload")
    counts = {
        "controls_wrong": 0,
        "crashed": 0,
        "other_tokens": 0,
        "rounding": 0,
        "not_fixed": 0,
        "not_offloaded": 0,
        "same": 3,
        "cells": 3,
    }
    seen = {**counts, "table": []}
    assert fault.judge(case, Observation(seen)).verdict is CaseVerdict.CLEAN
    assert fault.describe(parameters) == "engines, compiled"
