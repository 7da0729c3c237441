"""Engines with the fix `moe` whose weights it refuses once they are loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moedoctor.upstream.engine import clear_prompts
from moedoctor.upstream.engine.experiment import Ran, Trial, checkpoints, run_trials
from moedoctor.upstream.engine.moe_layers import EAGER, OURS, PLANTED, THEIRS, trial

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]
NAN = 0x7F
"""The code of NaN in E4M3."""


def plant_nan(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Make one weight of one expert of the last layer NaN."""
    last = max(name for name in tensors if name.endswith("experts.5.down_proj.weight"))
    tensors[last].view(torch.uint8)[0, 0] = NAN


def engine(computer: str, folder: str, *, optional: bool = False) -> Trial:
    """Return an engine that draws one token a prompt, compared with vLLM's own."""
    of_layers = trial("FP8", computer, EAGER, folder, clear_prompts.prompts())
    request = replace(
        of_layers.request,
        arguments={**of_layers.request.arguments, **clear_prompts.ARGUMENTS},
        environ={**of_layers.request.environ, "MOEDOCTOR_FIXES_OPTIONAL": "1" if optional else ""},
        max_tokens=1,
        logprobs=clear_prompts.LOGPROBS,
        label=f"{computer}, optional" if optional else computer,
    )
    return replace(of_layers, request=request, control=None if computer == THEIRS else THEIRS)


def test_a_layer_whose_weights_are_refused_is_left_to_vllm_only_if_the_fix_is_optional() -> None:
    with checkpoints("fp8", change=plant_nan) as folders:
        folder = folders["fp8"]
        engines = [
            engine(THEIRS, folder),
            engine(OURS, folder, optional=True),
            engine(PLANTED, folder, optional=True),
            engine(OURS, folder),
        ]
        _, left, planted, stopped = run_trials(engines)
    assert stopped.result.error is not None
    assert "moe is refused: w2_weight holds NaN" in stopped.result.error.message
    assert left.result.error is None, left.result.error
    probe = left.result.probe or {}
    assert probe["layers"] - probe["ours"] == 1
    assert left.result.logprobs is not None
    assert share_of_same_prompts(left) > 0.7 > share_of_same_prompts(planted)


def share_of_same_prompts(ran: Ran) -> float:
    """Return how many of the prompts that vLLM's own engine decides clearly have its token."""
    compared = clear_prompts.compare(ran)
    print(ran.trial.request.label, compared)
    assert compared["clear_prompts"] >= 10
    return float(compared["same_prompts"] / compared["clear_prompts"])
