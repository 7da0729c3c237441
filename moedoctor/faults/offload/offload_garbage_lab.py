"""The child process for MD008: a device view of pinned memory that is given back too early, or is not.

The order of events is that of vllm#45528: a parameter is offloaded and becomes a device view of pinned
memory, the layer repacks its weights after loading and drops what it had, and the next pinned allocation, a
buffer of the batch, gets that memory.

The engine tier compares engines without offload and with it, on tiny checkpoints or the user's own model.
"""

from __future__ import annotations

import gc
import json
import types
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from moedoctor.faults.base import need_gpu
from moedoctor.faults.offload.offload_garbage import OffloadGarbageParameters
from moedoctor.fixes.offload.pinned import describe_bytes, view_on_device
from moedoctor.fixes.offload.views import fill_views, find_views
from moedoctor.processes.ask import find_working_folder
from moedoctor.results import Case, Evidence
from moedoctor.upstream.engine import offload_table
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult
from moedoctor.upstream.engine.experiment import Ran, Trial, run_trials, shorten_error
from moedoctor.upstream.engine.offload_table import BACKENDS, EAGER, ON_GPU, SEEN_IN, UNPINNED, UVA
from moedoctor.upstream.engine.probes import find_first_difference

_SECONDS = 1500.0
_LOGPROBS = 5
_PROMPT_CALLS = 16


def model(case: Case, parameters: OffloadGarbageParameters, release: None) -> Evidence:
    """A simulated pool of pinned memory, or a buffer that a module made of a weight."""
    if parameters.cause == "view":
        return observe_view(case, parameters)
    fixed = case.subject == "fixed"
    return observe(parameters, Pool().allocate, lambda block: block if fixed else block.view(-1))


def kernel(case: Case, parameters: OffloadGarbageParameters, release: None) -> Evidence:
    """torch's pinned memory and a GPU."""
    need_gpu()
    if parameters.cause == "view":
        return observe_view(case, parameters)

    def allocate(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)  # [n]

    def view(block: torch.Tensor) -> torch.Tensor:
        if case.subject == "fixed":
            return view_on_device(block, torch.device(case.device))
        # An address that does not keep its memory: a view with a deleter that does nothing.
        alias = types.SimpleNamespace(
            __cuda_array_interface__=describe_bytes(block.data_ptr(), block.numel())
        )
        return torch.as_tensor(alias, device=case.device)

    return observe(parameters, allocate, view)


def engine(case: Case, parameters: OffloadGarbageParameters, release: None) -> Evidence:
    """Engines of the installed vLLM. Raises UnavailableError if none can run."""
    assert parameters.mode is not None
    if parameters.model is None:
        fixed = parameters.fixes == "offload"
        return offload_table.measure(tuple(BACKENDS), parameters.mode, (ON_GPU, UVA), fixed=fixed)
    trials = [own_model_trial(parameters, offload=False), own_model_trial(parameters, offload=True)]
    _, with_offload = run_trials(trials, parallel=2 if fit_together(parameters) else 1)
    return compare(with_offload, parameters)


