"""The child process for MD002: copies whose host memory is used again at once, and our offloader's.

The control makes one copy. The fix is the offloader's own code: weights go to the device through its
`Pipeline`, whose copies are a `CudaEngine`'s on a GPU and a simulated device's elsewhere, and the host is
written only when the pipeline has settled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, count, repeat
from typing import Any

import torch
from torch import nn

from moedoctor.faults.base import need_gpu
from moedoctor.faults.offload.late_device import LateDevice
from moedoctor.faults.offload.unpinned_copy import CELLS, PAGEABLE, UnpinnedCopyParameters
from moedoctor.fixes.offload.prefetch import CopyEngine, CudaEngine, Pipeline, Region, Unit
from moedoctor.fixes.offloader import offload
from moedoctor.results import Case, Evidence

_OLD, _NEW = 1, 2
"""Bytes that memory holds before and after it is used again."""
_LAYERS = (_OLD, 3)
"""Bytes of the two layers that take turns in the pipeline's one buffer."""
_PRODUCTS = 100
"""Matrix products of 4096³ that keep a queue busy: long enough even if other work delays the host."""

OneCopy = Callable[[str, int, bool, bool], bool]
"""(direction, bytes, pinned, busy) -> whether old or overwritten bytes came out."""


def model(case: Case, parameters: UnpinnedCopyParameters, release: None) -> Evidence:
    """Copies of a simulated device that is late."""
    ours = case.subject == "fixed"
    # The offloader fetches with blocking copies, and a simulated device would have to know that it must wait.
    through = {
        "h2d": "Pipeline, simulated engine",
        "d2h": "restated: an event of the simulated engine is waited for",
    }
    return _measure(parameters, _make_simulated_copy(ours), through[parameters.direction] if ours else None)


def kernel(case: Case, parameters: UnpinnedCopyParameters, release: None) -> Evidence:
    """Copies on a GPU."""
    need_gpu()
    ours = case.subject == "fixed"
    through = {"h2d": "Pipeline, CudaEngine", "d2h": "offload"}
    return _measure(
        parameters, _make_real_copy(case.device, ours), through[parameters.direction] if ours else None
    )


def _measure(parameters: UnpinnedCopyParameters, copy_once: OneCopy, through: str | None) -> Evidence:
    """The share of stale copies in each cell; `through`: the code of ours that copies."""
    evidence: dict[str, Any] = {"copies_a_cell": parameters.copies}
    if through is not None:
        evidence["through"] = through
    for cell in CELLS:
        memory, queue = cell.split("_")
        stale = sum(
            copy_once(parameters.direction, parameters.bytes, memory == "pinned", queue == "busy")
            for _ in range(parameters.copies)
        )
        evidence[cell] = stale / parameters.copies
    return evidence


def _make_simulated_copy(ours: bool) -> OneCopy:
    # A bare copy is as late as it may be. Ours must be right at any other time, too.
    seeds = chain([None], count()) if ours else repeat(None)

    def copy_once(direction: str, nbytes: int, pinned: bool, busy: bool) -> bool:
        device = LateDevice(next(seeds), pinned=pinned)
        work = torch.ones(8, 8)
        if busy:
            device.run(lambda: work @ work)
            device.fork()
        if direction == "h2d" and ours:
            hosts, buffer = [_fill(nbytes, value) for value in _LAYERS], _fill(nbytes, 0)
            return run_through_pipeline(device, hosts, pinned, buffer, device.run, device.synchronize)
        host = _fill(nbytes, _OLD)
        if direction == "h2d":
            target = _fill(nbytes, 0)
            device.copy(target, host)
            host.fill_(_NEW)
            device.synchronize()
            return bool((target != _OLD).any())
        device.fetch(host, _fill(nbytes, _NEW))
        if ours:
            device.wait(device.mark())
        return bool((host != _NEW).any())

    return copy_once


def _make_real_copy(device: str, ours: bool) -> OneCopy:
    work = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    engine = CudaEngine(torch.device(device)) if ours else None

    def copy_once(direction: str, nbytes: int, pinned: bool, busy: bool) -> bool:
        hosts = [_fill(nbytes, value, pin_memory=pinned) for value in (_LAYERS if ours else (_OLD,))]
        on_device = _fill(nbytes, 0, device=device)
        torch.cuda.synchronize()
        if busy:
            for _ in range(_PRODUCTS):
                work @ work
        if direction == "h2d" and engine is not None:
            synchronize = torch.cuda.synchronize
            return run_through_pipeline(
                engine, hosts, pinned, on_device, lambda kernel: kernel(), synchronize
            )
        host = hosts[0]
        if direction == "h2d":
            on_device.copy_(host, non_blocking=True)
            host.fill_(_NEW)
            torch.cuda.synchronize()
            return bool((on_device != _OLD).any())
        on_device.fill_(_NEW)
        if ours:
            return stores_stale((on_device, on_device.clone()), pinned)
        host.copy_(on_device, non_blocking=True)
        stale = bool((host != _NEW).any())
        torch.cuda.synchronize()  # before the memory is given back
        return stale

    return copy_once


