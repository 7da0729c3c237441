"""MD003 and MD020: the config's stale reference, the kernels that read it, and the table of vllm#37883."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fault_cases import run

from moedoctor.faults.offload import offloaded_scales as md003
from moedoctor.faults.offload.offloaded_scales import OffloadedScales
from moedoctor.faults.offload.stale_config import DeviceMemory, make_simulated_stack, offload_and_run
from moedoctor.faults.offload.stale_parameter import StaleParameter
from moedoctor.faults.offload.untraceable_offload import UntraceableOffload
from moedoctor.kernels.unchecked import read_address, read_tensor
from moedoctor.results import Case, CaseResult, CaseVerdict, ClaimVerdict, Crash, Death, Observation, Tier
from moedoctor.upstream.engine import offload_table
from moedoctor.upstream.engine.offload_table import COPIES, ON_GPU, PLACES, UVA, WEIGHTS


def test_scales_that_stay_on_the_device_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stale reference is the only reason that the control fails."""
    x = torch.randn(16, 64)
    for names, same in ((("w13_weight",), True), (("w13_weight", "w13_weight_scale"), None)):
        monkeypatch.setattr("moedoctor.faults.offload.stale_config.NAMES", names)
        memory = DeviceMemory()
        stack = make_simulated_stack(3, memory, checks=True, seed=0)
        assert offload_and_run("faulty", stack, x, memory)["same_bits"] is same


def test_real_backends_are_for_the_gpu_and_the_simulated_ones_for_the_model() -> None:
    every = ("checks", "unchecked", "triton", "torch", "vllm_marlin", "vllm_cutlass")
    for tier, expected in ((Tier.MODEL, every[:2]), (Tier.KERNEL, every[1:])):
        points = [name for name in every if StaleParameter().has_point(tier, {"backend": name})]
        assert points == list(expected)


def test_the_death_of_the_process_is_the_symptom_but_not_any_death() -> None:
    case = Case("MD020", "faulty", Tier.KERNEL, {"backend": "unchecked"})
    deaths = {Death.ILLEGAL_MEMORY_ACCESS: CaseVerdict.REPRODUCED, Death.OUT_OF_MEMORY: CaseVerdict.ERROR}
    for death, verdict in deaths.items():
        assert StaleParameter().judge_crash(case, Crash(death, "it died")).verdict is verdict


def at_kernel(holds: str, error: str | None) -> CaseResult:
    evidence = {"config_holds": holds, "error": error, "same_bits": error is None}
    return CaseResult("faulty", Tier.KERNEL, {}, CaseVerdict.REPRODUCED, evidence)


CONFIRMED, REFUTED, UNTESTED = ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED, ClaimVerdict.UNTESTED
REFUSED, RAN = at_kernel("host memory", "b_scales is not on GPU"), at_kernel("device memory", None)


@pytest.mark.parametrize(
    ("cases", "refuses", "reference"),
    [
        ([REFUSED, RAN], CONFIRMED, CONFIRMED),
        ([at_kernel("host memory", None), RAN], REFUTED, REFUTED),
        ([REFUSED], CONFIRMED, UNTESTED),
        ([replace(REFUSED, tier=Tier.MODEL), replace(RAN, tier=Tier.MODEL)], UNTESTED, UNTESTED),
    ],
)
def test_crash_2_is_decided_by_upstreams_own_operator(cases, refuses, reference):
    assert md003.judge_marlin_refuses.judge(cases, [], {}).verdict is refuses
    assert md003.judge_stale_reference.judge(cases, [], {}).verdict is reference


def cell(
    mode: str, experts: str, outcome: str, detail: str = "d", backend: str = "NVFP4 MARLIN", **more: Any
) -> dict[str, Any]:
    names = {"backend": backend, "mode": mode, "experts": experts}
    return {**names, "outcome": outcome, "detail": detail, **more}


def table(subject: str, *cells: dict[str, Any], tier: Tier = Tier.ENGINE) -> CaseResult:
    return CaseResult(subject, tier, {}, CaseVerdict.REPRODUCED, {"table": list(cells)})


