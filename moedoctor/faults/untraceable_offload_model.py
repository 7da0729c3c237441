"""What runs in the child for MD005: a stack of MoE layers, offloaded the one way or the other, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moedoctor.bench.offload import NAMES, StackShape, make_stack
from moedoctor.fixes.offloader import offload
from moedoctor.reference.offload_paths import functional_call_offload
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.untraceable_offload import UntraceableOffloadParameters

Apply = Callable[[nn.Sequential], Any]


def faulty(stack: nn.Sequential) -> Any:
    """vLLM's path without UVA and without pinned memory."""
    functional_call_offload(list(stack), NAMES, pin=False)


def fixed(stack: nn.Sequential) -> Any:
    """Ours; what it returns must live as long as the stack."""
    return offload(stack, 1 << 40, patterns=("experts",), keep_below=0)


@torch.no_grad()
def observe(parameters: UntraceableOffloadParameters, device: str, apply: Apply) -> Observation:
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
    keep = apply(stack)
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
    return Observation({**seen, "graphs": 1, "same_bits": same, "host_bytes": offloaded})
