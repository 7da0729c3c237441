"""Real engines with the fix `moe` for FP8 as ModelOpt and compressed-tensors hold it.

The engines are those of `moe_layers`, compared on the prompts that the reference decides clearly
(`clear_prompts`): the activations of such a checkpoint are rounded to FP8 by vLLM's own backends, and even a
prompt with a leading token may then take another expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moedoctor.upstream.engine import clear_prompts
from moedoctor.upstream.engine.experiment import Trial, checkpoints, run_trials
from moedoctor.upstream.engine.moe_layers import ENGINES
from moedoctor.upstream.engine.moe_layers import trial as trial_of_layers

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Scheme

FORMATS: Mapping[str, Scheme] = {
    "FP8 of ModelOpt": "fp8_modelopt",
    "FP8 of compressed-tensors": "fp8_compressed",
}
"""Name in reports -> scheme of the checkpoint."""


def tokens(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each engine of each format. Raises UnavailableError if no engine can run."""
    with checkpoints(*FORMATS.values()) as folders:
        trials = [
            trial(quantization, computer, mode, folders[scheme])
            for quantization, scheme in FORMATS.items()
            for computer, mode in ENGINES
        ]
        return [clear_prompts.row(ran) for ran in run_trials(trials)]


def trial(quantization: str, computer: str, mode: str, folder: str) -> Trial:
    """Return one engine for the checkpoint in `folder`."""
    of_layers = trial_of_layers(quantization, computer, mode, folder, clear_prompts.prompts())
    request = replace(
        of_layers.request,
        arguments={**of_layers.request.arguments, **clear_prompts.ARGUMENTS},
        max_tokens=clear_prompts.TOKENS,
        logprobs=clear_prompts.LOGPROBS,
    )
    return replace(of_layers, request=request)
