"""What is looked at inside an engine with expert caches: what they hold, how fast it decodes with them."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

from moedoctor.upstream.engine_probes import in_model


def caches(llm: Any) -> dict[str, Any]:
    """Probe: what the caches of this engine did and hold, and the memory that vLLM found for its KV cache."""
    found: dict[str, Any] = in_model(llm, _caches)
    worker = _worker(llm)
    free = getattr(worker, "available_kv_cache_memory_bytes", None)
    return {**found, "kv_cache_bytes": None if free is None else int(free)}


def _caches(model: Any) -> dict[str, Any]:
    from moedoctor.upstream.expert_cache_layer import host_experts

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
    temperature 1 from a fixed seed, so that the same logits give the same tokens. A size that would start
    after `seconds` is left out.
    """
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    for count in slots:
        began = time.perf_counter()
        if began - started > seconds:
            break
        memory = _worker_call(llm, _resize, count)
        ready = time.perf_counter() - began
        for batch, length in zip(batches, steps, strict=True):
            rows.append(
                {"slots": count, "batch": batch, **_decode(llm, batch, length, rounds, vocab), **memory}
            )
        rows[-1]["seconds_to_resize"] = round(ready, 2)
    return rows


def _resize(worker: Any, slots: int) -> dict[str, Any]:
    """Caches of `slots` in every layer, graphs that use them, and what torch then holds."""
    import gc

    import torch

    from moedoctor.upstream.expert_cache_layer import host_experts

    graphs = importlib.import_module("vllm.compilation.cuda_graph").CUDAGraphWrapper
    graphs.clear_all_graphs()
    pool = torch.cuda.graph_pool_handle()  # torch takes no pool again whose graphs are all gone
    for wrapper in list(graphs._all_instances):
        wrapper.graph_pool = pool
    runner = worker.model_runner
    layers = host_experts(runner.get_model())
    for one in layers:
        one.give(slots, captured=True)
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


def _decode(llm: Any, batch: int, steps: int, rounds: int, vocab: int) -> dict[str, Any]:
    """Tokens a second of `batch` sequences after the prefill, the hit rate, what the last round drew."""
    _generate(llm, batch, 4, vocab, seed=99)  # warm-up
    before = in_model(llm, _caches)
    tokens: list[list[int]] = []
    rates = []
    for _ in range(rounds):
        short, _ = _generate(llm, batch, 2, vocab, seed=0)
        whole, tokens = _generate(llm, batch, 2 + steps, vocab, seed=0)
        rates.append(batch * steps / (whole - short))
    after = in_model(llm, _caches)
    hits, misses = (after[key] - before[key] for key in ("hits", "misses"))
    return {
        "tokens_per_second": round(statistics.median(rates), 2),
        "rounds": [round(one, 2) for one in rates],
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "tokens": tokens,
    }


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
