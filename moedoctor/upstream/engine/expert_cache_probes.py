"""What is looked at inside an engine with expert caches: what they hold, how fast it decodes with them."""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.upstream.engine.expert_cache_shape import draw_weights
from moedoctor.upstream.engine.probes import in_model

_LOGGED_CALLS = 512
"""Of a layer while ids are recorded."""


@dataclass(frozen=True)
class _Run:
    """One measured decode."""

    figures: dict[str, Any]
    tokens: list[list[int]]
    """That each sequence drew in the last round."""
    starts: list[list[int]]
    """The resident experts of each layer when it began."""
    lookups: int
    """Distinct experts of a call, over all calls and layers; 0 where nothing is counted."""
    ids: list[list[list[int]]]
    """The ids of each call of each layer, -1 for none; of no layer where none were recorded."""


def caches(llm: Any) -> dict[str, Any]:
    """Probe: what the caches of this engine did and hold, and the memory that vLLM found for its KV cache."""
    found: dict[str, Any] = in_model(llm, _caches)
    worker = _worker(llm)
    free = getattr(worker, "available_kv_cache_memory_bytes", None)
    return {**found, "kv_cache_bytes": None if free is None else int(free)}


def _caches(model: Any) -> dict[str, Any]:
    from moedoctor.upstream.plugin.expert_cache_layer import host_experts

    made = [one.cache for one in host_experts(model)]
    stats, memory = [one.stats for one in made], [one.memory for one in made]
    return {
        "layers": len(made),
        "slots": made[0].capacity if made else None,
        "engine": made[0].engine if made else None,
        "hits": sum(one.hits for one in stats),
        "misses": sum(one.misses for one in stats),
        "pinned_bytes": sum(one.pinned for one in memory),
        "device_bytes": sum(one.device for one in memory),
        "saved_bytes": sum(one.saved for one in memory),
    }


def caches_with_a_fault(llm: Any) -> Callable[[], dict[str, Any]]:
    """Probe before generating: the last layer computes with other experts; afterwards as `caches`."""
    in_model(llm, functools.partial(_roll_last, by=1))
    return lambda: caches(llm)


