"""Real engines with the fix `moe` for experts without SiLU: gated GELU and squared ReLU.

Tiny checkpoints of Gemma-4 and of Nemotron-H, the latter with shared experts, a latent and a scaling of its
routed experts. The table is that of `moe_layers`, but all engines answer many random prompts. Those that the
float32 reference decides clearly at every step are compared: no prompts need to be chosen by hand, and
rounding does not decide a token.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moedoctor.upstream.engine.engine import EngineRequest, EngineResult
from moedoctor.upstream.engine.experiment import Ran, Trial, logprob_distance, run_trials, short_error
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
    uncomputed,
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
CLEAR = 0.5
"""The least lead of the best token's logprob in the reference engine, at each step of a compared prompt."""
_UNQUANTIZED = ("*shared_experts*", "*latent_proj*")
"""vLLM matches a name only up to a dot after it, so ``*shared*`` would not leave shared experts in BF16."""
_PROMPTS, _TOKENS, _SEQUENCES = 128, 4, 16
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
        return [row(ran) for ran in run_trials(trials)]


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
        "max_num_seqs": _SEQUENCES,
        "enable_prefix_caching": False,
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
        prompts(),
        arguments,
        fixed(computer),
        max_tokens=_TOKENS,
        logprobs=2,
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


def prompts() -> list[list[int]]:
    """Return random prompts of 4 to 9 tokens, always the same."""
    draw = random.Random(0)
    return [[draw.randrange(3, 512) for _ in range(draw.randint(4, 9))] for _ in range(_PROMPTS)]


def clear(reference: EngineResult) -> list[int]:
    """Return the prompts whose best token leads by `CLEAR` at every step of the reference engine."""
    decided = []
    for prompt, steps in enumerate(reference.logprobs or ()):
        ranked = [sorted(map(float, step.values()), reverse=True) for step in steps]
        if ranked and all(len(values) > 1 and values[0] - values[1] >= CLEAR for values in ranked):
            decided.append(prompt)
    return decided


def row(ran: Ran) -> dict[str, Any]:
    """Return what became of an engine: of the clear prompts, how many have the reference's tokens.

    ``logprob_distance`` is the median over the clear prompts of the largest difference in a prompt.
    """
    result, control = ran.result, ran.control
    probe = result.probe or {}
    figures: dict[str, Any] = {
        **ran.trial.columns,
        "backend": result.log.moe_backend or "not logged",
        "version": result.version,
        "layers": probe.get("layers"),
        "layers_by_moedoctor": probe.get("ours"),
        "seconds": result.seconds.get("total"),
    }
    reason = short_error(result.error) if result.error is not None else uncomputed(ran)
    if reason is None and control is not None and control.error is not None:
        reason = f"no reference: {short_error(control.error)}"
    if reason is not None:
        return {**figures, "outcome": "not compared", "detail": reason}
    reference = result if control is None else control
    compared = clear(reference)
    same = [prompt for prompt in compared if result.tokens[prompt] == reference.tokens[prompt]]
    apart = [logprob_distance(_only(result, prompt), _only(reference, prompt)) for prompt in compared]
    outcome = "same tokens" if len(same) == len(compared) else "other tokens"
    return {
        **figures,
        "outcome": "control" if control is None else outcome,
        "detail": f"{len(same)} of {len(compared)} clear prompts",
        "clear_prompts": len(compared),
        "same_prompts": len(same),
        "logprob_distance": statistics.median(apart) if apart else None,
    }


def _only(result: EngineResult, prompt: int) -> EngineResult:
    return replace(result, logprobs=None if result.logprobs is None else (result.logprobs[prompt],))
