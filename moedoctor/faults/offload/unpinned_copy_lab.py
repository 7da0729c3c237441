"""What runs in the child for MD002: copies whose host memory is used again at once, and our offloader's.

The control asks for one copy. The fix is the offloader's own code: weights go to the device through its
`Pipeline`, whose copies are a `CudaEngine`'s on a GPU and a simulated device's elsewhere, and the host is
written only when the pipeline has settled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moedoctor.faults.offload.late_device import LateDevice
from moedoctor.fixes.offload.prefetch import CopyEngine, CudaEngine, Pipeline, Region, Unit
from moedoctor.fixes.offloader import offload
from moedoctor.results import Observation, Tier

if TYPE_CHECKING:
    from moedoctor.faults.offload.unpinned_copy import UnpinnedCopyParameters

_OLD, _NEW = 1, 2
"""Bytes that memory holds before and after it is used again."""
_LAYERS = (_OLD, 3)
"""Bytes of the two layers that take turns in the pipeline's one buffer."""
_PRODUCTS = 100
"""Matrix products of 4096³ that make a queue busy: long enough for a host that others keep waiting."""

OneCopy = Callable[[str, int, bool, bool], bool]
"""(direction, bytes, pinned, busy) -> whether old or overwritten bytes came out."""
Queue = Callable[[Callable[[], object]], object]
"""Gives a kernel to the current queue."""


def observe(parameters: UnpinnedCopyParameters, tier: Tier, device: str, *, ours: bool) -> Observation:
    """The share of stale copies in each cell; `ours`: by the offloader's code, else by a bare copy."""
    one_copy = _real(device, ours) if tier is Tier.KERNEL else _simulated(ours)
    seen: dict[str, Any] = {"copies_a_cell": parameters.copies}
    if ours:
        seen["through"] = _through(parameters.direction, tier)
    for memory in ("pinned", "pageable"):
        for queue in ("idle", "busy"):
            stale = sum(
                one_copy(parameters.direction, parameters.bytes, memory == "pinned", queue == "busy")
                for _ in range(parameters.copies)
            )
            seen[f"{memory}_{queue}"] = stale / parameters.copies
    return Observation(seen)


def _through(direction: str, tier: Tier) -> str:
    if direction == "h2d":
        return f"Pipeline, {'CudaEngine' if tier is Tier.KERNEL else 'simulated engine'}"
    # The offloader fetches with blocking copies, whose waiting a simulated device would have to be told.
    return "offload" if tier is Tier.KERNEL else "restated: an event of the simulated engine is waited for"


def _simulated(ours: bool) -> OneCopy:
    # A bare copy is as late as it may be. Ours must be right at any other time, too.
    seeds = chain([None], count()) if ours else repeat(None)

    def one(direction: str, nbytes: int, pinned: bool, busy: bool) -> bool:
        device = LateDevice(next(seeds), pinned=pinned)
        work = torch.ones(8, 8)
        if busy:
            device.run(lambda: work @ work)
            device.fork()
        if direction == "h2d" and ours:
            hosts, buffer = [_filled(nbytes, value) for value in _LAYERS], _filled(nbytes, 0)
            return through_pipeline(device, hosts, pinned, buffer, device.run, device.synchronize)
        if direction == "h2d":
            host, there = _filled(nbytes, _OLD), _filled(nbytes, 0)
            device.copy(there, host)
            host.fill_(_NEW)
            device.synchronize()
            return bool((there != _OLD).any())
        host, there = _filled(nbytes, _OLD), _filled(nbytes, _NEW)
        device.fetch(host, there)
        if ours:
            device.wait(device.mark())
        return bool((host != _NEW).any())

    return one


def _real(device: str, ours: bool) -> OneCopy:
    work = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    engine = CudaEngine(torch.device(device)) if ours else None

    def one(direction: str, nbytes: int, pinned: bool, busy: bool) -> bool:
        hosts = [_filled(nbytes, value, pin_memory=pinned) for value in (_LAYERS if ours else (_OLD,))]
        there = _filled(nbytes, 0, device=device)
        torch.cuda.synchronize()
        if busy:
            for _ in range(_PRODUCTS):
                work @ work
        if direction == "h2d" and engine is not None:
            run: Queue = lambda kernel: kernel()  # noqa: E731
            return through_pipeline(engine, hosts, pinned, there, run, torch.cuda.synchronize)
        host = hosts[0]
        if direction == "h2d":
            there.copy_(host, non_blocking=True)
            host.fill_(_NEW)
            torch.cuda.synchronize()
            return bool((there != _OLD).any())
        there.fill_(_NEW)
        if ours:
            return stored_stale((there, there.clone()), pinned)
        host.copy_(there, non_blocking=True)
        stale = bool((host != _NEW).any())
        torch.cuda.synchronize()  # before the memory is given back
        return stale

    return one


def through_pipeline(
    engine: CopyEngine,
    hosts: Sequence[torch.Tensor],
    pinned: bool,
    buffer: torch.Tensor,
    run: Queue,
    synchronize: Callable[[], object],
) -> bool:
    """One pass over layers with the weights `hosts`, uint8 [n] each, that share `buffer`, uint8 [n].

    A kernel of each layer reads them; after `Pipeline.settle` the host writes `_NEW` over all. Gives whether
    any kernel read other bytes than its layer's, or a copy that was in flight brought the new ones.
    """
    nbytes = buffer.numel()
    region = Region(0, nbytes, torch.uint8, (nbytes,), (1,))
    units = [Unit(f"layer {index}", host, pinned, 0, (region,)) for index, host in enumerate(hosts)]
    line = Pipeline(units, [buffer], engine)
    wanted = [host.clone() for host in hosts]  # [n] each
    read = [torch.zeros_like(buffer) for _ in hosts]  # [n] each
    line.begin()
    for index, out in enumerate(read):
        line.wait(index, [buffer])
        run(partial(out.copy_, buffer))
        line.release(index)
    line.finish()
    line.settle()
    for host in hosts:
        host.fill_(_NEW)
    synchronize()
    right = all(torch.equal(out.cpu(), host) for out, host in zip(read, wanted, strict=True))
    return not right or bool((buffer == _NEW).any())


class _Layer(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x ^ self.weight


def stored_stale(weights: Sequence[torch.Tensor], pinned: bool) -> bool:
    """Whether the offloader took other bytes to the host than `_NEW`, which `weights`, two of uint8 [n], get
    by what is queued."""
    # A vector would stay on the device, and so would the only layer.
    module = nn.Sequential(*(_Layer(one[None]) for one in weights))
    nbytes = sum(one.numel() for one in weights)
    handle = offload(module, nbytes, layers=list(module), pin=pinned, keep_below=0)
    stale = any(bool((handle.host_weight(f"{i}.weight") != _NEW).any()) for i in range(len(weights)))
    handle.restore()
    return stale


def _filled(nbytes: int, value: int, **where: Any) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, **where)  # [nbytes]