def decode_speeds(
    llm: Any,
    *,
    slots: Sequence[int],
    batches: Sequence[int],
    steps: Sequence[int],
    rounds: int,
    vocab: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Probe: decode at each number of slots, in one engine.

    The experts stay in host memory; every layer is given an empty cache of the next size, and the CUDA graphs
    are captured anew. `steps` are the decode steps of a round for each of `batches`. Tokens are drawn at
    temperature 1 from a fixed seed, so that the same logits give the same tokens. Made-up weights are drawn
    anew before. A size that would start after `seconds` is left out.

    Beside each hit rate stands the optimum's for the ids of a run that was recorded with the most slots and
    is not timed. `control_changes_tokens`: every sequence draws other tokens where the last layer computes
    with wrong experts, and the same ones in every round without that.
    """
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    in_model(llm, draw_weights)
    _worker_call(llm, _resize, max(slots), max(batches))
    experts = in_model(llm, _num_experts)
    recorded = [_decode(llm, one, length, rounds, vocab) for one, length in zip(batches, steps, strict=True)]
    for count in slots:
        began = time.perf_counter()
        if began - started > seconds:
            break
        memory = _worker_call(llm, _resize, count)
        ready = time.perf_counter() - began
        for batch, length, known in zip(batches, steps, recorded, strict=True):
            run = _decode(llm, batch, length, rounds, vocab)
            changed = _control(llm, length, vocab, run.tokens) and bool(run.figures["rounds_agree"])
            rows.append(
                {
                    "slots": count,
                    "batch": batch,
                    **run.figures,
                    **_optimum(run, known, count, experts),
                    "tokens": run.tokens,
                    "control_changes_tokens": changed,
                    **memory,
                }
            )
        rows[-1]["seconds_to_resize"] = round(ready, 2)
    return rows


def _num_experts(model: Any) -> int:
    from moedoctor.upstream.plugin.expert_cache_layer import host_experts

    return int(host_experts(model)[0].num_experts)


def _roll_last(model: Any, *, by: int) -> None:
    """A fault in the last layer, which no later layer makes larger."""
    import torch

    from moedoctor.upstream.plugin.expert_cache_layer import host_experts

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    with torch.inference_mode():
        host_experts(model)[-1].roll(by)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _control(llm: Any, steps: int, vocab: int, tokens: list[list[int]]) -> bool:
    """Whether every sequence draws others than its `tokens` while the last layer has wrong experts."""
    in_model(llm, functools.partial(_roll_last, by=1))
    try:
        _, others = _generate(llm, len(tokens), 2 + steps, vocab, seed=0)
    finally:
        in_model(llm, functools.partial(_roll_last, by=-1))
    return all(mine != other for mine, other in zip(tokens, others, strict=True))


def _optimum(run: _Run, recorded: _Run, slots: int, experts: int) -> dict[str, Any]:
    """Belady's hit rate for the recorded ids from what the caches held, where `run` asked for the same."""
    from moedoctor.fixes.eviction import simulate

    def unknown(reason: str) -> dict[str, Any]:
        return {"optimum_hit_rate": None, "optimum_note": f"no bound is known: {reason}"}

    if run.figures["hit_rate"] is None:
        return unknown("every expert is resident")
    needed = [{*call} - {-1} for calls in recorded.ids for call in calls]
    if run.tokens != recorded.tokens or run.lookups != sum(map(len, needed)):
        return unknown("other experts were asked for than in the recorded run")
    if max(map(len, needed), default=0) > slots:
        return unknown("a call that does not fit goes in groups")
    hits = accesses = 0
    for start, calls in zip(run.starts, recorded.ids, strict=True):
        # The first call brings in what was resident, so that the optimum starts from there, too.
        stats = simulate([start, *calls], num_experts=experts, capacity=slots, policy="belady")
        hits, accesses = hits + stats.hits, accesses + stats.accesses - len(start)
    return {"optimum_hit_rate": hits / accesses, "optimum_note": "Belady, the ids of a recorded run"}


def _resize(worker: Any, slots: int, logged: int = 0) -> dict[str, Any]:
    """Caches of `slots` in every layer, graphs that use them, and what torch then holds.

    `logged`: ids of calls of so many tokens are kept, which takes time in every call.
    """
    import gc

    import torch

    from moedoctor.upstream.plugin.expert_cache_layer import host_experts

    graphs = importlib.import_module("vllm.compilation.cuda_graph").CUDAGraphWrapper
    graphs.clear_all_graphs()
    pool = torch.cuda.graph_pool_handle()  # torch takes no pool again whose graphs are all gone
    for wrapper in list(graphs._all_instances):
        wrapper.graph_pool = pool
    runner = worker.model_runner
    layers = host_experts(runner.get_model())
    for one in layers:
        one.give(slots, captured=True)
        if logged:
            one.keep_ids(_LOGGED_CALLS, logged * one.top_k)
    gc.collect()
    torch.cuda.empty_cache()
    with importlib.import_module("vllm.config").set_current_vllm_config(worker.vllm_config):
        runner.capture_model()
    memory = [one.cache.memory for one in layers]
    return {
        "layers": len(layers),
        "engine": layers[0].cache.engine,
        "expert_bytes": sum(one.device for one in memory),
        "pinned_bytes": sum(one.pinned for one in memory),
        "torch_bytes": int(torch.cuda.memory_allocated()),
    }


def _decode(llm: Any, batch: int, steps: int, rounds: int, vocab: int) -> _Run:
    """Tokens a second of `batch` sequences after the prefill, the hit rate, and what was drawn."""
    _generate(llm, batch, 4, vocab, seed=99)  # warm-up
    before, starts = in_model(llm, _caches), in_model(llm, _started)
    drawn: list[list[list[int]]] = []
    rates = []
    for _ in range(rounds):
        short, _ = _generate(llm, batch, 2, vocab, seed=0)
        whole, tokens = _generate(llm, batch, 2 + steps, vocab, seed=0)
        drawn.append(tokens)
        rates.append(batch * steps / (whole - short))
    after, ids = in_model(llm, _caches), in_model(llm, _logged)
    hits, misses = (after[key] - before[key] for key in ("hits", "misses"))
    figures = {
        "tokens_per_second": round(statistics.median(rates), 2),
        "rounds": [round(one, 2) for one in rates],
        "rounds_agree": all(one == drawn[0] for one in drawn),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
    }
    return _Run(figures, drawn[-1], starts, hits + misses, ids)


def _started(model: Any) -> list[list[int]]:
    """The resident experts of each layer; logs begin here."""
    from moedoctor.upstream.plugin.expert_cache_layer import host_experts

    made = host_experts(model)
    for one in made:
        if one.log is not None:
            one.log.clear()
    return [[expert for expert in one.cache.resident() if expert >= 0] for one in made]


def _logged(model: Any) -> list[list[list[int]]]:
    from moedoctor.upstream.plugin.expert_cache_layer import host_experts

    return [one.log.calls() for one in host_experts(model) if one.log is not None]


def _generate(llm: Any, batch: int, length: int, vocab: int, seed: int) -> tuple[float, list[list[int]]]:
    """(seconds, ids of each sequence); prompts are of one token, so that a prefill needs few experts."""
    vllm: Any = importlib.import_module("vllm")
    sampling = [
        vllm.SamplingParams(
            temperature=1.0, seed=1000 * seed + one, max_tokens=length, ignore_eos=True, detokenize=False
        )
        for one in range(batch)
    ]
    prompts = [{"prompt_token_ids": [(7919 * (seed + one) + 17) % vocab]} for one in range(batch)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - started, [list(one.outputs[0].token_ids) for one in outputs]


def _worker_call(llm: Any, function: Any, *arguments: Any) -> Any:
    results = llm.collective_rpc(function, args=arguments)
    if len(results) != 1:
        raise ValueError(f"{len(results)} workers answered; expected one")
    return results[0]


def _worker(llm: Any) -> Any:
    """The worker of an engine whose only one is in this process."""
    worker = _worker_call(llm, lambda worker: worker)
    return getattr(worker, "worker", worker)
