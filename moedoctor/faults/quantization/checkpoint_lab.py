"""Shared by the labs of checkpoint failures: a tiny checkpoint that is changed, and engines that load it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from safetensors.torch import load_file

from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.agreement import agree, choose_bounds
from moedoctor.reference.checkpoints import Change, Tensors, write_qwen3_moe
from moedoctor.reference.moe_layer import Layer, Problem, compute_expected, make_layer, make_problem
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.results import Case, Evidence
from moedoctor.trace.wrong_calls import keep_if_wrong
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult, need_backend, run_engines

LAYERS, EXPERTS = 2, 8
"""Of the checkpoints that engines load."""
PROMPTS = ((265, 511, 43, 73, 395), (290, 346, 157, 185, 327), (364, 101, 424, 166, 406, 153, 200))
CLOSE = 0.25
"""The most that logprobs of the same tokens may differ between engines that should compute the same function.
With the prompts above the best token leads by at least 0.75 at every step."""
Run = Callable[[list[EngineRequest]], list[EngineResult]]


def keep_unchanged(tensors: Tensors, config: dict[str, Any]) -> None:
    """Change nothing."""


class Changes(NamedTuple):
    """Changes to a generated checkpoint before it is written."""

    damaged: Change
    repaired: Change = keep_unchanged
    reference: Change = keep_unchanged
    """Makes the checkpoint that the others are compared with: it means the same numbers."""

    def engine(self, case: Case, parameters: Any, release: object) -> Evidence:
        """Load the damaged or the repaired checkpoint into vLLM; the `engine` of a lab."""
        return compare_engines(self, parameters.moe_backend, repaired=case.subject == "fixed")


def list_expert_prefixes() -> Iterator[str]:
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            yield f"model.layers.{layer}.mlp.experts.{expert}"


class Loaded(NamedTuple):
    tensors: Tensors
    lint: list[str]
    """Ids of the findings."""


@contextmanager
def write_checkpoints(changes: Mapping[str, Change | None], **sizes: int) -> Iterator[dict[str, Path]]:
    """Write an NVFP4 checkpoint for each label with its change, and yield the folders, which then go."""
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        yield {
            label: write_qwen3_moe(Path(name) / label, scheme="nvfp4", change=change, **sizes)
            for label, change in changes.items()
        }


def write_and_load(change: Change, **sizes: int) -> Loaded:
    """Write a checkpoint of one layer with `change` made to it, and read it back."""
    with write_checkpoints({"checkpoint": change}, layers=1, **sizes) as folders:
        folder = folders["checkpoint"]
        findings = dict.fromkeys(finding.id for finding in lint(folder).findings)
        return Loaded(load_file(folder / "model.safetensors"), list(findings))


def select_sizes(parameters: BaseModel) -> dict[str, int]:
    """Return the parameters that `write_and_load` takes."""
    return parameters.model_dump(include={"hidden", "intermediate", "experts", "seed"})


def make_routed_layer(parameters: Any, quantization: str, device: str) -> Problem:
    """Return a layer of the size of `parameters`, and tokens for it whose activations stay as they are."""
    names = {"hidden", "intermediate", "experts", "top_k", "activation"}
    shape = LayerShape(**parameters.model_dump(include=names))
    layer = make_layer(shape, quantization, seed=parameters.seed, device=device)
    return make_problem(layer, parameters.tokens, "none", seed=parameters.seed, device=device)


def compare_layer(tested: Layer, problem: Problem) -> Evidence:
    """Compare the output of `tested` with what the layer of `problem` should give."""
    output = compute_expected(replace(problem, layer=tested), "none")  # [T, H]
    result = agree(output, compute_expected(problem, "none"), choose_bounds("none"))
    keep_if_wrong(problem, output, result, "none", "one kernel of the case")
    return result.to_evidence()


def stack_projection(tensors: Tensors, name: str, experts: int) -> Nvfp4:
    """Return ``gate``, ``up`` or ``down`` of all experts of layer 0, each with its own global scale."""
    prefixes = [f"model.layers.0.mlp.experts.{expert}.{name}_proj" for expert in range(experts)]

    def stack_part(part: str) -> torch.Tensor:
        return torch.stack([tensors[f"{prefix}.{part}"] for prefix in prefixes])

    scales = torch.stack([tensors[f"{prefix}.weight_scale"].view(torch.uint8) for prefix in prefixes])
    return Nvfp4(stack_part("weight"), scales.view(torch.float8_e4m3fn), stack_part("weight_scale_2"))


def compare_engines(
    changes: Changes, moe_backend: str | None, *, repaired: bool, run: Run = run_engines
) -> Evidence:
    """Compare vLLM on the damaged or the repaired checkpoint with vLLM on the reference checkpoint.

    If the two agree to within rounding, vLLM read the checkpoint as it was meant. Raises UnavailableError if
    no engine can run.
    """
    if run is run_engines:
        need_backend("nvfp4", moe_backend)
    tested = changes.repaired if repaired else changes.damaged
    arguments = {
        "moe_backend": moe_backend,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
    }
    with write_checkpoints({"reference": changes.reference, "tested": tested}, layers=LAYERS) as folders:
        first, second = run(
            [
                EngineRequest(str(folder), PROMPTS, arguments, max_tokens=8, logprobs=5, label=label)
                for label, folder in folders.items()
            ]
        )
    return {
        "vllm": second.version,
        "moe_backend": second.log.moe_backend,
        "reference_error": None if first.error is None else first.error.message,
        "error": None if second.error is None else second.error.message,
        "allowed_difference": CLOSE,
        **_count_differences(first, second),
    }


def _count_differences(first: EngineResult, second: EngineResult) -> Evidence:
    """Count prompts with other tokens; compare logprobs of the same token after the same tokens."""
    other_tokens, largest, nonfinite, steps = 0, 0.0, 0, 0
    for tokens, tested_tokens, logprobs, tested_logprobs in zip(
        first.tokens, second.tokens, first.logprobs or (), second.logprobs or (), strict=False
    ):
        other_tokens += tokens != tested_tokens
        for step, (expected, tested) in enumerate(zip(logprobs, tested_logprobs, strict=False)):
            if tokens[:step] != tested_tokens[:step]:
                break
            steps += 1
            # The engine's process sends a value that is not finite as text.
            nonfinite += sum(1 for value in tested.values() if not math.isfinite(float(value)))
            shared = [
                abs(float(expected[key]) - float(tested[key])) for key in expected.keys() & tested.keys()
            ]
            largest = max([largest, *(value for value in shared if math.isfinite(value))])
    return {
        "prompts": len(PROMPTS),
        "steps_compared": steps,
        "prompts_with_other_tokens": other_tokens,
        "largest_logprob_difference": round(largest, 4),
        "nonfinite_logprobs": nonfinite,
    }
