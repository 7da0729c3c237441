"""Real engines with expert caches whose CUDA graphs have more rows than a step: padding must load nothing.

Three sequences decode in a graph of three rows, and in one of four. What the caches are asked for must be
the same. One engine of each model runner forgets which rows are padding: it must ask for more, else the
others show nothing. From 0.25.0 on vLLM marks padding itself for some routers; here it is told not to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moedoctor.upstream.engine.experiment import Ran, Trial, checkpoints, rows, run_trials, some_ran
from moedoctor.upstream.engine.expert_cache import GRAPHS, trial
from moedoctor.upstream.engine.expert_cache_probes import caches, runner_of
from moedoctor.upstream.engine.nan_planted import RUNNERS
from moedoctor.upstream.plugin import expert_cache_fix

_BACKEND, _SLOTS = "BF16 TRITON", 6
EXACT, PADDED, COUNTED = "3", "4", "4, padding counts"
"""Rows of the graph in which three sequences decode."""
_SIZES: Mapping[str, Sequence[int]] = {EXACT: (1, 2, 3), PADDED: (1, 2, 4), COUNTED: (1, 2, 4)}


def padding(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each model runner and graph, with the experts that the caches were asked for.

    Raises UnavailableError if no engine ran.
    """
    with checkpoints("bf16") as folders:
        ran = run_trials(trials(folders["bf16"]))
    return some_ran(rows([engine for engine in ran if engine.control is not None], _columns))


def trials(folder: str) -> list[Trial]:
    """Return the engines of each model runner: without a cache, and with one and each graph."""
    engines = []
    for runner, number in RUNNERS.items():
        control = f"{runner}, no cache"
        for graph in (None, EXACT, PADDED, COUNTED):
            made = trial(
                _BACKEND,
                GRAPHS,
                None if graph is None else _SLOTS,
                folder,
                compilation_config={"cudagraph_capture_sizes": list(_SIZES[graph or EXACT])},
                max_num_seqs=4,
            )
            request = replace(
                made.request,
                environ={
                    **made.request.environ,
                    "VLLM_USE_V2_MODEL_RUNNER": number,
                    "VLLM_MOE_SKIP_PADDING": "0",
                },
                probe=f"{__name__}:{'counting_padding' if graph == COUNTED else 'asked_for'}",
                probe_when="before" if graph == COUNTED else "after",
                label=control if graph is None else f"{runner}, {graph}",
            )
            engines.append(
                Trial(request, {"runner": runner, "graph": graph}, None if graph is None else control)
            )
    return engines


def asked_for(llm: Any) -> dict[str, Any]:
    """Probe: return what `caches` does, and the model runner that the engine has."""
    return {**caches(llm), "runner_in_use": runner_of(llm)}


def counting_padding(llm: Any) -> Any:
    """Probe before generating: forget which rows are padding; afterwards `asked_for`."""
    expert_cache_fix.real_rows.forget()
    return lambda: asked_for(llm)


def _columns(engine: Ran) -> dict[str, Any]:
    outcome, detail = engine.compare()
    probe = engine.result.probe
    return {
        "runner_in_use": probe["runner_in_use"],
        "outcome": outcome.value,
        "detail": detail,
        "layers": probe["layers"],
        "lookups": probe["hits"] + probe["misses"],
        "misses": probe["misses"],
    }
