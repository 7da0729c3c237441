"""What is looked at inside an engine with expert caches: what they hold, how fast it decodes with them."""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from moedoctor.upstream.engine.decode_speed import decode_replays, graph_events
from moedoctor.upstream.engine.probes import model_of
from moedoctor.upstream.plugin.expert_cache_layer import host_experts, stream_prompts
from moedoctor.upstream.plugin.expert_cache_options import CacheOptions, read_options

_ROUTERS = ("gate", "router", "router.proj")
"""How the names of a router's layer end."""
_LOGGED_CALLS = 512
"""Calls of a layer while ids are recorded."""
_NO_REPETITION = 1e9
"""A repetition penalty that leaves nothing of a positive logit."""
_ROUNDS = 2
"""How often a text is drawn: when it is new to the caches, and once more."""
_APART = 10
"""Between the seeds of two texts, more than the sequences of a batch."""


@dataclass(frozen=True)
class _Run:
    """One measured decode."""

    figures: dict[str, Any]
    tokens: list[list[int]]
    """The tokens that each sequence of each text drew in the last round."""
    starts: list[list[int]]
    """The resident experts of each layer when it began."""
    misses: tuple[int, ...]
    """Experts that were copied from the host in each round."""
    lookups: int
    """Distinct experts of a call, over all calls and layers; 0 if nothing is counted."""
    ids: list[list[list[int]]]
    """The ids of each call of each layer, -1 for none; empty if no ids were recorded."""


def caches(llm: Any) -> dict[str, Any]:
    """Probe: return what the caches of this engine did and hold, and the memory left to the KV cache."""
    experts = host_experts(model_of(llm))
    layers = [layer.cache for layer in experts]
    streams = {id(layer.stream[0]): layer.stream[0].nbytes for layer in experts if layer.stream is not None}
    buffers = sum(streams.values())
    worker = worker_of(llm)
    free = getattr(getattr(worker, "worker", worker), "available_kv_cache_memory_bytes", None)
    return {
        "layers": len(layers),
        "slots": layers[0].capacity if layers else None,
        "engine": layers[0].engine if layers else None,
        "hits_first": experts[0].hits_first if experts else None,
        "hits": sum(cache.stats.hits for cache in layers),
        "misses": sum(cache.stats.misses for cache in layers),
        "pinned_bytes": sum(cache.memory.pinned for cache in layers),
        "device_bytes": sum(cache.memory.device for cache in layers),
        "stream_bytes": buffers,
        "saved_bytes": sum(cache.memory.saved for cache in layers) - buffers,
        "kv_cache_bytes": None if free is None else int(free),
    }


def profiled(llm: Any) -> dict[str, Any]:
    """Probe: return what `caches` does, and the bytes that torch holds, uses for nothing and cannot release.

    Those are the rest of blocks of which a part is in use. The profile of vLLM 0.33.0 counts them as used,
    that of 0.21.0 does not.
    """
    import torch

    torch.cuda.empty_cache()
    return {**caches(llm), "unreleased_bytes": torch.cuda.memory_reserved() - torch.cuda.memory_allocated()}


def caches_with_a_fault(llm: Any) -> Callable[[], dict[str, Any]]:
    """Probe before generating: let the last layer compute with wrong experts; afterwards `caches`."""
    _roll_last(llm, by=1)
    return lambda: caches(llm)


