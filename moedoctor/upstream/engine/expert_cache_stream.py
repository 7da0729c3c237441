"""Real engines with expert caches whose prompts stream through layer buffers, beside engines without a cache.

Tiny checkpoints of eight layers, the fewest that stream by default; four sequences at once, so that prompts
stream and decode steps go through the slots. An engine with ``stream=0`` must ask its caches for more, else
nothing streamed. One engine of each backend streams the experts of the layer before: it must give other
tokens, else equal tokens of the others prove nothing. Compared on clear prompts (`clear_prompts`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moedoctor.upstream.engine import clear_prompts
from moedoctor.upstream.engine.experiment import Ran, Trial, checkpoints, run_trials
from moedoctor.upstream.engine.expert_cache import BACKENDS, EAGER, GRAPHS, offered
from moedoctor.upstream.engine.expert_cache import trial as trial_with_cache
from moedoctor.upstream.engine.expert_cache_padding import asked_for
from moedoctor.upstream.engine.nan_planted import RUNNERS
from moedoctor.upstream.engine.probes import model_of
from moedoctor.upstream.plugin.expert_cache_layer import host_experts

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Scheme

LAYERS = 8
SLOTS = "6"
NOT_STREAMED = "6:stream=0"
_SEQUENCES = 4
_BOTH = "BF16 TRITON"
"""Whose engines run with both model runners, eager and with CUDA graphs; the others have V2 and graphs."""
_TOKENS = {"NVFP4 HUMMING": 1}
"""Tokens a prompt. Through slots Humming's logprobs differ, so its engines draw only the one that streams."""


def tokens(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each engine with a cache. Raises UnavailableError if no engine can run."""
    schemes = (scheme for scheme, _, _ in BACKENDS.values())
    with checkpoints(*schemes, layers=LAYERS) as folders:
        ran = run_trials(trials(folders, importlib.metadata.version("vllm")))
    return [_row(engine) for engine in ran if engine.control is not None]


def trials(folders: Mapping[Scheme, str], version: str | None = None) -> list[Trial]:
    """Return all engines that a release of vLLM can have; None for the newest."""
    engines = []
    for backend in offered(version):
        folder = folders[BACKENDS[backend][0]]
        places = [(runner, GRAPHS) for runner in (RUNNERS if backend == _BOTH else ("V2",))]
        if backend == _BOTH:
            places += [(runner, EAGER) for runner in RUNNERS]
        for runner, mode in places:
            engines += [trial(backend, runner, mode, slots, folder) for slots in (None, SLOTS, NOT_STREAMED)]
        engines.append(trial(backend, "V2", EAGER, SLOTS, folder, planted=True))
    return engines


def trial(
    backend: str, runner: str, mode: str, slots: str | None, folder: str, *, planted: bool = False
) -> Trial:
    """Return one engine for the checkpoint in `folder`. `planted`: its last layer streams wrong experts."""
    made = trial_with_cache(
        backend, mode, slots, folder, max_num_seqs=_SEQUENCES, enable_prefix_caching=False
    )
    held = "no cache" if slots is None else slots
    request = replace(
        made.request,
        prompts=clear_prompts.prompts(),
        max_tokens=_TOKENS.get(backend, clear_prompts.TOKENS),
        logprobs=clear_prompts.LOGPROBS,
        environ={**made.request.environ, "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner]},
        probe=f"{__name__}:{'streaming_wrong_experts' if planted else 'asked_for'}",
        probe_when="before" if planted else "after",
        label=f"{backend}, {runner}, {mode}, {held}{', wrong experts' if planted else ''}",
    )
    columns = {"backend": backend, "runner": runner, "mode": mode, "cache": slots, "planted": planted}
    control = f"{backend}, {runner}, {GRAPHS if planted else mode}, no cache"
    return Trial(request, columns, None if slots is None else control)


def streaming_wrong_experts(llm: Any) -> Callable[[], dict[str, Any]]:
    """Probe before generating: stream to the last layer the experts of the one before; then `asked_for`.

    Its slots stay right, until a prompt seeds them. Graphs that were captured go on as before.
    """
    last = host_experts(model_of(llm))[-1]
    assert last.stream is not None
    stream, number, tokens = last.stream
    last.stream = (stream, number - 1, tokens)
    return lambda: asked_for(llm)


def _row(ran: Ran) -> dict[str, Any]:
    probe = ran.result.probe or {}
    lookups = probe["hits"] + probe["misses"] if probe else None
    return {
        **ran.trial.columns,
        "asked": BACKENDS[ran.trial.columns["backend"]][1].upper(),
        "chosen": ran.result.log.moe_backend or "not logged",
        "runner_in_use": probe.get("runner_in_use"),
        "engine": probe.get("engine"),
        "layers": probe.get("layers"),
        "stream_bytes": probe.get("stream_bytes"),
        "lookups": lookups,
        **clear_prompts.compare(ran),
        "seconds": ran.result.seconds.get("total"),
    }