@torch.no_grad()
def observe_view(case: Case, parameters: OffloadGarbageParameters) -> Evidence:
    """Make a buffer of a weight as vLLM's `MambaMixer2` does, offload the weight, load it, read the buffer.

    vLLM's `UVAOffloader` gives a parameter other memory (``p.data = …``) when its layer was made, and the
    checkpoint is loaded into that memory.
    """
    generator = torch.Generator().manual_seed(parameters.seed)
    loaded = torch.randint(1, 120, (parameters.bytes // 4, 1, 4), dtype=torch.uint8, generator=generator)
    module: Any = torch.nn.Module()
    zeros = torch.zeros_like(loaded, device=case.device)
    weight = torch.nn.Parameter(zeros, requires_grad=False)  # [C, 1, 4]
    module.weight = weight
    module.register_buffer("conv_weights", weight.view(-1, 4), persistent=False)  # [C, 4]
    views = find_views(module)
    weight.data = weight.data.to("cpu", copy=True)
    weight.data.copy_(loaded)
    if case.subject == "fixed":
        fill_views(views)
    changed = module.conv_weights.cpu() != loaded[:, 0]  # [C, 4]
    return {
        "weights_changed": float(changed.double().mean()),
        "weight_loaded": bool((weight == loaded).all()),
    }


@torch.no_grad()
def observe(
    parameters: OffloadGarbageParameters,
    allocate: Callable[[int], torch.Tensor],
    view: Callable[[torch.Tensor], torch.Tensor],
) -> Evidence:
    """Offload a weight, drop its host tensor, fill a new buffer of the same size, and use the weight.

    `allocate` returns a block of pinned memory, uint8 [n]; `view` returns what the device sees of a block.
    """
    generator = torch.Generator().manual_seed(parameters.seed)
    weight = torch.randint(0, 120, (parameters.bytes,), dtype=torch.uint8, generator=generator)  # [n]
    x = torch.rand(parameters.bytes, dtype=torch.float64, generator=generator)  # [n]
    expected = weight.double() @ x
    block = allocate(parameters.bytes)
    block.copy_(weight)
    first = block.data_ptr()
    on_device = view(block)  # [n]
    before = bool((on_device.clone().cpu() == weight).all())
    del block
    gc.collect()
    later = allocate(parameters.bytes)
    later.fill_(255)
    after = on_device.clone().cpu()  # [n]; the kernel of clone reads over the bus
    return {
        "right_before": before,
        "memory_was_reused": later.data_ptr() == first,
        "weights_changed": float((after != weight).double().mean()),
        "same_bits": bool(after.double() @ x == expected),
        "error": None,
    }


class Pool:
    """A simulated pool of pinned memory: it gives out again the block that came back last, as torch's does.

    All blocks have the same size.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = self._free.pop() if self._free else torch.empty(nbytes, dtype=torch.uint8)  # [n]
        block = memory.view(-1)  # [n]; views of it do not keep this object, only `memory`
        weakref.finalize(block, self._free.append, memory)
        return block


def fit_together(parameters: OffloadGarbageParameters) -> bool:
    """Return True if the arguments let two engines fit beside each other.

    Without a size for the KV cache an engine measures free memory, which the other would disturb.
    """
    arguments: dict[str, Any] = json.loads(parameters.arguments)
    return arguments.get("gpu_memory_utilization", 1.0) <= 0.45 and "kv_cache_memory_bytes" in arguments


def own_model_trial(parameters: OffloadGarbageParameters, *, offload: bool) -> Trial:
    """An engine for the user's own model, with its own settings: nothing of the tiny ones stays."""
    assert parameters.model is not None
    eager = parameters.mode == EAGER
    arguments: dict[str, Any] = {
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.9,
        "attention_backend": None,
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "enforce_eager": eager,
        "moe_backend": None if parameters.moe_backend == "auto" else parameters.moe_backend,
        **json.loads(parameters.arguments),
    }
    if offload:
        arguments["cpu_offload_gb"] = parameters.cpu_offload_gb
    environ = {
        "MOEDOCTOR_FIXES": "" if parameters.fixes == "none" else parameters.fixes,
        "HF_HUB_OFFLINE": "0" if parameters.online else "1",
        **(UNPINNED if parameters.access == "copies" else {}),
    }
    folder = Path(find_working_folder(), parameters.model)
    request = EngineRequest(
        # Cases and engines run in folders of their own.
        str(folder.resolve()) if folder.is_dir() else parameters.model,
        (parameters.prompt,),
        arguments,
        environ,
        max_tokens=parameters.max_tokens,
        logprobs=_LOGPROBS,
        probe=SEEN_IN,
        probe_when="before",
        # A call for each token, and those of a long prompt; compiled code does not call the hooks.
        probe_options={"calls": parameters.max_tokens + _PROMPT_CALLS if eager else 0},
        seconds=_SECONDS,
        label=f"{parameters.model} {'with' if offload else 'without'} offload",
    )
    return Trial(request, control=f"{parameters.model} without offload" if offload else None)


def compare(ran: Ran, parameters: OffloadGarbageParameters) -> Mapping[str, Any]:
    """Return both answers, and the first layer whose output differs. `ran`: the engine with offload."""
    other, control = ran.result, ran.control
    assert control is not None
    equal = _count_equal_tokens(control, other)
    ran_both = control.error is None and other.error is None
    probe = other.probe or {}
    return {
        "vllm": other.version or control.version,
        "backend": other.log.moe_backend,
        "fixes_asked": parameters.fixes,
        "fixes": other.fixes,
        "offloader": other.log.offloader,
        "offloaded_gib": other.log.offloaded,
        "parameter_bytes": probe.get("parameter_bytes"),
        "host_bytes": probe.get("host_bytes"),
        "expected": parameters.expected,
        "control_text": control.texts[0] if control.error is None else None,
        "control_error": None if control.error is None else shorten_error(control.error),
        "offload_text": other.texts[0] if other.error is None else None,
        "offload_error": None if other.error is None else shorten_error(other.error),
        "not_looked_into": other.error is not None and other.error.stage == "probe",
        "same_tokens": ran_both and control.tokens == other.tokens,
        "tokens_alike": equal,
        "lead": None if equal is None else _compute_lead(control, other, equal),
        "control_layers": [row for row in (control.probe or {}).get("outputs", ()) if row["call"] == 1],
        "seconds": {"control": control.seconds.get("total"), "offload": other.seconds.get("total")},
        **find_first_difference(control.probe, other.probe, equal),
    }


def _count_equal_tokens(control: EngineResult, other: EngineResult) -> int | None:
    """Count the equal tokens before the answers differ; None if they do not, or one is missing."""
    if control.error is not None or other.error is not None or control.tokens == other.tokens:
        return None
    pairs = list(zip(other.tokens[0], control.tokens[0], strict=False))
    return next((index for index, (token, expected) in enumerate(pairs) if token != expected), len(pairs))


def _compute_lead(control: EngineResult, other: EngineResult, at: int) -> float | None:
    """Return by how much the control prefers its own token; None if it does not list the other engine's."""
    steps = control.logprobs[0] if control.logprobs else ()
    if not all(at < len(sequence) for sequence in (steps, control.tokens[0], other.tokens[0])):
        return None
    token, expected, step = str(other.tokens[0][at]), str(control.tokens[0][at]), steps[at]
    return round(step[expected] - step[token], 6) if token in step and expected in step else None