def decode_speeds(
    llm: Any,
    *,
    caches: Sequence[str],
    batches: Sequence[int],
    steps: Sequence[int],
    texts: Sequence[int],
    vocab: int,
    seconds: float,
    optimum: bool = True,
    prompt: int = 0,
) -> Iterator[list[dict[str, Any]]]:
    """Probe: decode with each of `caches`, values of ``MOEDOCTOR_EXPERT_CACHE``, in one engine.

    Yields the rows so far after each cache, and again when its first reply has been measured.

    The experts stay in host memory; every layer gets a new cache with the next options, and the CUDA
    graphs are captured anew. Experts that were packed stay packed, so ``packed=0`` comes first. `steps` and
    `texts` are the decode steps of a text and the number of texts for each of `batches`. Tokens are drawn at
    temperature 1 from a fixed seed, so that the same logits give the same tokens. Random weights are drawn
    anew before. A cache that would start after `seconds` is left out.

    Each row has speeds by the host's clock and by events on the GPU, in two rounds: of texts that are new to
    the caches, and of the same once more. It also has the hit rate, and the tokens per second that the bus
    would allow with the same misses if nothing else took time. With `optimum` it also has the best possible
    hit rate for the ids of a run that was recorded with the most slots and is not timed. With `prompt`, the
    first of `batches` also has the speed of the first reply after a prompt of so many tokens, and of the same
    reply once more.
    `control_changes_tokens`: every sequence draws other tokens if the last layer computes with wrong experts,
    and the same ones in every round otherwise.
    """
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    model, worker = model_of(llm), worker_of(llm)
    draw_weights(model)
    chosen = [read_options(text) for text in caches]
    recorded: list[_Run | None] = [None] * len(batches)
    experts = host_experts(model)[0].num_experts
    if optimum:
        most = max(chosen, key=lambda options: options.slots)
        _resize(worker, replace(most, packed=False), max(batches))
        recorded = [_decode(llm, *shape, vocab) for shape in zip(batches, steps, texts, strict=True)]
    bandwidth = host_bandwidth()
    for text, options in zip(caches, chosen, strict=True):
        began = time.perf_counter()
        if began - started > seconds:
            break
        memory = _resize(worker, options)
        ready = time.perf_counter() - began
        for batch, length, count, known in zip(batches, steps, texts, recorded, strict=True):
            run = _decode(llm, batch, length, count, vocab)
            changed = _control(llm, length, vocab, run.tokens[:batch]) and bool(run.figures["rounds_agree"])
            rows.append(
                {
                    "cache": text,
                    "slots": options.slots,
                    "policy": options.policy,
                    "packed": host_experts(model)[0].cache.packed,
                    "batch": batch,
                    **run.figures,
                    **_bus_bound(run, batch * count * (length + 4), bandwidth, model),
                    **({} if known is None else _optimum(run, known, options.slots, experts)),
                    "tokens": run.tokens,
                    "control_changes_tokens": changed,
                    **memory,
                }
            )
        rows[-1]["seconds_to_resize"] = round(ready, 2)
        yield rows
        if prompt and options.stream != 0 and options.slots < experts:
            _resize(worker, options)  # a reply begins with the cache of an engine that starts
            rows[-len(batches)].update(_first_reply(llm, prompt, steps[0], vocab, texts[0]))
            yield rows


