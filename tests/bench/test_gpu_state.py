"""NVML's answers while something is measured."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from moedoctor import environment
from moedoctor.bench import gpu_state
from moedoctor.bench.gpu_state import read, sample_gpus, summarize


class FakeNvml(SimpleNamespace):
    """One GPU that is idle, works, is held down by its power cap, and then is idle again."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        """Raised by a driver for a question that it does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = iter((0, 90, 100, 0, 0, 0))

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(index=index, load=0)

    def nvmlDeviceGetUtilizationRates(self, gpu: SimpleNamespace) -> SimpleNamespace:  # noqa: N802
        gpu.load = next(self.loads)
        return SimpleNamespace(gpu=gpu.load)

    def nvmlDeviceGetName(self, gpu: SimpleNamespace) -> bytes:  # noqa: N802
        return b"a GPU"

    def nvmlDeviceGetClockInfo(self, gpu: SimpleNamespace, kind: int) -> int:  # noqa: N802
        return {0: 300, 90: 1980, 100: 1600}[gpu.load] if kind == 1 else 3201

    def nvmlDeviceGetPowerUsage(self, gpu: SimpleNamespace) -> int:  # noqa: N802
        raise self.NVMLError

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: SimpleNamespace) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: SimpleNamespace) -> int:  # noqa: N802
        return {0: 1, 90: 0, 100: 4 | 8}[gpu.load]


def test_only_samples_of_a_busy_gpu_count() -> None:
    samples = list(itertools.islice(read({"indices": [3], "interval": 0}, FakeNvml()), 4))
    state = summarize(samples)
    (gpu,) = state["gpus"]
    assert gpu == {
        "index": 3,
        "name": "a GPU",
        "samples": 4,
        "busy_samples": 2,
        "sm_clock_mhz": {"min": 1600.0, "median": 1790.0, "max": 1980.0},
        "memory_clock_mhz": {"min": 3201.0, "median": 3201.0, "max": 3201.0},
        "power_limit_watts": 700.0,
        "throttle_reasons": {"power_cap": 0.5, "hardware_slowdown": 0.5},
    }, "power and temperature are absent, because the driver does not report them"


def test_a_driver_that_does_not_answer_is_a_reason() -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise self.NVMLError("driver and library differ")

    (answer,) = read({"indices": [0], "interval": 0}, Broken())
    assert summarize([answer]) == {"not_sampled": "NVMLError: driver and library differ"}
    assert summarize([]) == {"not_sampled": "NVML gave no readings"}


@pytest.mark.parametrize(("device", "reason"), [("auto", "no NVIDIA GPU"), ("cpu", "used no GPU")])
def test_without_a_gpu_the_state_says_why(device: str, reason: str) -> None:
    with sample_gpus({"gpu": None, "gpus": []}, device) as readings:
        pass
    assert reason in readings["not_sampled"]


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [(None, "auto", [0, 1, 2]), (None, "cuda:1", [1]), ("2,0", "cuda:0", [2]), ("2,0", "auto", [2, 0])],
)
def test_the_gpus_are_those_that_cuda_sees_in_its_order(monkeypatch, setting, device, expected):
    asked: list[Any] = []
    monkeypatch.setattr(gpu_state.json, "dumps", lambda request: asked.append(request) or "{}")
    monkeypatch.setattr(gpu_state, "_START_SECONDS", 0)
    visible = {int(text) for text in setting.split(",")} if setting else {0, 1, 2}
    gpus = [{"visible": index in visible} for index in range(3)]
    with sample_gpus({"gpu": "a GPU", "gpus": gpus, "cuda_visible_devices": setting}, device):
        pass
    assert asked[0]["indices"] == expected


@pytest.mark.gpu
def test_a_real_gpu_is_read_while_it_works() -> None:
    import torch

    a = torch.randn(4096, 4096, device="cuda")
    with sample_gpus(environment.collect(), "cuda:0") as readings:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            a @ a
            torch.cuda.synchronize()
    (gpu,) = readings["gpus"]
    assert gpu["busy_samples"] >= 3
    assert gpu["sm_clock_mhz"]["max"] > 300
    assert gpu["power_limit_watts"] > 50
    assert "throttle_reasons" in gpu
