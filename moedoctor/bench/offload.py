"""Speed of weight offload: MoE layers whose experts are on the host, ours and vLLM's ways in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moedoctor.bench.timing import Comparison, Spread, compare_rounds
from moedoctor.fixes.offloader import Offload, offload
from moedoctor.reference import offload_paths

NAMES = ("experts.w13_weight", "experts.w2_weight")
"""What goes to the host."""


@dataclass(frozen=True)
class StackShape:
    """The stack, by default eight layers of Qwen3-30B-A3B: 1.2 GB of experts each in BF16."""

    layers: int = 8
    experts: int = 128
    hidden: int = 2048
    intermediate: int = 768
    top_k: int = 8
    dtype: torch.dtype = torch.bfloat16

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's experts."""
        return 3 * self.experts * self.hidden * self.intermediate * self.dtype.itemsize


class Experts(nn.Module):
    """SwiGLU experts run as two grouped products."""

    def __init__(self, shape: StackShape, device: str) -> None:
        super().__init__()
        size13 = (shape.experts, 2 * shape.intermediate, shape.hidden)
        size2 = (shape.experts, shape.hidden, shape.intermediate)
        self.w13_weight = nn.Parameter(torch.empty(size13, dtype=shape.dtype, device=device))  # [E, 2I, H]
        self.w2_weight = nn.Parameter(torch.empty(size2, dtype=shape.dtype, device=device))  # [E, H, I]

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, top_k = ids.shape
        experts = self.w13_weight.shape[0]
        flat = ids.flatten()  # [T*K]
        order = flat.argsort(stable=True)  # [T*K]
        every = torch.arange(experts, device=x.device)  # [E]
        ends = torch.searchsorted(flat[order], every, right=True).to(torch.int32)  # [E]
        rows = x[order // top_k]  # [T*K, H]
        gate, up = nn.functional.grouped_mm(rows, self.w13_weight.transpose(1, 2), offs=ends).chunk(2, dim=1)
        hidden = nn.functional.silu(gate) * up  # [T*K, I]
        out = nn.functional.grouped_mm(hidden, self.w2_weight.transpose(1, 2), offs=ends)  # [T*K, H]
        # Back by gathering: a sum by atomics would not come out the same twice.
        back = torch.empty_like(out).index_copy_(0, order, out).view(tokens, top_k, -1)  # [T, K, H]
        return (back * weights[:, :, None].to(back.dtype)).sum(1)  # [T, H]


class MoeLayer(nn.Module):
    """A router that stays on the device, and experts, with a residual connection."""

    def __init__(self, shape: StackShape, device: str) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.gate = nn.Parameter(torch.empty(shape.hidden, shape.experts, dtype=shape.dtype, device=device))
        self.experts = Experts(shape, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ self.gate).float().softmax(dim=1)  # [T, E]
        weights, ids = scores.topk(self.top_k, dim=1)  # [T, K]
        normed = nn.functional.rms_norm(x, x.shape[1:])  # [T, H]
        mixed: torch.Tensor = self.experts(normed, ids, weights)  # [T, H]
        return x + mixed


def make_stack(shape: StackShape, device: str, seed: int = 0) -> nn.Sequential:
    """The same weights for the same seed, on `device`."""
    stack = nn.Sequential(*(MoeLayer(shape, device) for _ in range(shape.layers)))
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.normal_(std=0.02, generator=generator)
    return stack.requires_grad_(False)


@dataclass(frozen=True)
class Runner:
    """One way to run the stack."""

    name: str
    what: str
    """Whose code: a vLLM release, or our restatement."""
    stack: nn.Module
    keep: Any = None
    """What must live as long as the stack."""


def make_runner(name: str, shape: StackShape, device: str) -> Runner:
    """``ours`` or ``ours_unpinned``, ``ours_budget_0``, ``resident``, ``uva``, ``prefetch``,
    ``functional_call`` or ``functional_call_pinned``.

    vLLM's own classes where they can be imported, else what `moedoctor.reference.offload_paths` restates.
    """
    from moedoctor.upstream.releases import offload_peers

    stack = make_stack(shape, device)
    if name == "resident":
        return Runner(name, "the module itself", stack)
    if name in ("ours", "ours_unpinned"):
        return Runner(name, "moedoctor", stack, _offloaded(stack, shape, pin=name == "ours"))
    if name == "ours_budget_0":
        # No layer fits into a byte: what `offload` leaves behind where it has nothing to do.
        return Runner(name, "moedoctor", stack, offload(stack, 1))
    layers, total = list(stack), shape.layers * shape.layer_bytes
    release = offload_peers.version()
    what = f"vLLM {release}" if release else "restated"
    keep: Any = None
    if name == "uva":
        if release:
            keep = offload_peers.uva_offload(layers, NAMES, total)
        else:
            offload_paths.uva_offload(layers, NAMES)
    elif name == "prefetch":
        keep = (
            offload_peers.prefetch_offload(layers, NAMES)
            if release
            else offload_paths.PrefetchOffload(layers, NAMES)
        )
    elif name in ("functional_call", "functional_call_pinned"):
        # Always as restated: it is the control of the scenarios, and needs nothing but torch.
        what = "restated"
        offload_paths.functional_call_offload(layers, NAMES, pin=name.endswith("pinned"))
    else:
        raise KeyError(name)
    return Runner(name, what, stack, keep)


def _offloaded(stack: nn.Module, shape: StackShape, *, pin: bool) -> Offload:
    return offload(stack, shape.layers * shape.layer_bytes, patterns=("experts",), pin=pin)


def pinned_bandwidth(nbytes: int, device: str, rounds: int = 10) -> Spread:
    """GB/s of one large copy from page-locked memory, taken alone."""
    from moedoctor.fixes.offload.pinned import allocate, register

    block, failure = allocate(nbytes, register)
    if failure is not None:
        raise RuntimeError(failure)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target.copy_(block.bytes)
    times = [_timed(lambda: target.copy_(block.bytes, non_blocking=True)) for _ in range(rounds)]
    block.close()
    return Spread.of([nbytes / one / 1e6 for one in times])


def _timed(call: Callable[[], object]) -> float:
    """Milliseconds between two events around `call`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def passes(stack: nn.Module, x: torch.Tensor, count: int) -> Callable[[], float]:
    """A measurement: milliseconds a pass, over `count` passes in a row.

    One more comes before them: what a pass prefetches for the next one must be paid for inside the clock.
    """

    def measure() -> float:
        stack(x)

        def run() -> None:
            for _ in range(count):
                stack(x)

        return _timed(run) / count

    return measure


@torch.no_grad()
def compare(
    names: tuple[str, ...], device: str, *, shape: StackShape, tokens: int, count: int, rounds: int
) -> dict[str, Any]:
    """Time the first of `names` and its peers in turn; a wrong result is not timed."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(tokens, shape.hidden, device=device, dtype=shape.dtype, generator=generator)  # [T, H]
    expected = make_runner("resident", shape, device).stack(x)  # [T, H]
    runners = [make_runner(name, shape, device) for name in names]
    right = {}
    for one in runners:
        got = [one.stack(x) for _ in range(2)]  # a stale buffer shows in the second pass, if not in the first
        right[one.name] = all(torch.equal(result, expected) for result in got)
    measured: Mapping[str, Callable[[], float]] = {
        one.name: passes(one.stack, x, count) for one in runners if right[one.name]
    }
    total = shape.layers * shape.layer_bytes
    seen: dict[str, Any] = {
        "layers": shape.layers,
        "bytes_a_pass": total,
        "tokens": tokens,
        "right": right,
        "whose": {one.name: one.what for one in runners},
    }
    if names[0] in measured:
        torch.cuda.synchronize()
        result: Comparison = compare_rounds(measured, baseline=names[0], rounds=rounds)
        seen["rows"] = [
            {
                "way": name,
                "ms": dataclasses.asdict(spread),
                "gb_per_s": total / spread.median / 1e6,
                "over_ours": dataclasses.asdict(result.ratios[name]) if name in result.ratios else None,
            }
            for name, spread in result.times.items()
        ]
    return seen


TOKENS = 2048
"""Enough that every expert of every layer is used."""


def bandwidth(device: str) -> dict[str, Any]:
    """Ours alone over a pass, and a pinned copy of one layer's size alone."""
    shape = StackShape()
    alone = pinned_bandwidth(shape.layer_bytes, device)
    seen = compare(("ours",), device, shape=shape, tokens=TOKENS, count=5, rounds=5)
    return {**seen, "pinned_gb_per_s": dataclasses.asdict(alone)}


def against_functional_call(device: str) -> dict[str, Any]:
    """Ours and the path without UVA, each from pinned and from pageable memory."""
    names = ("ours", "ours_unpinned", "functional_call", "functional_call_pinned")
    return compare(names, device, shape=StackShape(), tokens=TOKENS, count=2, rounds=5)


def against_uva(device: str) -> dict[str, Any]:
    """Ours and kernels that read pinned memory over the bus."""
    return compare(("ours", "uva"), device, shape=StackShape(), tokens=TOKENS, count=3, rounds=5)


def one_token(device: str) -> dict[str, Any]:
    """The same for one token, which uses eight of 128 experts a layer."""
    return compare(("ours", "uva"), device, shape=StackShape(), tokens=1, count=3, rounds=5)


def against_prefetch(device: str) -> dict[str, Any]:
    """Ours and vLLM's prefetch offloader, with as many buffers."""
    return compare(("ours", "prefetch"), device, shape=StackShape(), tokens=TOKENS, count=3, rounds=11)


def resident(device: str) -> dict[str, Any]:
    """The stack on the device, and the same after an offload that had nothing to do."""
    return compare(
        ("resident", "ours_budget_0"), device, shape=StackShape(), tokens=TOKENS, count=20, rounds=31
    )
