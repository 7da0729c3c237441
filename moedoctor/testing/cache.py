"""The problems of `cache.yaml`: calls of an expert cache, each computed as a layer with its slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from moedoctor.reference.expert_cache import differ
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.testing.questions import Setting, UnfitError, pad_rows, takes

# E = experts, C = slots, T = tokens, K = top_k, H = hidden size, I = intermediate size
_HIDDEN, _INTERMEDIATE = 32, 16
_CALLS = 12


def _draw_ids(sizes: Mapping[str, int], draw: torch.Generator) -> torch.Tensor:
    """Return int32 [T, K], distinct in a row, of at most as many experts as there are slots."""
    tokens, experts, top_k, slots = (sizes[name] for name in ("tokens", "experts", "top_k", "slots"))
    if top_k > min(slots, experts):
        raise UnfitError("top_k is more than the slots")
    few = torch.randperm(experts, generator=draw)[:slots]  # [min(C, E)]
    rows = [few[torch.randperm(len(few), generator=draw)[:top_k]] for _ in range(tokens)]
    return torch.stack(rows).int() if rows else torch.empty(0, top_k, dtype=torch.int32)


def _list_random(sizes: Mapping[str, int], draw: torch.Generator) -> Iterator[torch.Tensor]:
    for _ in range(_CALLS):
        yield _draw_ids(sizes, draw)


def _list_windows(sizes: Mapping[str, int], draw: torch.Generator) -> Iterator[torch.Tensor]:
    """Give calls of experts that are used often, and then of others, which must not evict each other."""
    experts, slots = sizes["experts"], sizes["slots"]
    if experts < 2 * slots:
        raise UnfitError("two calls cannot need different experts")
    for first in (0, slots, slots // 2, experts - slots, 0):
        for _ in range(4):
            yield torch.arange(first, first + slots, dtype=torch.int32)[None]  # [1, C]


def _list_returns(sizes: Mapping[str, int], draw: torch.Generator) -> Iterator[torch.Tensor]:
    experts, slots = sizes["experts"], sizes["slots"]
    if experts < 2 * slots:
        raise UnfitError("two calls cannot need different experts")
    for start in (0, slots, 1, slots, 0):
        yield torch.arange(start, start + slots, dtype=torch.int32)[None]  # [1, C]


def _change_each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Iterator[torch.Tensor]]:
    def list_calls(sizes: Mapping[str, int], draw: torch.Generator) -> Iterator[torch.Tensor]:
        for number, ids in enumerate(_list_random(sizes, draw)):
            yield change(ids) if number % 2 else ids

    return list_calls


def _repeat(ids: torch.Tensor) -> torch.Tensor:
    ids[:, -1] = ids[:, 0]
    return ids


def _skip(ids: torch.Tensor) -> torch.Tensor:
    ids[::2, 0] = -1
    return ids


def _list_too_many(sizes: Mapping[str, int], draw: torch.Generator) -> Iterator[torch.Tensor]:
    """Give an ordinary call, one that needs more experts than there are slots, and ordinary ones."""
    experts, slots = sizes["experts"], sizes["slots"]
    if experts <= slots:
        raise UnfitError("every expert has a slot")
    yield _draw_ids(sizes, draw)
    yield torch.randperm(experts, generator=draw)[: slots + 1].int()[:, None]  # [C + 1, 1]
    yield from _list_random(sizes, draw)


def _list_unknown(sizes: Mapping[str, int], draw: torch.Generator) -> Iterator[torch.Tensor]:
    for number, ids in enumerate(_list_random(sizes, draw)):
        if number % 3 == 1:
            ids[0, 0] = sizes["experts"] + 3 if number % 2 else -7
        yield ids


CALLS: Mapping[str, Callable[[Mapping[str, int], torch.Generator], Iterator[torch.Tensor]]] = {
    "ordinary": _list_random,
    "needed_experts_stay": _list_windows,
    "evicted_experts_return": _list_returns,
    "repeated_ids": _change_each(_repeat),
    "skipped_ids": _change_each(_skip),
    "int64_ids": _change_each(torch.Tensor.long),
    "padded_ids": _change_each(lambda ids: pad_rows(ids, 3, 10**6)),
    "unknown_ids": _list_unknown,
    "too_many_experts": _list_too_many,
    "usable_after_an_error": _list_too_many,
    "one_slot": _list_random,
    "a_slot_for_each": _list_random,
    "no_tokens": _list_random,
    "two_layers": _list_random,
}
"""Question -> the ids of its calls."""


def ask(make: Callable[..., Any], question: str, sizes: Mapping[str, int], how: Setting) -> str | None:
    """Return the first call that is computed wrongly, or None."""
    draw = torch.Generator().manual_seed(how.seed)
    dtype = getattr(torch, how.options.get("dtype", "float32"))
    layers = [_make_layer(sizes["experts"], dtype, draw) for _ in range(2 if question == "two_layers" else 1)]
    before = [{name: tensor.clone() for name, tensor in layer.items()} for layer in layers]
    placed = {"device": how.device} if takes(make, "device") else {}
    caches = [make(layer, sizes["slots"], **placed) for layer in layers]
    for number, ids in enumerate(CALLS[question](sizes, draw)):
        cache, weights = caches[number % len(caches)], before[number % len(caches)]
        x = torch.randn(len(ids), _HIDDEN, generator=draw)  # [T, H]
        shares = torch.rand(ids.shape, generator=draw) + 0.1  # [T, K]
        known = torch.where((ids >= 0) & (ids < sizes["experts"]), ids, -1)
        expected = forward(x, MoeWeights.from_tensors(weights), shares, known)  # [T, H]
        if question == "usable_after_an_error" and number == 1:
            with contextlib.suppress(Exception):
                _compute(cache, ids.to(how.device), x, shares, sizes["slots"])
            continue
        output = _compute(cache, ids.to(how.device), x, shares, sizes["slots"])
        if output is None:
            return f"call {number}, ids {ids.tolist()}: the slots are not as many as the ids"
        difference = differ(output, expected)
        if bool(difference.rows.any()):
            row = int(difference.rows.nonzero()[0, 0])
            size = "should be zero" if not expected[row].any() else f"is off by {difference.worst:.2g}"
            return f"call {number}, ids {ids.tolist()}: the output of token {row} {size}"
        if any(not torch.equal(layers[0][name], before[0][name]) for name in before[0]):
            return f"call {number}: the weights in host memory were written to"
    return None


def _make_layer(experts: int, dtype: torch.dtype, draw: torch.Generator) -> dict[str, torch.Tensor]:
    shapes = {"w13": (experts, 2 * _INTERMEDIATE, _HIDDEN), "w2": (experts, _HIDDEN, _INTERMEDIATE)}
    return {name: (torch.randn(shape, generator=draw) / 4).to(dtype) for name, shape in shapes.items()}


def _compute(
    cache: Any, ids: torch.Tensor, x: torch.Tensor, shares: torch.Tensor, slots: int
) -> torch.Tensor | None:
    """Return float32 [T, H] of the layer with the slots that the cache gives; None for too few or many.

    A call that is refused is computed in groups if the cache has them.
    """
    acquire = cache.acquire if hasattr(cache, "acquire") else cache.prepare
    try:
        parts = (acquire(ids),)
    except Exception:
        if not hasattr(cache, "groups"):
            raise
        parts = cache.groups(ids)
    total = torch.zeros_like(x)  # [T, H]
    for weights, slot_ids in map(_read, parts):
        if slot_ids.shape != ids.shape:
            return None
        # A slot that there is not counts as none: the result is wrong, and no error.
        inside = torch.where((slot_ids >= 0) & (slot_ids < slots), slot_ids, -1)  # [T, K]
        total += forward(x, MoeWeights.from_tensors(weights), shares, inside)
    return total


def _read(held: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the weights by name and the slots [T, K], on the CPU."""
    weights, slots = held if isinstance(held, tuple) else (held.weights, held.slot_ids)
    return {name: tensor.cpu() for name, tensor in weights.items()}, slots.cpu()
