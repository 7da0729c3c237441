"""MD002 on a late device: which copies are stale, our waiting copies, and the claim about crash 3."""

from typing import Any

import pytest
import torch
from fault_cases import judge, run

from moedoctor.faults.offload.late_device import LateDevice
from moedoctor.faults.offload.unpinned_copy import CELLS, PAGEABLE, STALE, UnpinnedCopy, judge_crash_3
from moedoctor.faults.offload.unpinned_copy_lab import stores_stale
from moedoctor.fixes.offload import storage as offload_storage
from moedoctor.fixes.offload.prefetch import CudaEngine, Pipeline
from moedoctor.interfaces import Measurement
from moedoctor.results import CaseResult, CaseVerdict, ClaimVerdict, Crash, Death, Observation, Skip, Tier


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
    [("settle", Pipeline._forget), ("_start", _without_order), ("_fetch", _without_joining)],
)
def test_a_fault_of_our_own_pipeline_reproduces_the_failure(monkeypatch, name, broken):
    monkeypatch.setattr(Pipeline, name, broken)
    case = run(UnpinnedCopy(), "fixed", direction="h2d", bytes=256)
    assert case.verdict is CaseVerdict.REPRODUCED
    assert case.evidence["pinned_busy"] > 0


def test_the_bytes_moved_to_the_host_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.full((256,), 2, dtype=torch.uint8) for _ in range(2)]
    assert stores_stale(weights, pinned=False) is False
    real = offload_storage.store

    def too_early(plan: Any, pin: Any) -> Any:
        layers, failure = real(plan, pin)
        layers[0].block.bytes.zero_()
        return layers, failure

    monkeypatch.setattr(offload_storage, "store", too_early)
    assert stores_stale(weights, pinned=False) is True


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_on_a_gpu_the_fix_is_our_engine_and_our_offloader(direction: str) -> None:
    case = run(UnpinnedCopy(), "fixed", Tier.KERNEL, direction=direction, bytes=1 << 20, copies=2)
    assert case.verdict is CaseVerdict.CLEAN


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["synchronize", "fork", "join"])
def test_on_a_gpu_a_fault_of_our_own_engine_reproduces_the_failure(monkeypatch, name):
    monkeypatch.setattr(CudaEngine, name, lambda self, *mark: None)
    case = run(UnpinnedCopy(), "fixed", Tier.KERNEL, direction="h2d", bytes=1 << 20, copies=8)
    assert case.verdict is CaseVerdict.REPRODUCED


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
    device, ran = LateDevice(), list[str]()
    target, source = torch.zeros(1), torch.ones(1)
    device.run(lambda: ran.append("kernel"))
    device.fork()
    device.copy(target, source)
    mark = device.mark()
    assert ran == []
    device.wait(mark)
    assert (ran, float(target)) == (["kernel"], 1.0)
    device.join(device.mark().__class__())  # an event that is never recorded
    with pytest.raises(RuntimeError, match="wait for each other"):
        device.synchronize()


DEAD = Crash(Death.ILLEGAL_MEMORY_ACCESS, "an illegal memory access was encountered")
RIGHT = Observation({"whose": "vLLM 0.21.0", "weights_on_host": True, "passes": 50, "wrong_results": 0})
WRONG = Observation({**RIGHT.evidence, "wrong_results": 1})
RESTATED = Observation({**RIGHT.evidence, "whose": "restated"})


def judge_outcomes(cases: list[CaseResult], copies: Any, host_address: Any) -> Any:
    measured = [Measurement(PAGEABLE, copies), Measurement(STALE, host_address)]
    return judge_crash_3.judge(cases, measured, {"max_wrong": 0})


@pytest.mark.parametrize(
    ("copies", "host_address", "verdict", "text"),
    [
        (RIGHT, DEAD, ClaimVerdict.REFUTED, "dies of exactly that error (MD020)"),
        (RIGHT, Observation({"returned": True}), ClaimVerdict.REFUTED, "was not seen here"),
        (RESTATED, DEAD, ClaimVerdict.UNTESTED, "did not run over unpinned weights here"),
        (WRONG, DEAD, ClaimVerdict.CONFIRMED, "1 results"),
        (DEAD, DEAD, ClaimVerdict.CONFIRMED, "ended the process"),
        (Skip("no GPU"), Skip("no GPU"), ClaimVerdict.UNTESTED, "no GPU"),
    ],
)
def test_crash_3(copies: Any, host_address: Any, verdict: ClaimVerdict, text: str) -> None:
    judgement = judge_outcomes([], copies, host_address)
    assert judgement.verdict is verdict
    assert text in (judgement.reason or "")


@pytest.mark.parametrize("name", CELLS)
def test_one_early_copy_is_enough_and_a_pageable_one_on_a_gpu_confirms_crash_3(name: str) -> None:
    """A simulated device is no evidence about CUDA."""
    cells = {**dict.fromkeys(CELLS, 0.0), name: 0.01}
    assert judge(UnpinnedCopy(), cells).verdict is CaseVerdict.REPRODUCED
    for tier in (Tier.KERNEL, Tier.MODEL):
        case = CaseResult("faulty", tier, {}, CaseVerdict.REPRODUCED, cells)
        confirmed = tier is Tier.KERNEL and name.startswith("pageable")
        expected = ClaimVerdict.CONFIRMED if confirmed else ClaimVerdict.REFUTED
        assert judge_outcomes([case], RIGHT, DEAD).verdict is expected
