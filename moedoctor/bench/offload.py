"""Speed of weight offload: MoE layers whose experts are on the host, ours and vLLM's ways in turn.

`COMPARISONS` lists what is measured, by the key of the claim that it decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moedoctor.bench.timing import Spread, compare_rounds
from moedoctor.fixes.offload.pinned import allocate, device_view, register
from moedoctor.fixes.offloader import offload
from moedoctor.reference import offload_paths

NAMES = ("experts.w13_weight", "experts.w2_weight")
"""The parameters that go to the host."""


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

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        tokens, top_k = topk_ids.shape
        experts = self.w13_weight.shape[0]
        flat = topk_ids.flatten()  # [T*K]
        order = flat.argsort(stable=True)  # [T*K]
        every = torch.arange(experts, device=x.device)  # [E]
        ends = torch.searchsorted(flat[order], every, right=True).to(torch.int32)  # [E]
        rows = x[order // top_k]  # [T*K, H]
        gate, up = nn.functional.grouped_mm(rows, self.w13_weight.transpose(1, 2), offs=ends).chunk(2, dim=1)
        hidden = nn.functional.silu(gate) * up  # [T*K, I]
        out = nn.functional.grouped_mm(hidden, self.w2_weight.transpose(1, 2), offs=ends)  # [T*K, H]
        # Back by gathering: a sum by atomics would not come out the same twice.
        back = torch.empty_like(out).index_copy_(0, order, out).view(tokens, top_k, -1)  # [T, K, H]
        return (back * topk_weights[:, :, None].to(back.dtype)).sum(1)  # [T, H]


class MoeLayer(nn.Module):
    """A router that stays on the device, and experts, with a residual connection."""

    def __init__(self, shape: StackShape, device: str) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.gate = nn.Parameter(torch.empty(shape.hidden, shape.experts, dtype=shape.dtype, device=device))
        self.experts = Experts(shape, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ self.gate).float().softmax(dim=1)  # [T, E]
        topk_weights, topk_ids = scores.topk(self.top_k, dim=1)  # [T, K]
        normed = nn.functional.rms_norm(x, x.shape[1:])  # [T, H]
        mixed: torch.Tensor = self.experts(normed, topk_ids, topk_weights)  # [T, H]
        return x + mixed


def make_stack(shape: StackShape, device: str, seed: int = 0) -> nn.Sequential:
    """Return the stack on `device`, with the same weights for the same seed."""
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
    whose: str
    """Whose code: a vLLM release, or our restatement."""
    stack: nn.Module
    keep: Any = None
    """What must live as long as the stack."""


def make_runner(name: str, shape: StackShape, device: str) -> Runner:
    """Return ``ours`` or ``ours_unpinned``, ``ours_budget_0``, ``resident``, ``uva``, ``prefetch``,
    ``functional_call`` or ``functional_call_pinned``.

    vLLM's own classes if they can be imported, else the restatement in `moedoctor.reference.offload_paths`.
    Raises KeyError for another name.
    """
    from moedoctor.upstream.releases import offload_peers

    stack = make_stack(shape, device)
    layers, total = list(stack), shape.layers * shape.layer_bytes
    release = offload_peers.version() if name in ("uva", "prefetch") else None  # it imports vLLM
    keep: Any = None
    whose = f"vLLM {release}" if release else "restated"
    if name == "resident":
        whose = "the module itself"
    elif name in ("ours", "ours_unpinned"):
        whose, keep = "moedoctor", offload(stack, total, patterns=("experts",), pin=name == "ours")
    elif name == "ours_budget_0":
        # No layer fits into a byte: what `offload` leaves behind if it has nothing to do.
        whose, keep = "moedoctor", offload(stack, 1)
    elif name == "uva" and release:
        keep = offload_peers.uva_offload(layers, NAMES, total)
    elif name == "uva":
        offload_paths.uva_offload(layers, NAMES, device_view)
    elif name == "prefetch" and release:
        keep = offload_peers.prefetch_offload(layers, NAMES)
    elif name == "prefetch":
        keep = offload_paths.PrefetchOffload(layers, NAMES)
    elif name in ("functional_call", "functional_call_pinned"):
        # Always as restated: it is the control of the scenarios, and needs nothing but torch.
        offload_paths.functional_call_offload(layers, NAMES, pin=name.endswith("pinned"))
    else:
        raise KeyError(name)
    return Runner(name, whose, stack, keep)


def pinned_bandwidth(nbytes: int, device: str, rounds: int = 10) -> Spread:
    """Return the GB/s of one large copy from page-locked memory, taken alone."""
    block, failure = allocate(nbytes, register)
    if failure is not None:
        raise RuntimeError(failure)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target.copy_(block.bytes)
    times = [_timed(lambda: target.copy_(block.bytes, non_blocking=True)) for _ in range(rounds)]
    block.close()
    return Spread.of([nbytes / milliseconds / 1e6 for milliseconds in times])


def _timed(call: Callable[[], object]) -> float:
    """Milliseconds between two events around `call`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def passes(stack: nn.Module, x: torch.Tensor, count: int) -> Callable[[], float]:
    """Return a measurement: milliseconds a pass, over `count` passes in a row.

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
    names: tuple[str, ...],
    device: str,
    *,
    tokens: int,
    count: int,
    rounds: int,
    shape: StackShape | None = None,
) -> dict[str, Any]:
    """Time the first of `names` and its peers in turn; a wrong result is not timed."""
    shape = shape or StackShape()
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(tokens, shape.hidden, device=device, dtype=shape.dtype, generator=generator)  # [T, H]
    expected = make_runner("resident", shape, device).stack(x)  # [T, H]
    runners = [make_runner(name, shape, device) for name in names]
    right = {}
    for runner in runners:
        outputs = [runner.stack(x) for _ in range(2)]  # a stale buffer may show in the second pass only
        right[runner.name] = all(torch.equal(output, expected) for output in outputs)
    measured: Mapping[str, Callable[[], float]] = {
        runner.name: passes(runner.stack, x, count) for runner in runners if right[runner.name]
    }
    total = shape.layers * shape.layer_bytes
    figures: dict[str, Any] = {
        "layers": shape.layers,
        "bytes_a_pass": total,
        "tokens": tokens,
        "right": right,
        "whose": {runner.name: runner.whose for runner in runners},
    }
    if names[0] in measured:
        torch.cuda.synchronize()
        result = compare_rounds(measured, baseline=names[0], rounds=rounds)
        figures["rows"] = [
            {
                "way": name,
                "ms": dataclasses.asdict(spread),
                "gb_per_s": total / spread.median / 1e6,
                "over_ours": dataclasses.asdict(result.ratios[name]) if name in result.ratios else None,
            }
            for name, spread in result.times.items()
        ]
    return figures


TOKENS = 2048
"""Enough that every expert of every layer is used."""
COMPARISONS: Mapping[str, tuple[tuple[str, ...], int, int, int]] = {
    "bandwidth": (("ours",), TOKENS, 5, 5),
    "against_functional_call": (
        ("ours", "ours_unpinned", "functional_call", "functional_call_pinned"),
        TOKENS,
        2,
        5,
    ),
    "against_uva": (("ours", "uva"), TOKENS, 3, 5),
    "one_token": (("ours", "uva"), 1, 3, 5),
    "against_prefetch": (("ours", "prefetch"), TOKENS, 3, 11),
    "resident": (("resident", "ours_budget_0"), TOKENS, 20, 31),
}
"""Key of the claim -> (ways, tokens, passes of a measurement, rounds). For one token a layer uses 8 of 128
experts. The claim on the bandwidth also needs that of a pinned copy of one layer's size."""


def measure(key: str, device: str) -> dict[str, Any]:
    """Return the figures for the claim `key` of MD005."""
    names, tokens, count, rounds = COMPARISONS[key]
    alone = pinned_bandwidth(StackShape().layer_bytes, device) if key == "bandwidth" else None
    figures = compare(names, device, tokens=tokens, count=count, rounds=rounds)
    return {**figures, **({"pinned_gb_per_s": dataclasses.asdict(alone)} if alone else {})}