def host_bandwidth(mebibytes: int = 256) -> float | None:
    """Return the bytes per second of a pinned copy to the GPU, the best of three; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    host = torch.empty(mebibytes << 20, dtype=torch.uint8, pin_memory=True)
    device, best = torch.empty_like(host, device="cuda"), 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, host.nbytes / (time.perf_counter() - started))
    return best


def _bus_bound(run: _Run, tokens: int, bandwidth: float | None, model: Any) -> dict[str, Any]:
    """Return the host bytes of a token, and the tokens per second if nothing but the bus took time.

    `tokens`: those of a round.
    """
    store = host_experts(model)[0].store
    size = store.nbytes / store.num_experts

    def bound(misses: float) -> float | None:
        return round(bandwidth * tokens / (misses * size), 1) if bandwidth is not None and misses else None

    return {
        "host_mib_per_token": round(statistics.mean(run.misses) * size / tokens / 2**20, 1),
        "bus_gb_per_second": None if bandwidth is None else round(bandwidth / 1e9, 1),
        "bus_bound_tokens_per_second": bound(statistics.mean(run.misses)),
        "bus_bound_rounds": [bound(misses) for misses in run.misses],
    }


def _first_reply(llm: Any, prompt: int, steps: int, vocab: int, texts: int) -> dict[str, Any]:
    """Return the decode speed of a reply after a prompt that is new, and of the same once more.

    The prompt's own time is that of two other prompts of the same length. A speed is the median of `texts`.
    """
    others = [_generate(llm, 1, 2, vocab, seed=seed, prompt=prompt)[0] for seed in (97, 98, 96)]
    alone = min(others[1:])  # the first may compile
    speeds = _Speeds()
    agree = True
    with graph_events() as events:
        for text in range(texts):
            drawn = []
            for turn in range(_ROUNDS):
                events.clear()
                seed = _APART * (text + 1)
                whole, tokens = _generate(llm, 1, 2 + steps, vocab, seed=seed, prompt=prompt)
                speeds.add(turn, 1, steps, whole - alone, events)
                drawn.append(tokens)
            agree &= all(tokens == drawn[0] for tokens in drawn)
    (first, again), by_gpu = speeds.medians()
    return {
        "prompt_tokens": prompt,
        "prompt_seconds": round(alone, 3),
        "first_reply_tokens_per_second": first,
        "repeated_reply_tokens_per_second": again,
        "gpu_replies": by_gpu,
        "replies_agree": agree,
    }


def random_routing(
    llm: Any, *, steps: int, texts: int, vocab: int, kv_cache: int = 1 << 30
) -> dict[str, Any]:
    """Probe: decode one sequence whose tokens choose experts at random, and what the engine holds.

    Embedding, norms, routers and the last layer are drawn; experts stay as vLLM made them up, and add next to
    nothing. So any architecture routes by its last token alone, and no state of an unknown layer can diverge.
    A token that was drawn keeps a logit of at most 0, so that it is hardly drawn again: a model whose last
    layer is its embedding would draw its last token again and again, and ask for the experts that are there.
    """
    import torch

    model = model_of(llm)
    layers = host_experts(model)
    held = int(torch.cuda.memory_allocated())
    draw = torch.Generator(device=layers[0].cache.device).manual_seed(0)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            part = name.rpartition(".")[0]
            if parameter.dim() == 1 and "norm" in part:
                parameter.data.fill_(1.0)
            elif parameter.dim() == 2 and ("embed" in part or part.endswith(_ROUTERS)):
                deviation = 1.0 if "embed" in part else 1.0 / math.sqrt(parameter.shape[1])
                parameter.data.normal_(0.0, deviation, generator=draw)
            elif parameter.dim() == 2 and "lm_head" in part:
                parameter.data.normal_(0.0, 4.0 / math.sqrt(parameter.shape[1]), generator=draw)
    run = _decode(llm, 1, steps, texts, vocab, penalty=_NO_REPETITION)
    return {
        **run.figures,
        **_bus_bound(run, texts * (steps + 4), host_bandwidth(), model),
        "layers": len(layers),
        "engine": layers[0].cache.engine,
        "packed": layers[0].cache.packed,
        "gigabytes": round((held - kv_cache) / 1e9, 2),
        "gigabytes_saved": round(sum(layer.cache.memory.saved for layer in layers) / 1e9, 2),
        "drawn_tokens": len(run.tokens[0]),
        "distinct_tokens": len(set(run.tokens[0])),
    }


def draw_weights(model: Any) -> None:
    """Draw all weights of a model with caches anew, so that its tokens depend on every expert.

    The caches must be made anew after this.
    """
    # vLLM's random weights are all within 0.001, norms too: what a layer adds is rounded away beside the
    # embedding. So: norms of one, an embedding of unit size, and deviations of 1 / sqrt(inputs), as in the
    # tiny checkpoints. Large norms alone would be cheaper, but vLLM draws each layer alike, and an expert of
    # another layer would not be noticed. Experts are drawn on the GPU and cost one copy to the host.
    import torch

    layers = host_experts(model)
    slots = {weight.data_ptr() for layer in layers for weight in layer.cache.weights.values()}
    draw = torch.Generator(device=layers[0].cache.device).manual_seed(0)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if parameter.data_ptr() in slots:
                continue
            if parameter.dim() == 1:
                parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
            elif parameter.dim() == 2:
                gain = 4.0 if "lm_head" in name else 1.0  # [outputs, inputs]
                deviation = 1.0 if "embed" in name else gain / math.sqrt(parameter.shape[1])
                parameter.data.normal_(0.0, deviation, generator=draw)
        for layer in layers:
            layer.draw(draw)


def _roll_last(llm: Any, *, by: int) -> None:
    """Plant a fault in the last layer, which no later layer makes larger."""
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    with torch.inference_mode():
        host_experts(model_of(llm))[-1].roll(by)
    if on_gpu:
        torch.cuda.synchronize()


def _control(llm: Any, steps: int, vocab: int, tokens: list[list[int]]) -> bool:
    """Whether every sequence draws other tokens than `tokens` while the last layer has wrong experts."""
    _roll_last(llm, by=1)
    try:
        _, others = _generate(llm, len(tokens), 2 + steps, vocab, seed=0)
    finally:
        _roll_last(llm, by=-1)
    return all(ids != other for ids, other in zip(tokens, others, strict=True))


def _optimum(run: _Run, recorded: _Run, slots: int, experts: int) -> dict[str, Any]:
    """Belady's hit rate for the recorded ids, from what the caches held, if `run` asked for the same ids."""
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


