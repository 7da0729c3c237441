"""Clocks, power, temperature and throttling of the GPUs while something is measured, as NVML gives them.

A child process reads them, because a broken driver may end whoever asks. What is measured runs elsewhere, and
a reading takes well under a millisecond of one core.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moedoctor.origin import GpuReadings, GpuState, Spread
from moedoctor.processes.ask import Child, answer, open_unnamed_file, read_answers

INTERVAL_SECONDS = 0.25
_CHILD = "moedoctor.bench.gpu_state"
_START_SECONDS = 10.0
_MOST_GPUS = 16
_REASONS = {
    0x2: "applications_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
"""Bits of NVML's clocks event reasons. 0x1 is an idle GPU, which holds nothing down."""
_READINGS = ("sm_clock_mhz", "memory_clock_mhz", "power_watts", "temperature_celsius")
_LIMITS = ("sm_clock_limit_mhz", "power_limit_watts")


@contextlib.contextmanager
def sample_gpus(facts: Mapping[str, Any], device: str = "auto") -> Iterator[GpuState]:
    """Read the GPUs that CUDA programs may use, until the block ends; `device` ``cuda:N`` chooses one.

    `facts` are those of `moedoctor.environment.collect`. The state is complete once the block has ended;
    without a GPU it says why nothing was read.
    """
    indices = _list_visible(facts)
    if device.startswith("cuda:"):
        indices = indices[int(device[5:]) :][:1]
    if not facts.get("gpu") or not indices or device == "cpu":
        why = "the measurement used no GPU" if device == "cpu" else "no NVIDIA GPU is visible"
        yield {"not_sampled": why}
        return
    state: GpuState = {}
    with open_unnamed_file() as asked, open_unnamed_file() as readings:
        asked.write(json.dumps({"indices": indices[:_MOST_GPUS], "interval": INTERVAL_SECONDS}).encode())
        with Child(_CHILD, (asked.fileno(), readings.fileno()), log=1 << 16) as child:
            until = time.monotonic() + _START_SECONDS
            while not os.fstat(readings.fileno()).st_size and child.wait(until - time.monotonic()):
                pass
            try:
                yield state
            finally:
                child.end()
                state.update(summarize(list(read_answers(readings))))


def _list_visible(facts: Mapping[str, Any]) -> list[int]:
    """Return NVML's numbers of the GPUs that CUDA programs may use, in the order of their CUDA numbers."""
    visible = [index for index, gpu in enumerate(facts.get("gpus") or ()) if gpu.get("visible")]
    chosen = str(facts.get("cuda_visible_devices") or "").replace(" ", "").split(",")
    ordered = [int(text) for text in chosen if text.isdecimal() and len(text) < 5]
    return ordered if sorted(ordered) == visible else visible


def summarize(samples: Sequence[Mapping[str, Any]]) -> GpuState:
    """Return the state of each GPU from the child's samples."""
    if not samples:
        return {"not_sampled": "NVML gave no readings"}
    if "error" in samples[0]:
        return {"not_sampled": str(samples[0]["error"])}
    by_gpu: dict[int, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_gpu.setdefault(sample["index"], []).append(sample)
    return {
        "interval_seconds": INTERVAL_SECONDS,
        "gpus": [_summarize_readings(own) for own in by_gpu.values()],
    }


def _summarize_readings(samples: Sequence[Mapping[str, Any]]) -> GpuReadings:
    # A driver that does not report the load leaves no way to tell.
    busy = [sample for sample in samples if sample.get("load_percent") != 0]
    state: dict[str, Any] = {
        "index": samples[0]["index"],
        "name": samples[0]["name"],
        "samples": len(samples),
        "busy_samples": len(busy),
    }
    for name in _READINGS:
        if values := [float(sample[name]) for sample in busy if sample.get(name) is not None]:
            spread: Spread = {"min": min(values), "median": statistics.median(values), "max": max(values)}
            state[name] = spread
    for name in _LIMITS:
        if values := [float(sample[name]) for sample in busy if sample.get(name) is not None]:
            state[name] = min(values)
    bits = [sample["reasons"] for sample in busy if sample.get("reasons") is not None]
    if bits:
        counts = Counter(name for held in bits for bit, name in _REASONS.items() if held & bit)
        state["throttle_reasons"] = {name: round(count / len(bits), 4) for name, count in counts.items()}
    return state  # type: ignore[return-value]


def read(request: Mapping[str, Any], nvml: Any = None) -> Iterator[dict[str, Any]]:
    """In the child: give a sample of each GPU at every interval, until the parent ends this process."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in request["indices"]}
    except Exception as error:
        yield {"error": f"{type(error).__name__}: {error}"[:200]}
        return
    while True:
        for index, handle in handles.items():
            yield {"index": index, **_sample(nvml, handle)}
        time.sleep(request["interval"])


def _sample(nvml: Any, handle: Any) -> dict[str, Any]:
    def ask(names: str, *arguments: Any) -> Any:
        """Return the answer of the first function that the driver has; None if it does not support it."""
        for name in names.split():
            try:
                value = getattr(nvml, name)(handle, *arguments)
            except (nvml.NVMLError, AttributeError):
                continue
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        return None

    load = ask("nvmlDeviceGetUtilizationRates")
    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    return {
        "name": str(ask("nvmlDeviceGetName") or "unknown"),
        "load_percent": None if load is None else load.gpu,
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "sm_clock_limit_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "power_watts": None if power is None else power / 1000,
        "power_limit_watts": None if limit is None else limit / 1000,
        "temperature_celsius": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "reasons": ask("nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons"),
    }


if __name__ == "__main__":
    answer(read)
