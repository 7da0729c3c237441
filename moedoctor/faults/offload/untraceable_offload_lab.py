"""The child process for MD005: a stack of MoE layers, offloaded in one way or another, then compiled."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.func import functional_call

from moedoctor.faults.offload.moe_stack import NAMES, make_stack
from moedoctor.faults.offload.untraceable_offload import UntraceableOffloadParameters
from moedoctor.fixes.offloader import offload
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.offload_paths import offload_by_functional_call
from moedoctor.results import Case, Evidence, UnavailableError
from moedoctor.upstream.engine import offload_table
from moedoctor.upstream.engine.offload_table import COPIES, ON_GPU
from moedoctor.upstream.releases.release_source import ReleaseSource

Apply = Callable[[nn.Sequential], Any]
"""Offloads a stack; returns what must live as long as the stack, or None."""
FILE = "vllm/model_executor/offloader/uva.py"


def model(case: Case, parameters: UntraceableOffloadParameters, release: None) -> Evidence:
    """vLLM's path without UVA and without pinned memory, restated, or our offloader."""
    return observe(parameters, case.device, fixed if case.subject == "fixed" else faulty)


def library(case: Case, parameters: UntraceableOffloadParameters, release: ReleaseSource | None) -> Evidence:
    """The own code of the installed vLLM or of a named release. Raises SourceError, UnavailableError."""
    return observe(parameters, case.device, load_upstream(release or ReleaseSource.installed()))


def engine(case: Case, parameters: UntraceableOffloadParameters, release: None) -> Evidence:
    """Compiled engines: without offload, and with offload and without UVA."""
    fixed = case.subject == "fixed"
    return offload_table.measure(("BF16 TRITON",), str(parameters.engine), (ON_GPU, COPIES), fixed=fixed)


def faulty(stack: nn.Sequential) -> None:
    """vLLM's path without UVA and without pinned memory."""
    offload_by_functional_call(list(stack), NAMES)


def fixed(stack: nn.Sequential) -> Any:
    return offload(stack, 1 << 40, patterns=("experts",), keep_below=0)


def load_upstream(source: ReleaseSource) -> Apply:
    """A release's own `UVAOffloader._maybe_offload_to_cpu`, without UVA and without pinned memory.

    It does nothing to a module on the CPU, so here no device equals the CPU. Releases from 0.29.0 on also
    skip each parameter on the CPU, so here parameters say that they are on a GPU while the method decides.
    The forward that it makes, which is compiled, is the release's own. Raises SourceError.
    """
    names = {
        "torch": types.SimpleNamespace(device=lambda kind: None),
        "functional_call": functional_call,
        "nullcontext": contextlib.nullcontext,
        "gpu_sync_allowed": contextlib.nullcontext,
    }
    method = source.load_function(FILE, "UVAOffloader._maybe_offload_to_cpu", names)

    def apply(stack: nn.Sequential) -> None:
        offloader = types.SimpleNamespace(
            cpu_offload_bytes=0,
            cpu_offload_max_bytes=1 << 40,
            cpu_offload_params=set(NAMES),
            pin_memory=False,
            uva_offloading=False,
        )
        for layer in stack:
            with pretend_on_gpu(layer):
                method(offloader, layer)
        if not offloader.cpu_offload_bytes:
            raise UnavailableError("this release offloads none of the experts' weights here")

    return apply


GpuParameter = type("GpuParameter", (nn.Parameter,), {"device": types.SimpleNamespace(type="cuda")})
"""A parameter that says it is on a GPU."""


@contextlib.contextmanager
def pretend_on_gpu(layer: nn.Module) -> Iterator[None]:
    """While this is open, each parameter that `layer.named_parameters()` gives says it is on a GPU.

    It says so only until the loop takes the next one. It stays the same object, so whatever a method keeps
    of it for its forward is the true parameter.
    """
    parameters = list(layer.parameters())

    def yield_parameters() -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in nn.Module.named_parameters(layer):
            true_class = parameter.__class__
            parameter.__class__ = GpuParameter
            try:
                yield name, parameter
            finally:
                parameter.__class__ = true_class

    # parameters() calls named_parameters(). The method copies to the device of the first, which must exist.
    with patch.multiple(layer, parameters=lambda: iter(parameters), named_parameters=yield_parameters):
        yield


@torch.no_grad()
def observe(parameters: UntraceableOffloadParameters, device: str, apply: Apply) -> Evidence:
    """Compile the stack without and with offload, as one graph, and compare the outputs."""
    if device == "cpu" and parameters.compiler == "inductor":
        from torch._inductor import config

        config.cpp.vec_isa_ok = False  # or g++ compiles nine programs to learn which instructions it may use
    shape = LayerShape(**parameters.model_dump(include={"hidden", "intermediate", "experts"}), top_k=2)
    make = partial(make_stack, shape, parameters.layers, device, parameters.seed)
    generator = torch.Generator(device).manual_seed(parameters.seed)
    x = torch.randn(16, shape.hidden, device=device, dtype=torch.bfloat16, generator=generator)  # [T, H]
    expected = torch.compile(make(), fullgraph=True, backend=parameters.compiler)(x)  # [T, H]
    torch._dynamo.reset()
    stack = make()
    keep = apply(stack)
    all_bytes = parameters.layers * shape.count_weight_bytes(shape.experts, 16)
    evidence: dict[str, Any] = {"torch": torch.__version__, "error": None, "telling_line": None, "graphs": 0}
    compiled = torch.compile(stack, fullgraph=True, backend=parameters.compiler)
    try:
        outputs = [compiled(x) for _ in range(3)]  # weights that come a pass late show in the later ones
    except torch._dynamo.exc.Unsupported as error:
        message, _, _ = str(error).partition("from user code:")  # what follows are places on this machine
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        telling = next((line for line in lines if line.startswith("Explanation:")), lines[0])
        telling = telling.removeprefix("Explanation: ")
        return {**evidence, "error": "\n".join(lines[:8]), "telling_line": telling}
    return {
        **evidence,
        "graphs": 1,  # fullgraph=True raises at the first break, so it was one graph
        "same_bits": all(torch.equal(output, expected) for output in outputs),
        "distance": measure_distance(outputs, expected),
        **measure_allowance(make, x, parameters.compiler),
        "host_bytes": keep.report().host_bytes if keep is not None else all_bytes,
    }


def measure_distance(outputs: Sequence[torch.Tensor], expected: torch.Tensor) -> float:
    """The largest norm of the difference of an output [T, H] from `expected` [T, H]; NaN if one holds NaN."""
    norms = [(output.double() - expected.double()).norm() for output in outputs]
    return float(torch.stack(norms).max())  # torch's max keeps NaN


def measure_allowance(make: Callable[[], nn.Sequential], x: torch.Tensor, compiler: str) -> dict[str, float]:
    """Measure how large the difference would be with wrong weights, and how large it may be, as norms.

    `make` returns the stack, `x` [T, H] is its input.

    Operators around a layer split what a compiler otherwise fuses, so it may round in another place. The
    control is a stack in which one layer has the next one's experts, the layer that shows it least; a tenth
    of that may be rounding. With ``eager`` nothing is compiled, and bits must be equal.
    """
    right, wrong = make(), []
    for number in range(len(right)):
        stack = make()
        stack[number].experts = stack[(number + 1) % len(stack)].experts
        wrong.append(measure_distance([stack(x)], right(x)))
    return {
        "wrong_weights_distance": min(wrong),
        "allowed_distance": 0.0 if compiler == "eager" else min(wrong) / 10,
    }
