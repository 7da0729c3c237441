"""What runs in the child for MD005: a stack of MoE layers, offloaded the one way or the other, compiled."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call

from moedoctor.bench.offload import NAMES, StackShape, make_stack
from moedoctor.fixes.offloader import offload
from moedoctor.reference.offload_paths import functional_call_offload
from moedoctor.results import Observation, UnavailableError
from moedoctor.upstream.releases.release_source import ReleaseSource

if TYPE_CHECKING:
    from moedoctor.faults.offload.untraceable_offload import UntraceableOffloadParameters

Apply = Callable[[nn.Sequential], Any]
FILE = "vllm/model_executor/offloader/uva.py"


def faulty(stack: nn.Sequential) -> Any:
    """vLLM's path without UVA and without pinned memory."""
    functional_call_offload(list(stack), NAMES, pin=False)


def fixed(stack: nn.Sequential) -> Any:
    """Ours; what it returns must live as long as the stack."""
    return offload(stack, 1 << 40, patterns=("experts",), keep_below=0)


def upstream(source: ReleaseSource) -> Apply:
    """A release's own `UVAOffloader._maybe_offload_to_cpu`, without UVA and without pinned memory.

    It leaves a module on the CPU alone, so here no device counts as the CPU; releases from 0.29.0 on ask each
    parameter as well, so they need a GPU. Raises SourceError.
    """
    names = {
        "torch": types.SimpleNamespace(device=lambda kind: None),
        "functional_call": functional_call,
        "nullcontext": contextlib.nullcontext,
        "gpu_sync_allowed": contextlib.nullcontext,
    }
    method = source.function(FILE, "UVAOffloader._maybe_offload_to_cpu", names)

    def apply(stack: nn.Sequential) -> None:
        offloader = types.SimpleNamespace(
            cpu_offload_bytes=0,
            cpu_offload_max_bytes=1 << 40,
            cpu_offload_params=set(NAMES),
            pin_memory=False,
            uva_offloading=False,
        )
        for layer in stack:
            method(offloader, layer)
        if not offloader.cpu_offload_bytes:
            raise UnavailableError("this release offloads from a GPU alone")

    return apply


@torch.no_grad()
def observe(
    parameters: UntraceableOffloadParameters, device: str, apply: Apply | ReleaseSource
) -> Observation:
    """Compile the stack without and with offload, as one graph, and compare what comes out."""
    shape = StackShape(
        layers=parameters.layers,
        experts=parameters.experts,
        hidden=parameters.hidden,
        intermediate=parameters.intermediate,
        top_k=2,
    )
    generator = torch.Generator(device).manual_seed(parameters.seed)
    x = torch.randn(16, shape.hidden, device=device, dtype=shape.dtype, generator=generator)  # [T, H]
    plain = make_stack(shape, device, parameters.seed)
    expected = torch.compile(plain, fullgraph=True, backend=parameters.compiler)(x)  # [T, H]
    torch._dynamo.reset()
    stack = make_stack(shape, device, parameters.seed)
    keep = (upstream(apply) if isinstance(apply, ReleaseSource) else apply)(stack)
    seen: dict[str, Any] = {"torch": torch.__version__, "error": None, "telling_line": None, "graphs": 0}
    compiled = torch.compile(stack, fullgraph=True, backend=parameters.compiler)
    try:
        results = [compiled(x) for _ in range(3)]  # weights that come a pass late show in the later ones
    except torch._dynamo.exc.Unsupported as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        telling = next((line for line in lines if line.startswith("Explanation:")), lines[0])
        return Observation(
            {**seen, "error": "\n".join(lines[:8]), "telling_line": telling.removeprefix("Explanation: ")}
        )
    same = all(torch.equal(one, expected) for one in results)
    offloaded = keep.report().host_bytes if keep is not None else shape.layers * shape.layer_bytes
    # fullgraph=True raises at the first break, so what ran was one graph.
    numbers = {
        "same_bits": same,
        "distance": distance(results, expected),
        **allowance(shape, device, parameters.seed, x, parameters.compiler),
    }
    return Observation({**seen, "graphs": 1, **numbers, "host_bytes": offloaded})


def distance(results: Sequence[torch.Tensor], expected: torch.Tensor) -> float:
    """The largest norm of what `results` [T, H] differ by from `expected` [T, H]; NaN where one holds NaN."""
    apart = [(one.double() - expected.double()).norm() for one in results]
    return float(torch.stack(apart).max())  # torch's max keeps NaN


def allowance(shape: StackShape, device: str, seed: int, x: torch.Tensor, compiler: str) -> dict[str, float]:
    """How far results would be apart with wrong weights, and how far they may be, as norms.

    Operators around a layer part what a compiler else computes at once, so it may round in another place.
    The control is a stack in which one layer has the next one's experts, the layer that shows it least; a
    tenth of that may be rounding. With ``eager`` nothing is compiled, and bits must be equal.
    """
    right = make_stack(shape, device, seed)(x)  # [T, H]
    wrong = []
    for number in range(shape.layers):
        stack = make_stack(shape, device, seed)
        stack[number].experts = stack[(number + 1) % shape.layers].experts
        wrong.append(distance([stack(x)], right))
    return {
        "wrong_weights_distance": min(wrong),
        "allowed_distance": 0.0 if compiler == "eager" else min(wrong) / 10,
    }