def _resize(worker: Any, options: CacheOptions, logged: int = 0) -> dict[str, Any]:
    """Make new caches in every layer and graphs that use them; return what torch then holds.

    `logged`: if not 0, ids of calls of so many tokens are recorded, which takes time in every call.
    """
    import gc

    import torch

    graphs = importlib.import_module("vllm.compilation.cuda_graph").CUDAGraphWrapper
    graphs.clear_all_graphs()
    pool = torch.cuda.graph_pool_handle()  # torch does not reuse a pool whose graphs are all gone
    for wrapper in list(graphs._all_instances):
        wrapper.graph_pool = pool
    runner = worker.model_runner
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is not None:  # the V2 model runner keeps full graphs itself
        manager.graphs.clear()
        manager.pool = pool
    layers = host_experts(runner.get_model())
    for layer in layers:
        layer.give(options, captured=True)
    stream = stream_prompts(layers, options)
    for layer in layers:
        if logged:
            layer.keep_ids(_LOGGED_CALLS, logged * layer.top_k)
    gc.collect()
    torch.cuda.empty_cache()
    # MARLIN's locks in 0.33.0 belong to a stream, and graphs are captured on another one than before.
    importlib.import_module("vllm.v1.worker.workspace").unlock_workspace()
    with importlib.import_module("vllm.config").set_current_vllm_config(worker.vllm_config):
        runner.capture_model()  # locks it again
    return {
        "layers": len(layers),
        "engine": layers[0].cache.engine,
        "stream_bytes": 0 if stream is None else stream.nbytes,
        "expert_bytes": sum(layer.cache.memory.device for layer in layers),
        "pinned_bytes": sum(layer.cache.memory.pinned for layer in layers),
        "torch_bytes": int(torch.cuda.memory_allocated()),
    }


class _Speeds:
    """Tokens per second of each round, by the host's clock and by events on the GPU.

    The speed of a round is the median of its texts, so that one slow text does not decide.
    """

    def __init__(self) -> None:
        self._by_clock: list[list[float]] = [[] for _ in range(_ROUNDS)]
        self._by_gpu: list[list[float]] = [[] for _ in range(_ROUNDS)]

    def add(self, turn: int, batch: int, steps: int, seconds: float, events: Sequence[Any]) -> None:
        """Add the `steps` decode steps of a text, which took `seconds`, with the replays of its reply."""
        self._by_clock[turn].append(batch * steps / seconds)
        if times := decode_replays(events, steps):
            self._by_gpu[turn].append(1e3 * batch * steps / sum(times))

    def medians(self) -> tuple[list[float], list[float] | None]:
        """Return the speeds of the rounds by the clock and by the GPU, None without its events."""
        by_clock, by_gpu = (
            [round(statistics.median(rates), 2) for rates in rounds if rates]
            for rounds in (self._by_clock, self._by_gpu)
        )
        return by_clock, by_gpu if len(by_gpu) == _ROUNDS else None