FAULTY = [
    table("faulty", cell("eager", ON_GPU, "control"), cell("eager", COPIES, "crash 2", "b_scales")),
    table("faulty", cell("compiled", UVA, "same tokens"), cell("compiled", COPIES, "crash 1", "setattr")),
]
SAME = cell("eager", COPIES, "same tokens", "same logprobs")


def test_each_cell_is_listed_once_with_both_outcomes() -> None:
    results = [*FAULTY, table("fixed", cell("eager", ON_GPU, "control"), SAME)]
    ((name, rows),) = OffloadedScales().conclude(results).items()
    assert name == "table_of_vllm_37883"
    places = [("eager", COPIES), ("compiled", UVA), ("compiled", COPIES)]
    assert [(row["mode"], row["experts"]) for row in rows] == places
    assert rows[0]["without_fix"] == "crash 2: b_scales"
    assert rows[0]["with_fix"] == "same tokens, same logprobs"
    assert "with_fix" not in rows[2]
    assert OffloadedScales().conclude([table("faulty", SAME, tier=Tier.MODEL)]) == {}


IDLE = cell("eager", COPIES, "no offload")


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        (FAULTY, CONFIRMED),
        (FAULTY[:1], UNTESTED),
        (FAULTY[1:], UNTESTED),
        ([table("faulty", SAME), FAULTY[1]], REFUTED),
        ([table("faulty", SAME, IDLE)], UNTESTED),
        ([table("faulty", cell("eager", COPIES, "crash", backend="BF16 TRITON"))], UNTESTED),
        ([], UNTESTED),
    ],
)
def test_marlin_crashes(results: list[CaseResult], verdict: ClaimVerdict) -> None:
    assert md003.judge_marlin_crashes.judge(results, (), {}).verdict is verdict


ZEROS = ("controls_wrong", "crashed", "other_tokens", "rounding", "not_fixed", "not_offloaded", "moved_back")
COUNTS = {**dict.fromkeys(ZEROS, 0), "same": 3, "cells": 3, "table": []}


@pytest.mark.parametrize(
    ("fault", "mode", "backends", "places"),
    [
        (OffloadedScales(), "eager", 4, (*PLACES, WEIGHTS)),
        (OffloadedScales(), "compiled", 4, PLACES),
        (UntraceableOffload(), "compiled", 1, (ON_GPU, COPIES)),
    ],
)
def test_only_the_fixed_engine_has_the_fix(monkeypatch, fault, mode, backends, places):
    parameters = fault.parameters(engine=mode).model_dump()
    assert fault.has_point(Tier.ENGINE, parameters)
    assert not fault.has_point(Tier.MODEL, parameters)
    assert not fault.has_point(Tier.ENGINE, fault.parameters().model_dump())
    asked: list[Any] = []

    def measure(backends: tuple[str, ...], *given: Any, fixed: bool) -> dict[str, Any]:
        asked.append((len(backends), *given, fixed))
        return COUNTS

    monkeypatch.setattr(offload_table, "measure", measure)
    for subject in ("faulty", "fixed"):
        assert run(fault, subject, Tier.ENGINE, engine=mode).verdict is CaseVerdict.CLEAN
    assert asked == [(backends, mode, places, fixed) for fixed in (False, True)]
    case, wrong = Case(fault.id, "faulty", Tier.ENGINE, parameters), {**COUNTS, "controls_wrong": 1}
    assert fault.describe(parameters) == f"engines, {mode}"
    assert fault.judge(case, Observation(wrong)).verdict is CaseVerdict.ERROR


@pytest.mark.parametrize("count", [0, 1000, 1025])
def test_a_count_that_would_read_beyond_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count must be a positive multiple of 1024, got {count}"):
        read_address(0, count, "cuda:0")
    with pytest.raises(ValueError, match=f"got {count}"):
        read_tensor(torch.empty(count), "cuda:0")


@pytest.mark.gpu
def test_device_memory_reads_the_same_both_ways_and_host_memory_is_refused_by_triton() -> None:
    source = torch.randn(4096, device="cuda")
    assert torch.equal(read_address(source.data_ptr(), 4096, "cuda:0"), source)
    assert torch.equal(read_tensor(source, "cuda:0"), source)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        read_tensor(torch.randn(4096), "cuda:0")