def run_through_pipeline(
    engine: CopyEngine,
    hosts: Sequence[torch.Tensor],
    pinned: bool,
    buffer: torch.Tensor,
    run: Callable[[Callable[[], object]], object],
    synchronize: Callable[[], object],
) -> bool:
    """One pass over layers with the weights `hosts`, uint8 [n] each, that share `buffer`, uint8 [n].

    `run` gives a kernel to the current queue. A kernel of each layer reads the weights; after
    `Pipeline.settle` the host overwrites all with `_NEW`. Returns whether a kernel read other bytes than its
    layer's, or a copy that was in flight brought the new ones.
    """
    nbytes = buffer.numel()
    region = Region(0, nbytes, torch.uint8, (nbytes,), (1,))
    units = [Unit(f"layer {index}", host, pinned, 0, (region,)) for index, host in enumerate(hosts)]
    pipeline = Pipeline(units, [buffer], engine)
    expected = [host.clone() for host in hosts]  # [n] each
    outputs = [torch.zeros_like(buffer) for _ in hosts]  # [n] each
    pipeline.begin()
    for index, out in enumerate(outputs):
        pipeline.wait(index, [buffer])
        run(partial(out.copy_, buffer))
        pipeline.release(index)
    pipeline.finish()
    pipeline.settle()
    for host in hosts:
        host.fill_(_NEW)
    synchronize()
    right = all(torch.equal(out.cpu(), host) for out, host in zip(outputs, expected, strict=True))
    return not right or bool((buffer == _NEW).any())


class _Layer(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x ^ self.weight


def stores_stale(weights: Sequence[torch.Tensor], pinned: bool) -> bool:
    """Return True if the offloader took other bytes than `_NEW` to the host.

    `weights`: two uint8 [n] that queued work fills with `_NEW`.
    """
    # A vector would stay on the device, and so would the only layer.
    module = nn.Sequential(*(_Layer(weight[None]) for weight in weights))
    nbytes = sum(weight.numel() for weight in weights)
    handle = offload(module, nbytes, layers=list(module), pin=pinned, keep_below=0)
    stale = any(bool((handle.get_host_weight(f"{i}.weight") != _NEW).any()) for i in range(len(weights)))
    handle.restore()
    return stale


def _fill(nbytes: int, value: int, **options: Any) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, **options)  # [nbytes]


def measure_crash_3(unit: str, device: str, sources: Mapping[str, str]) -> Evidence:
    """The two measurements of the claim `measure_crash_3`."""
    return measure_pageable_weights(device) if unit == PAGEABLE else measure_host_address(device)


@torch.no_grad()
def measure_pageable_weights(device: str) -> dict[str, Any]:
    """Run layers through vLLM's path without UVA and without pinned memory, behind a full queue.

    By vLLM's own offloader if it can be imported, else by our restatement; ``whose`` names it.
    """
    from moedoctor.faults.offload.moe_stack import NAMES, make_stack
    from moedoctor.models.layer_shape import LayerShape
    from moedoctor.reference.offload_paths import offload_by_functional_call
    from moedoctor.upstream.releases import installed

    shape = LayerShape(hidden=1024, intermediate=512, experts=16, top_k=4)
    x = torch.randn(256, shape.hidden, device=device, dtype=torch.bfloat16)  # [T, H]
    stack = make_stack(shape, 4, device)
    expected = stack(x)  # [T, H]
    release = installed.find_offloader_version()
    if release:
        nbytes = len(stack) * shape.count_weight_bytes(shape.experts, 16)
        installed.offload_by_copies(list(stack), NAMES, nbytes)
    else:
        offload_by_functional_call(list(stack), NAMES)
    experts = [module for module in stack.modules() if hasattr(module, "w13_weight")]
    on_host = all(module.w13_weight.device.type == "cpu" for module in experts)
    work = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    wrong, passes = 0, 50
    for _ in range(passes):
        for _ in range(10):
            work @ work
        wrong += not torch.equal(stack(x), expected)
    whose = f"vLLM {release}" if release else "restated"
    return {"whose": whose, "weights_on_host": on_host, "passes": passes, "wrong_results": wrong}


def measure_host_address(device: str) -> dict[str, Any]:
    """Launch a kernel on the address of a CPU tensor, as a backend does that does not check."""
    from moedoctor.kernels.unchecked import read_address

    scales = torch.ones(1 << 20)
    out = read_address(scales.data_ptr(), scales.numel(), device)
    torch.cuda.synchronize()
    return {"returned": True, "sum": float(out.sum())}