def _decode(llm: Any, batch: int, steps: int, texts: int, vocab: int, penalty: float = 1.0) -> _Run:
    """Measure the tokens a second of `batch` sequences after the prefill, the hit rate, and the tokens.

    A speed is the mean of the two rounds. `penalty`: the repetition penalty.
    """
    _generate(llm, batch, 4, vocab, seed=99, penalty=penalty)  # warm-up
    layers = host_experts(model_of(llm))
    logs = [layer.log for layer in layers if layer.log is not None]
    for log in logs:
        log.clear()
    starts = [[expert for expert in layer.cache.resident() if expert >= 0] for layer in layers]
    drawn: list[list[list[int]]] = [[] for _ in range(_ROUNDS)]
    counted: list[tuple[int, int]] = []
    speeds = _Speeds()
    with graph_events() as events:
        for text in range(texts):
            for turn in range(_ROUNDS):
                before = caches(llm)
                reply = partial(_generate, llm, batch, vocab=vocab, seed=_APART * text, penalty=penalty)
                short, _ = reply(2)
                events.clear()
                whole, tokens = reply(2 + steps)
                speeds.add(turn, batch, steps, whole - short, events)
                drawn[turn] += tokens
                after = caches(llm)
                counted.append((after["hits"] - before["hits"], after["misses"] - before["misses"]))
    by_clock, by_gpu = speeds.medians()
    hits, misses = (sum(counts) for counts in zip(*counted, strict=True))
    figures = {
        "tokens_per_second": round(statistics.mean(by_clock), 2),
        "gpu_tokens_per_second": by_gpu and round(statistics.mean(by_gpu), 2),
        "texts": texts,
        "rounds": by_clock,
        "gpu_rounds": by_gpu,
        "rounds_agree": all(tokens == drawn[0] for tokens in drawn),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
    }
    missed = tuple(sum(misses for _, misses in counted[turn::_ROUNDS]) for turn in range(_ROUNDS))
    return _Run(figures, drawn[-1], starts, missed, hits + misses, [log.calls() for log in logs])


def _generate(
    llm: Any, batch: int, length: int, vocab: int, seed: int, prompt: int = 1, penalty: float = 1.0
) -> tuple[float, list[list[int]]]:
    """(seconds, ids of each sequence). Prompts of one token need few experts to prefill."""
    vllm: Any = importlib.import_module("vllm")
    parameters = [
        vllm.SamplingParams(
            temperature=1.0,
            seed=1000 * seed + index,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            repetition_penalty=penalty,
        )
        for index in range(batch)
    ]
    prompts = [
        {
            "prompt_token_ids": [
                (7919 * (seed + index) + 17 + 104729 * place) % vocab for place in range(prompt)
            ]
        }
        for index in range(batch)
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return time.perf_counter() - started, [list(output.outputs[0].token_ids) for output in outputs]


def worker_of(llm: Any) -> Any:
    """Return the only worker, which is in this process. Raises ValueError for several."""
    workers = llm.collective_rpc(lambda worker: worker)
    if len(workers) != 1:
        raise ValueError(f"{len(workers)} workers answered; expected one")
    return workers[0]


def runner_of(llm: Any) -> str:
    """Return the model runner that the engine has, ``V1`` or ``V2``."""
    worker = worker_of(llm)
    runner = getattr(worker, "worker", worker).model_runner
    return "V2" if ".worker.gpu.model_runner" in type(runner).__module__ else "V1"
