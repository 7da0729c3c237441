"""The measured limits of this machine: memory bandwidth and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moedoctor.bench.timing import time_graph

_GPU_BYTES, _CPU_BYTES = 2**31, 2**26
_GPU_SIDE, _CPU_SIDE = 8192, 1024
_CPU_SECONDS = 1.0


@dataclass(frozen=True)
class Roofline:
    bytes_per_second: float
    """Of a read-only pass over a large array."""
    flops: dict[str, float]
    """Operations a second by the type of the operands: ``bf16``, ``fp8`` if the GPU has it, ``fp32`` on a
    CPU, on which it may be faster than ``bf16``."""

    def compute_least_seconds(self, bytes_moved: int, flops: int, operands: str) -> float:
        """Return the least time that both the memory and the arithmetic allow."""
        peak = max(self.flops.get(operands, self.flops["bf16"]), self.flops.get("fp32", 0.0))
        return max(bytes_moved / self.bytes_per_second, flops / peak)


def measure_roofline(device: str) -> Roofline:
    """Measure `device`: a second on a GPU, some seconds on a CPU, on which bfloat16 may be slow."""
    gpu = device.startswith("cuda")
    bandwidth = _measure_bandwidth(device, gpu)
    side = _GPU_SIDE if gpu else _CPU_SIDE
    operations = 2 * side**3
    wide = torch.randn(side, side, device=device)  # [side, side] float32
    a = wide.bfloat16()  # [side, side]
    flops = {"bf16": operations / _time_fastest(lambda: a @ a, gpu)}
    if not gpu:  # backends that run here may compute in float32, as the reference does
        flops["fp32"] = operations / _time_fastest(lambda: wide @ wide, gpu)
    if gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        b = a.to(torch.float8_e4m3fn)  # [side, side]
        scale = torch.ones((), device=device)
        flops["fp8"] = operations / _time_fastest(
            lambda: torch._scaled_mm(b, b.T, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16), gpu
        )
    return Roofline(bandwidth, flops)


def measure_host_memory() -> float:
    """Measure the bytes a second of a read-only pass by all cores over more than any cache holds."""
    return _measure_bandwidth("cpu", gpu=False, nbytes=_GPU_BYTES)


def _measure_bandwidth(device: str, gpu: bool, nbytes: int | None = None) -> float:
    data = torch.ones((nbytes or (_GPU_BYTES if gpu else _CPU_BYTES)) // 4, device=device)  # float32
    return data.numel() * 4 / _time_fastest(data.sum, gpu)


def _time_fastest(call: Callable[[], object], gpu: bool) -> float:
    """Return the fastest of several calls, as a limit is reached once; on a CPU, of a second of calls."""
    if gpu:
        return time_graph(call, launches=5, replays=10).p20 * 1e-6
    times: list[float] = []
    while not times or sum(times) < _CPU_SECONDS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
