"""Real engines with the fix `moe` for experts without SiLU: gated GELU and squared ReLU.

Tiny checkpoints of Gemma-4 and of Nemotron-H, the latter with shared experts, a latent and a scaling of its
routed experts. Engines are compared on the prompts that the reference decides clearly (`clear_prompts`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moedoctor.upstream.engine import clear_prompts
from moedoctor.upstream.engine.engine import EngineRequest
from moedoctor.upstream.engine.experiment import Trial, run_trials
from moedoctor.upstream.engine.expert_cache_shapes import GEMMA, NEMOTRON, Published, model_config
from moedoctor.upstream.engine.moe_layers import (
    EAGER,
    GRAPHS,
    HERE,
    OURS,
    PLANTED,
    REFERENCE_ENGINE,
    THEIRS,
    fixed,
)

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Scheme


@dataclass(frozen=True)
class Model:
    """An architecture, and what its experts compute."""

    activation: str
    published: Published
    sizes: str
    """The tiny sizes in `moedoctor.reference.activation_checkpoints`."""
    write: str
    """The function there that writes the checkpoint."""


MODELS: Mapping[str, Model] = {
    "Gemma-4": Model("gated GELU", GEMMA, "GEMMA", "write_gemma4"),
    "Nemotron-H": Model("squared ReLU", NEMOTRON, "NEMOTRON", "write_nemotron_h"),
}
SCHEMES: Mapping[str, tuple[Scheme, str]] = {"BF16": ("bf16", "triton"), "NVFP4": ("nvfp4", "marlin")}
"""Name in reports -> (scheme of the checkpoint, ``moe_backend``). Other backends compile for minutes."""
ENGINES = ((REFERENCE_ENGINE, EAGER), (OURS, GRAPHS), (THEIRS, GRAPHS), (PLANTED, EAGER))
_UNQUANTIZED = ("*shared_experts*", "*latent_proj*")
"""vLLM matches a name only up to a dot after it, so ``*shared*`` would not leave shared experts in BF16."""
_SECONDS = 240.0


def tokens(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each engine of each model and format. Raises UnavailableError if no engine can run."""
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        trials = [
            trial(model, quantization, computer, mode, folder)
            for model in MODELS
            for quantization in SCHEMES
            for folder in [str(write(Path(name) / f"{model}-{quantization}", model, quantization))]
            for computer, mode in ENGINES
        ]
        return [clear_prompts.row(ran) for ran in run_trials(trials)]


def write(folder: Path, model: str, quantization: str) -> Path:
    """Write the tiny checkpoint of a model in one format into `folder`; return the folder."""
    from moedoctor.reference import activation_checkpoints as checkpoints

    scheme, _ = SCHEMES[quantization]
    described = MODELS[model]
    sizes = getattr(checkpoints, described.sizes)
    config = model_config(described.published, scheme, _UNQUANTIZED, **sizes)
    writing: Callable[..., Path] = getattr(checkpoints, described.write)
    return writing(folder, config, scheme)


def trial(model: str, quantization: str, computer: str, mode: str, folder: str) -> Trial:
    """Return one engine for the checkpoint in `folder`."""
    arguments: dict[str, Any] = {
        "moe_backend": SCHEMES[quantization][1],
        "enforce_eager": mode == EAGER,
        "max_model_len": 64,
        **clear_prompts.ARGUMENTS,
    }
    if mode == GRAPHS:
        # Graphs of decode steps need no torch.compile, which takes long for layers of several kinds.
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
        }
    place = f"{model}, {quantization}"
    request = EngineRequest(
        folder,
        clear_prompts.prompts(),
        arguments,
        fixed(computer),
        max_tokens=clear_prompts.TOKENS,
        logprobs=clear_prompts.LOGPROBS,
        probe=f"{HERE}:{'exchange_experts' if computer == PLANTED else 'computed_by'}",
        probe_when="before",
        seconds=_SECONDS,
        label=f"{place}, {computer}, {mode}",
    )
    columns = {
        "model": model,
        "activation": MODELS[model].activation,
        "quantization": quantization,
        "computer": computer,
        "mode": mode,
    }
    return Trial(
        request, columns, None if computer == REFERENCE_ENGINE else f"{place}, {REFERENCE_ENGINE}, {EAGER}"
    )
