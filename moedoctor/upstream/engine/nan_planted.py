"""Real engines with the NaN trace and a NaN that is put into the model, to see that the trace finds it.

The embedding of the token that an engine without NaN generates first is NaN. So the prefill is clean, and the
first NaN is in the attention of the first layer in step 2, which decodes that token. In CUDA graphs that step
is a replay. It is the last step: from NaN the V2 model runner draws a token that does not exist, and decoding
that ends in an assertion on the device. Its warm-up decodes tokens that it drew, too, so no other is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moedoctor.upstream.engine.engine import EngineRequest
from moedoctor.upstream.engine.experiment import Ran, Trial, checkpoints, rows, run_trials, some_ran
from moedoctor.upstream.engine.nan_padding import report, traced

PROMPT = (5, 9, 17, 33, 65)
RUNNERS: Mapping[str, str] = {"V1": "0", "V2": "1"}
"""Model runner of vLLM -> VLLM_USE_V2_MODEL_RUNNER."""
GRAPHS = "CUDA graphs"
_MODES: Mapping[str, Mapping[str, Any]] = {
    GRAPHS: {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    },
    "eager": {"enforce_eager": True},
}
NOTHING, EMBEDDING = "nothing", "embedding of the first generated token"
_TOKENS = 2
_SECONDS = 150.0
_PARALLEL = 3


def planted_table(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each model runner and mode with NaN in the model, and without in CUDA graphs.

    Raises UnavailableError if no engine ran.
    """
    with checkpoints("bf16") as right:
        clean = run_trials(trials(right["bf16"], NOTHING, [GRAPHS]), parallel=_PARALLEL)
    drawn = [engine.result.tokens[0][0] for engine in clean if engine.result.error is None]
    if not drawn:
        return some_ran(rows(clean, lambda ran: {}))  # raises
    with checkpoints("bf16", change=functools.partial(plant, token=drawn[0])) as wrong:
        planted = run_trials(trials(wrong["bf16"], EMBEDDING, _MODES), parallel=_PARALLEL)
    return rows([*planted, *clean], functools.partial(_columns, planted_token=drawn[0]))


def plant(tensors: dict[str, Any], config: dict[str, Any], token: int) -> None:
    """Make the embedding of `token` NaN."""
    tensors["model.embed_tokens.weight"][token] = float("nan")  # [vocabulary, H]


def trials(model: str, planted: str, modes: Iterable[str]) -> Sequence[Trial]:
    """Return the engines of the checkpoint `model`, with each model runner in each of the modes."""
    return [
        Trial(
            EngineRequest(
                model,
                [list(PROMPT)],
                {"moe_backend": "triton", "max_num_seqs": 8, "enable_prefix_caching": False, **_MODES[mode]},
                {**traced(), "VLLM_USE_V2_MODEL_RUNNER": number},
                max_tokens=_TOKENS,
                probe=f"{__name__}:report_of_runner",
                seconds=_SECONDS,
                label=f"{runner}, {mode}, {planted}",
            ),
            {"runner": runner, "mode": mode, "planted": planted},
        )
        for mode in modes
        for runner, number in RUNNERS.items()
    ]


def report_of_runner(llm: Any) -> dict[str, Any]:
    """Probe: return what the trace found, and which model runner the engine has."""
    from moedoctor.upstream.engine.expert_cache_probes import runner_of

    return {**report(llm), "runner_in_use": runner_of(llm)}


def _columns(engine: Ran, planted_token: int) -> dict[str, Any]:
    probe = engine.result.probe
    first = probe["first_real"]
    return {
        "planted_token": planted_token,
        "runner_in_use": probe["runner_in_use"],
        "steps": probe["steps"],
        "first_token": engine.result.tokens[0][0],
        "steps_with_nan": probe["nan_in_real"],
        "first_point": "" if first is None else first["point"],
        "first_step": 0 if first is None else first["step"],
        "routers_watched": probe["routers_watched"],
        "not_reached": probe["not_reached"],
        "active": engine.result.fixes,
    }
