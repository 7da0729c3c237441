"""MD002, MD003, MD005, MD008 and MD020 on a CPU: control, fix, what is counted and what it is taken for."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from moedoctor.faults.offload import speed_claims as speed
from moedoctor.faults.offload import unpinned_copy_lab as unpinned_copy_model
from moedoctor.faults.offload.late_device import DeviceMemory, LateDevice
from moedoctor.faults.offload.offload_garbage import OffloadGarbage
from moedoctor.faults.offload.offload_garbage_lab import SimulatedMemory, memory_for
from moedoctor.faults.offload.offloaded_scales import OffloadedScales
from moedoctor.faults.offload.offloaded_scales_claims import judge_marlin_refuses, judge_stale_reference
from moedoctor.faults.offload.stale_config import run, simulated_stack, upstream_offload
from moedoctor.faults.offload.stale_parameter import StaleParameter
from moedoctor.faults.offload.unpinned_copy import CELLS, UnpinnedCopy
from moedoctor.faults.offload.unpinned_copy_claims import PAGEABLE, STALE, judge_crash_3
from moedoctor.faults.offload.untraceable_offload import UntraceableOffload
from moedoctor.faults.offload.untraceable_offload_lab import distance, fixed, observe
from moedoctor.fixes.offload import storage as offload_storage
from moedoctor.fixes.offload.prefetch import CudaEngine, Pipeline
from moedoctor.interfaces import Fault, Measurement
from moedoctor.results import (
    Case,
    CaseResult,
    CaseVerdict,
    ClaimVerdict,
    Crash,
    Death,
    Observation,
    Skip,
    Tier,
)

CONTROL_AND_FIX = [("faulty", CaseVerdict.REPRODUCED), ("fixed", CaseVerdict.CLEAN)]


def result(fault: Fault, subject: str, tier: Tier = Tier.MODEL, **given: Any) -> CaseResult:
    """The case, run here and judged; tier kernel runs on the GPU."""
    parameters = fault.parameters(**given).model_dump(mode="json")
    case = Case(fault.id, subject, tier, parameters, "cuda:0" if tier is Tier.KERNEL else "cpu")
    seen = fault.observe(case, getattr(fault, subject)(case))
    judged = fault.judge(case, seen)
    return CaseResult(subject, tier, parameters, judged.verdict, seen.evidence, figure=judged.figure)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize(("subject", "verdict"), CONTROL_AND_FIX)
def test_only_pinned_memory_that_is_used_too_early_is_stale(
    direction: str, subject: str, verdict: CaseVerdict
) -> None:
    seen = result(UnpinnedCopy(), subject, direction=direction, bytes=256, copies=3)
    assert seen.verdict is verdict
    stale = {name for name in CELLS if seen.evidence[name]}
    assert stale == ({"pinned_idle", "pinned_busy"} if subject == "faulty" else set())


def _without_waiting(self: Pipeline) -> None:
    self._forget()


def _without_order(self: Pipeline, index: int) -> None:
    unit = self.units[index]
    slot = self._slots[unit.slot]
    self.engine.copy(slot.buffer[: unit.host.numel()], unit.host)
    slot.mark, slot.holds = self.engine.mark(), index


def _without_joining(self: Pipeline, index: int, unit: Any, slot: Any) -> None:
    if slot.holds != index:
        self._start(index)


@pytest.mark.parametrize(
    ("name", "broken"),
    [("settle", _without_waiting), ("_start", _without_order), ("_fetch", _without_joining)],
)
def test_a_fault_of_our_own_pipeline_reproduces_the_failure(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Any
) -> None:
    monkeypatch.setattr(Pipeline, name, broken)
    seen = result(UnpinnedCopy(), "fixed", direction="h2d", bytes=256)
    assert seen.verdict is CaseVerdict.REPRODUCED
    assert seen.evidence["pinned_busy"] > 0


def test_which_code_the_fix_ran_is_said() -> None:
    seen = [
        result(UnpinnedCopy(), subject, direction=direction, bytes=256, copies=1).evidence.get("through")
        for subject, direction in (("fixed", "h2d"), ("fixed", "d2h"), ("faulty", "h2d"))
    ]
    assert seen[0] == "Pipeline, simulated engine"
    assert str(seen[1]).startswith("restated")
    assert seen[2] is None


def test_what_the_offloader_took_to_the_host_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.full((256,), 2, dtype=torch.uint8) for _ in range(2)]
    assert unpinned_copy_model.stored_stale(weights, pinned=False) is False
    real = offload_storage.store

    def too_early(plan: Any, pin: Any) -> Any:
        layers, failure = real(plan, pin)
        layers[0].block.bytes.zero_()
        return layers, failure

    monkeypatch.setattr(offload_storage, "store", too_early)
    assert unpinned_copy_model.stored_stale(weights, pinned=False) is True


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_on_a_gpu_the_fix_is_our_engine_and_our_offloader(direction: str) -> None:
    seen = result(UnpinnedCopy(), "fixed", Tier.KERNEL, direction=direction, bytes=1 << 20, copies=2)
    assert seen.verdict is CaseVerdict.CLEAN


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wait", "fork", "join"])
def test_on_a_gpu_a_fault_of_our_own_engine_reproduces_the_failure(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(CudaEngine, name, lambda self, *mark: None)
    seen = result(UnpinnedCopy(), "fixed", Tier.KERNEL, direction="h2d", bytes=1 << 20, copies=8)
    assert seen.verdict is CaseVerdict.REPRODUCED


def test_one_stale_copy_in_any_cell_is_enough() -> None:
    for name in CELLS:
        seen = Observation({**dict.fromkeys(CELLS, 0.0), name: 0.01})
        assert (
            UnpinnedCopy().judge(Case("MD002", "fixed", Tier.MODEL, {}), seen).verdict
            is CaseVerdict.REPRODUCED
        )


@pytest.mark.parametrize("pinned", [True, False])
def test_only_pinned_host_memory_is_read_late(pinned: bool) -> None:
    device, source = LateDevice(pinned=pinned), torch.ones(1)
    by_stream, in_order, host = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    device.copy(by_stream, source)
    device.copy_in_order(in_order, source)
    source.fill_(2)
    device.fetch(host, torch.full((1,), 3.0))
    assert float(host) == (0 if pinned else 3)
    device.synchronize()
    assert (float(by_stream), float(in_order), float(host)) == ((2, 2, 3) if pinned else (1, 1, 3))


def test_a_late_device_keeps_the_order_of_events_and_notices_a_deadlock() -> None:
    device, seen = LateDevice(), list[str]()
    target, source = torch.zeros(1), torch.ones(1)
    device.run(lambda: seen.append("kernel"))
    device.fork()
    device.copy(target, source)
    mark = device.mark()
    assert seen == []
    device.wait(mark)
    assert (seen, float(target)) == (["kernel"], 1.0)
    device.join(device.mark().__class__())  # an event that nobody ever records
    with pytest.raises(RuntimeError, match="wait for each other"):
        device.synchronize()


def test_device_memory_is_addresses_and_not_objects() -> None:
    memory = DeviceMemory()
    there = memory.upload(torch.zeros(8))
    assert memory.holds(there[3:])
    assert not memory.holds(there.clone())
    ground = torch.zeros(8)
    tenant = memory.admit(torch.from_dlpack(ground))
    assert memory.holds(ground)
    del tenant
    assert not memory.holds(ground), "what was given back is the device's no more"


@pytest.mark.parametrize(("subject", "verdict"), CONTROL_AND_FIX)
def test_a_kernel_that_checks_gets_host_scales_from_the_config(subject: str, verdict: CaseVerdict) -> None:
    seen = result(OffloadedScales(), subject, layers=3)
    assert seen.verdict is verdict
    if subject == "faulty":
        assert (seen.evidence["error"], seen.evidence["config_holds"]) == (
            "b_scales is not on GPU",
            "host memory",
        )
    else:
        assert seen.evidence["config_holds"] == "device memory"
        assert seen.evidence["host_bytes"] == 3 * 4 * 64 * 64
        assert "metadata by" in seen.evidence["kept_on_device"][0]


@pytest.mark.parametrize(("subject", "verdict"), CONTROL_AND_FIX)
@pytest.mark.parametrize(
    ("backend", "text"), [("checks", "is not on GPU"), ("unchecked", "illegal memory access")]
)
def test_what_backends_do_with_a_stale_parameter(
    subject: str, verdict: CaseVerdict, backend: str, text: str
) -> None:
    seen = result(StaleParameter(), subject, backend=backend)
    assert seen.verdict is verdict
    assert (text in (seen.evidence["error"] or "")) is (subject == "faulty")


def test_scales_that_are_left_on_the_device_do_no_harm() -> None:
    """The control fails for the stale reference and for nothing else."""
    from moedoctor.reference.offload_paths import functional_call_offload

    memory = DeviceMemory()
    stack = simulated_stack(3, memory, checks=True, seed=0)
    x = torch.randn(16, 64)

    def weights_alone(stack: Any, memory: Any) -> None:
        functional_call_offload(list(stack), ("w13_weight",), pin=False, to_device=memory.upload)

    assert run(stack, x, weights_alone, memory)["same_bits"] is True
    assert (
        run(simulated_stack(3, memory, checks=True, seed=0), x, upstream_offload, memory)["same_bits"] is None
    )


def test_real_backends_are_for_the_gpu_and_the_simulated_one_for_the_model() -> None:
    fault = StaleParameter()
    here = {
        tier: [
            b
            for b in ("checks", "unchecked", "triton", "torch", "vllm_marlin", "vllm_cutlass")
            if fault.has_point(tier, {"backend": b})
        ]
        for tier in (Tier.MODEL, Tier.KERNEL)
    }
    assert here[Tier.MODEL] == ["checks", "unchecked"]
    assert here[Tier.KERNEL] == ["unchecked", "triton", "torch", "vllm_marlin", "vllm_cutlass"]


def test_the_death_of_the_process_is_the_symptom_but_not_any_death() -> None:
    case = Case("MD020", "faulty", Tier.KERNEL, {"backend": "unchecked"})
    crash = Crash(Death.ILLEGAL_MEMORY_ACCESS, "an illegal memory access was encountered")
    assert StaleParameter().judge_crash(case, crash).verdict is CaseVerdict.REPRODUCED
    assert (
        StaleParameter().judge_crash(case, replace(crash, death=Death.OUT_OF_MEMORY)).verdict
        is CaseVerdict.ERROR
    )


@pytest.mark.parametrize(("subject", "verdict"), CONTROL_AND_FIX)
def test_a_view_without_its_memory_turns_into_the_next_buffer(subject: str, verdict: CaseVerdict) -> None:
    seen = result(OffloadGarbage(), subject, bytes=4096)
    assert seen.verdict is verdict
    assert seen.evidence["right_before"] is True
    assert seen.evidence["error"] is None
    assert seen.evidence["memory_was_reused"] is (subject == "faulty")


def test_a_pool_gives_a_block_out_again_once_nobody_holds_it() -> None:
    memory = SimulatedMemory(keeps=True)
    block = memory.allocate(64)
    start, view = block.start, memory.view(block)
    del block
    gc.collect()
    assert memory.allocate(64).start != start
    del view
    gc.collect()
    assert memory.allocate(64).start in (start, start + 64)
    assert isinstance(memory_for(Tier.MODEL, "cpu", keeps=False), SimulatedMemory)


def test_forward_by_state_dict_is_traced_or_not_by_this_torch_and_ours_always() -> None:
    fault = UntraceableOffload()
    control, fixed = (
        result(fault, name, layers=3, experts=2, hidden=16, intermediate=16) for name in ("faulty", "fixed")
    )
    assert (fixed.verdict, fixed.evidence["graphs"]) == (CaseVerdict.CLEAN, 1)
    if control.verdict is CaseVerdict.CLEAN:
        assert "the failure needs torch 2.12.1 or older" in (fault.absent([control, fixed]) or "")
    else:
        assert "setattr" in control.evidence["error"]
        assert fault.absent([control, fixed]) is None


OTHERS = {"same_bits": False, "distance": 0.3, "wrong_weights_distance": 0.2, "allowed_distance": 0.02}


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (OTHERS, CaseVerdict.REPRODUCED),
        ({**OTHERS, "distance": 0.01}, CaseVerdict.CLEAN),
        ({**OTHERS, "distance": 0.01, "allowed_distance": 0.0}, CaseVerdict.REPRODUCED),
        ({**OTHERS, "distance": float("nan")}, CaseVerdict.REPRODUCED),
    ],
)
def test_what_the_compiler_rounds_elsewhere_is_no_failure(seen: Any, verdict: CaseVerdict) -> None:
    traced = {"torch": "2.12.1", "error": None, "telling_line": None, "graphs": 1}
    judged = UntraceableOffload().judge(
        Case("MD005", "fixed", Tier.MODEL, {}), Observation({**traced, **seen})
    )
    assert judged.verdict is verdict


def test_a_nan_in_a_later_pass_is_no_small_difference() -> None:
    expected = torch.ones(2, 2)
    assert distance([expected, expected + 0.5], expected) == 1.0
    assert math.isnan(distance([expected + 0.5, expected * torch.nan], expected))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_wrong_weights_in_one_compiled_layer_are_more_than_rounding(number: int) -> None:
    parameters = UntraceableOffload().parameters().model_copy(update={"compiler": "aot_eager", "layers": 3})

    def exchange(stack: torch.nn.Sequential) -> Any:
        stack[number].experts.load_state_dict(stack[(number + 1) % 3].experts.state_dict())
        return fixed(stack)

    for apply, verdict in ((fixed, CaseVerdict.CLEAN), (exchange, CaseVerdict.REPRODUCED)):
        seen = observe(parameters, "cpu", apply)
        assert 0 < seen.evidence["allowed_distance"] < seen.evidence["wrong_weights_distance"]
        found = UntraceableOffload().judge(Case("MD005", "fixed", Tier.MODEL, {}), seen)
        assert found.verdict is verdict
    assert (
        observe(parameters.model_copy(update={"compiler": "eager"}), "cpu", fixed).evidence[
            "allowed_distance"
        ]
        == 0
    )


def test_only_a_torch_that_traced_every_control_makes_the_failure_absent() -> None:
    fault = UntraceableOffload()
    traced = {"torch": "2.13.0", "error": None, "telling_line": None, "graphs": 1, "same_bits": True}
    refused = {"torch": "2.13.0", "error": "setattr", "telling_line": "setattr", "graphs": 0}

    def case(subject: str, evidence: dict[str, Any]) -> CaseResult:
        return CaseResult(subject, Tier.MODEL, {}, CaseVerdict.CLEAN, evidence)

    assert fault.absent([case("faulty", traced), case("fixed", refused)]) is not None
    assert fault.absent([case("faulty", traced), case("faulty", refused)]) is None
    assert fault.absent([case("fixed", traced)]) is None
    assert fault.conclude([case("faulty", refused)]) == {"torch": "2.13.0", "dynamo": "setattr"}
    judged = fault.judge(Case("MD005", "fixed", Tier.MODEL, {}), Observation({**traced, **OTHERS}))
    assert judged.verdict is CaseVerdict.REPRODUCED


@pytest.mark.parametrize(
    ("fault", "given"),
    [
        (UnpinnedCopy, {"direction": "up"}),
        (OffloadedScales, {"layers": 2}),
        (StaleParameter, {"backend": "cpu"}),
        (OffloadGarbage, {"bytes": 1}),
        (UntraceableOffload, {"compiler": "none"}),
    ],
)
def test_wrong_parameters_are_refused(fault: type[Fault], given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        fault.parameters(**given)


def units(**outcomes: Any) -> list[Measurement]:
    names = {"pageable": PAGEABLE, "stale": STALE}
    return [Measurement(names[key], outcome) for key, outcome in outcomes.items()]


SEEN = {"whose": "vLLM 0.21.0", "weights_on_host": True, "passes": 50, "wrong_results": 0}
GOOD = Observation(SEEN)
DEAD = Crash(Death.ILLEGAL_MEMORY_ACCESS, "an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("measured", "verdict", "text"),
    [
        (units(pageable=GOOD, stale=DEAD), ClaimVerdict.REFUTED, "dies of exactly that error (MD020)"),
        (
            units(pageable=GOOD, stale=Observation({"returned": True})),
            ClaimVerdict.REFUTED,
            "was not seen here",
        ),
        (
            units(pageable=Observation({"passes": 50, "wrong_results": 1})),
            ClaimVerdict.CONFIRMED,
            "1 results",
        ),
        (units(pageable=DEAD), ClaimVerdict.CONFIRMED, "ended the process"),
        (units(pageable=Skip("no GPU")), ClaimVerdict.UNTESTED, "no GPU"),
    ],
)
def test_what_upstream_says_of_crash_3(measured: list[Measurement], verdict: ClaimVerdict, text: str) -> None:
    judged = judge_crash_3([], measured, {"max_wrong": 0})
    assert judged.verdict is verdict
    assert text in (judged.reason or "")


def test_one_early_pageable_copy_on_a_gpu_confirms_it() -> None:
    cells = {**dict.fromkeys(CELLS, 0.0), "pageable_busy": 0.1}
    case = CaseResult("faulty", Tier.KERNEL, {}, CaseVerdict.REPRODUCED, cells)
    assert (
        judge_crash_3([case], units(pageable=GOOD, stale=DEAD), {"max_wrong": 0}).verdict
        is ClaimVerdict.CONFIRMED
    )
    simulated = replace(case, tier=Tier.MODEL)
    judged = judge_crash_3([simulated], units(pageable=GOOD, stale=DEAD), {"max_wrong": 0})
    assert judged.verdict is ClaimVerdict.REFUTED, "a simulated device says nothing about CUDA"


def at_kernel(holds: str, error: str | None) -> CaseResult:
    evidence = {"config_holds": holds, "error": error, "same_bits": error is None}
    return CaseResult("faulty", Tier.KERNEL, {}, CaseVerdict.REPRODUCED, evidence)


REFUSED, RAN = at_kernel("host memory", "b_scales is not on GPU"), at_kernel("device memory", None)


@pytest.mark.parametrize(
    ("cases", "refuses", "reference"),
    [
        ([REFUSED, RAN], ClaimVerdict.CONFIRMED, ClaimVerdict.CONFIRMED),
        ([at_kernel("host memory", None), RAN], ClaimVerdict.REFUTED, ClaimVerdict.REFUTED),
        ([REFUSED], ClaimVerdict.CONFIRMED, ClaimVerdict.UNTESTED),
        (
            [replace(REFUSED, tier=Tier.MODEL), replace(RAN, tier=Tier.MODEL)],
            ClaimVerdict.UNTESTED,
            ClaimVerdict.UNTESTED,
        ),
    ],
)
def test_crash_2_is_decided_by_upstreams_own_operator(
    cases: Sequence[CaseResult], refuses: ClaimVerdict, reference: ClaimVerdict
) -> None:
    assert judge_marlin_refuses(cases, [], {}).verdict is refuses
    assert judge_stale_reference(cases, [], {}).verdict is reference


def timed(ratio: float, way: str = "prefetch", *, right: bool = True, ours: bool = True) -> list[Measurement]:
    spread = {"median": ratio, "p20": ratio, "p80": ratio, "samples": 5}
    rows = [
        {"way": "ours", "gb_per_s": 50.0, "over_ours": None},
        {"way": way, "gb_per_s": 50.0 / ratio, "over_ours": spread},
        {"way": "functional_call_pinned", "gb_per_s": 50.0, "over_ours": spread},
    ]
    seen = {
        "right": {"ours": ours, way: right},
        "whose": {way: "vLLM 0.21.0"},
        "rows": rows,
        "pinned_gb_per_s": {"median": 55.0},
    }
    return [Measurement("", Observation(seen))]


@pytest.mark.parametrize(
    ("judge", "measured", "limits", "verdict"),
    [
        (speed.judge_bandwidth, timed(1.0), {"min_share": 0.9}, ClaimVerdict.CONFIRMED),
        (speed.judge_bandwidth, timed(1.0), {"min_share": 0.92}, ClaimVerdict.REFUTED),
        (speed.judge_speedup, timed(1.5, "functional_call"), {"min_speedup": 1.5}, ClaimVerdict.CONFIRMED),
        (speed.judge_speedup, timed(1.4, "functional_call"), {"min_speedup": 1.5}, ClaimVerdict.REFUTED),
        (speed.judge_not_slower, timed(1.0), {"min_ratio": 1.0}, ClaimVerdict.CONFIRMED),
        (speed.judge_not_slower, timed(0.98), {"min_ratio": 0.99}, ClaimVerdict.REFUTED),
        (speed.judge_not_slower, timed(2.0, right=False), {"min_ratio": 1.0}, ClaimVerdict.UNTESTED),
        (speed.judge_not_slower, timed(2.0, ours=False), {"min_ratio": 1.0}, ClaimVerdict.REFUTED),
        (speed.judge_one_token, timed(0.1, "uva"), {"max_ratio": 1.0}, ClaimVerdict.CONFIRMED),
        (speed.judge_one_token, timed(1.1, "uva"), {"max_ratio": 1.0}, ClaimVerdict.REFUTED),
        (speed.judge_resident, timed(1.009, "ours_budget_0"), {"max_share": 0.01}, ClaimVerdict.CONFIRMED),
        (speed.judge_resident, timed(1.011, "ours_budget_0"), {"max_share": 0.01}, ClaimVerdict.REFUTED),
        (speed.judge_resident, timed(0.98, "ours_budget_0"), {"max_share": 0.01}, ClaimVerdict.REFUTED),
    ],
)
def test_speed_is_judged_by_the_figures(
    judge: Any, measured: Any, limits: Any, verdict: ClaimVerdict
) -> None:
    assert judge([], measured, limits).verdict is verdict
