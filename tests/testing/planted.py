"""Implementations with one mistake each, by the question that notices it. Those in SOUND have none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from moedoctor.fixes.routing import grouped_topk, topk_softmax
from moedoctor.testing.adapters.reference import compute
from moedoctor.testing.adapters.vllm_37190 import Provider
from moedoctor.testing.moe import order_rows

Weights = Mapping[str, torch.Tensor]
NAN = torch.nan


def route(logits: torch.Tensor, top_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return grouped_topk(logits, top_k, scoring="softmax", **options)


def route_as_before_the_fix(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the largest score K times and set it to -inf each time, which no NaN is."""
    scores = logits.float().softmax(1)  # [T, E]
    weights, ids = [], []
    for _ in range(top_k):
        best = scores.masked_fill(scores.isnan(), torch.inf).argmax(1, keepdim=True)  # [T, 1]
        weights.append(scores.gather(1, best))
        ids.append(best)
        scores.scatter_(1, best, scores.gather(1, best) - torch.inf)
    return torch.cat(weights, 1), torch.cat(ids, 1)


def route_nan_weights(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.float().softmax(1).topk(top_k)


def route_one_expert_of_equals(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find experts by the value of their score."""
    scores = logits.float().softmax(1)  # [T, E]
    best = scores.topk(top_k).values  # [T, K]
    return best, (scores[:, None] == best[..., None]).int().argmax(2)


def change_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def route_changed(logits: torch.Tensor, top_k: int, **options: Any) -> Any:
        return route(change(logits), top_k, **options)

    return route_changed


def ignore(option: str) -> Callable[..., Any]:
    def route_without(logits: torch.Tensor, top_k: int, **options: Any) -> Any:
        left = {name: value for name, value in options.items() if not name.endswith(option)}
        return route(
            logits, top_k, **left | ({"num_groups": 1, "topk_groups": 1} if option == "groups" else {})
        )

    return route_without


def route_by_rounded_scores(logits: torch.Tensor, top_k: int) -> Any:
    scores = (logits.float() * 4).round() / 4 if logits.dtype.itemsize == 2 else logits
    return topk_softmax(scores, top_k)


def overflow(logits: torch.Tensor, top_k: int) -> Any:
    powers = logits.exp()  # [T, E]
    return (powers / powers.sum(1, keepdim=True)).topk(top_k)


def pad_experts(logits: torch.Tensor, top_k: int) -> Any:
    """Pad to a power of two, with zeros."""
    tokens, experts = logits.shape
    padded = logits.new_zeros(tokens, 1 << (experts - 1).bit_length())
    padded[:, :experts] = logits
    return topk_softmax(padded, top_k)


def leave_out_last(logits: torch.Tensor, top_k: int) -> Any:
    weights, ids = topk_softmax(logits, top_k)
    return weights, ids.where(torch.arange(top_k) < logits.shape[1] - 1, 0)


def pad_tokens(logits: torch.Tensor, top_k: int) -> Any:
    return topk_softmax(logits if len(logits) else logits.new_zeros(1, logits.shape[1]), top_k)


def die_of_nan(logits: torch.Tensor, top_k: int) -> Any:
    """Die, or hang, as a kernel may."""
    if bool(logits.isnan().all(1).any()):
        os.abort()
    while bool(logits.isnan().any()):
        time.sleep(1)
    return topk_softmax(logits, top_k)


def divide_by_zero(logits: torch.Tensor, top_k: int, renormalize: bool = False) -> Any:
    weights, ids = logits.float().sigmoid().topk(top_k)
    return (weights / weights.sum(1, keepdim=True) if renormalize else weights), ids


def add_bias_to_weights(logits: torch.Tensor, top_k: int, bias: torch.Tensor | float = 0.0) -> Any:
    return (logits.softmax(1) + bias).topk(top_k)


def read_dense(logits: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(logits, logits.shape, (logits.shape[1], 1))


class Cache:
    """A cache that evicts the expert used longest ago and refuses what it cannot do."""

    def __init__(self, weights: Weights, capacity: int) -> None:
        self.host = weights
        self.experts = next(iter(weights.values())).shape[0]
        self.slots = {name: torch.zeros(capacity, *each.shape[1:]) for name, each in weights.items()}
        self.expert_of = [-1] * capacity
        self.used = [0] * capacity
        self.clock = 0

    def choose_victim(self, needed: list[int]) -> int:
        free = [slot for slot, expert in enumerate(self.expert_of) if expert not in needed]
        return min(free, key=self.used.__getitem__)

    def check(self, ids: torch.Tensor) -> None:
        if bool(((ids < -1) | (ids >= self.experts)).any()):
            raise ValueError("an id that is no expert")

    def list_needed(self, ids: torch.Tensor) -> list[int]:
        needed: list[int] = ids[ids >= 0].unique().tolist()
        return needed

    def acquire(self, ids: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        self.check(ids)
        needed = self.list_needed(ids)
        if len(needed) > len(self.expert_of):
            raise ValueError("too many experts")
        for expert in needed:
            self.clock += 1
            if expert not in self.expert_of:
                slot = self.choose_victim(needed)
                self.expert_of[slot] = expert
                for name, tensor in self.slots.items():
                    tensor[slot] = self.host[name][expert]
            self.used[self.expert_of.index(expert)] = self.clock
        return self.slots, self.find_slots(ids)

    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        place = {expert: slot for slot, expert in enumerate(self.expert_of)}
        slots = [-1 if each < 0 else place.get(each, -1) for each in ids.flatten().tolist()]
        return torch.tensor(slots, dtype=torch.int32).view(ids.shape)


class ShiftsSlots(Cache):
    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        return super().find_slots(ids).roll(1)


class KeepsMapping(Cache):
    """Takes an expert for resident once it was loaded."""

    def choose_victim(self, needed: list[int]) -> int:
        free = [slot for slot, expert in enumerate(self.expert_of) if expert not in needed]
        return max(free, key=self.used.__getitem__)

    def acquire(self, ids: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        self.place = getattr(self, "place", {})
        super().acquire(ids)
        for slot, expert in enumerate(self.expert_of):
            self.place.setdefault(expert, slot)
        return self.slots, torch.tensor([self.place[each] for each in ids.flatten().tolist()]).view(ids.shape)


class DropsRepeated(Cache):
    def list_needed(self, ids: torch.Tensor) -> list[int]:
        again = (ids[:, :, None] == ids[:, None]).sum(2) > 1  # [T, K]
        return super().list_needed(ids.masked_fill(again, -1))


class WrapsSkipped(Cache):
    def acquire(self, ids: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        return super().acquire(ids.masked_fill(ids == -1, 0))


class ClampsUnknown(Cache):
    def acquire(self, ids: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        return super().acquire(ids.clamp(-1, self.experts - 1))


class ReadsHalfOfInt64(Cache):
    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        return super().find_slots(ids.contiguous().view(torch.int32).flatten()[: ids.numel()].view(ids.shape))


class IgnoresStride(Cache):
    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        return super().find_slots(torch.as_strided(ids, ids.shape, (ids.shape[1], 1)))


class Truncates(Cache):
    def list_needed(self, ids: torch.Tensor) -> list[int]:
        return super().list_needed(ids)[-len(self.expert_of) :]


class StopsHalfway(Cache):
    """Changes its state before it refuses a call."""

    def acquire(self, ids: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        needed = self.list_needed(ids)
        if len(needed) > len(self.expert_of):
            self.expert_of[:] = needed[: len(self.expert_of)]
        return super().acquire(ids)


class NeedsTwoSlots(Cache):
    """Keeps the last slot as a buffer of its own."""

    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        return super().find_slots(ids).masked_fill_(torch.tensor(len(self.expert_of) == 1), -1)


class TakesIdsForSlots(Cache):
    """Takes ids for slots if all experts fit, and loads nothing."""

    def acquire(self, ids: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        return (self.slots, ids) if len(self.expert_of) >= self.experts else super().acquire(ids)


class ForgetsToReturn(Cache):
    def acquire(self, ids: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        held = super().acquire(ids)
        return held if len(ids) else (held[0], torch.zeros(1, 2, dtype=torch.int32))


class SharesState(Cache):
    shared: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, weights: Weights, capacity: int) -> None:
        super().__init__(weights, capacity)
        self.expert_of = self.shared.setdefault(capacity, self.expert_of)


def plant(
    change: Callable[[dict[str, Any]], None],
    finish: Callable[[torch.Tensor, dict[str, Any]], Any] | None = None,
) -> Callable[..., Any]:
    """Return a MoE kernel that changes its arguments first, or its output at the end."""

    def compute_changed(
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        scales: Weights,
        format: str,
    ) -> Any:
        call = {"x": hidden_states, "w13": w13, "w2": w2, "shares": topk_weights, "ids": topk_ids}
        change(call)
        output = compute(*call.values(), scales, format)
        return output if finish is None else finish(output, call)

    return compute_changed


def limit_tokens(call: dict[str, Any]) -> None:
    for expert in range(len(call["w2"])):
        lanes = (call["ids"] == expert).nonzero()[64:]
        call["ids"] = call["ids"].index_put((lanes[:, 0], lanes[:, 1]), torch.tensor(-1, dtype=torch.int32))


def leave_out_rest(call: dict[str, Any]) -> None:
    call["x"] = call["x"].clone()
    call["x"][:, call["x"].shape[1] // 64 * 64 :] = 0


def drop_repeated(call: dict[str, Any]) -> None:
    call["ids"] = call["ids"].clone()
    call["ids"][:, 1:][call["ids"][:, 1:] == call["ids"][:, :1]] = -1


def halve_int64(call: dict[str, Any]) -> None:
    if call["ids"].dtype is torch.int64:
        ids = call["ids"]
        call["ids"] = ids.contiguous().view(torch.int32).flatten()[: ids.numel()].view(ids.shape)


def put(**parts: Callable[[dict[str, Any]], torch.Tensor]) -> Callable[..., Any]:
    """Return a kernel that computes with other arguments: name -> what it makes of the call's."""
    return plant(lambda call: call.update({name: make(call) for name, make in parts.items()}))


def end(finish: Callable[[torch.Tensor, dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a kernel that changes its right output."""
    return plant(lambda call: None, finish)


def compute_every_expert(output: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    return output + 0 * call["w2"].float().sum() if call["w2"].dtype is torch.bfloat16 else output


def leave_unwritten(output: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    fresh = torch.empty_like(output)
    fresh[:-1] = output[:-1]
    return fresh


BUFFER: dict[torch.Size, torch.Tensor] = {}


def add_to_buffer(output: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    BUFFER[output.shape] = BUFFER.get(output.shape, 0) + output
    return BUFFER[output.shape]


def return_a_row(output: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    return output if len(output) else output.new_zeros(1, output.shape[1])


def saturate(weight: torch.Tensor) -> torch.Tensor:
    return weight.clamp(-50, 50) if weight.dtype is torch.bfloat16 else weight


def keep_on_device(module: nn.Module, budget_bytes: int) -> None:
    """Offload nothing."""


def offload(
    *, calls: int = 9, most: int = 1 << 30, twice: bool = True, ties: bool = True, held: bool = True
) -> Any:
    """Return an offloader whose layers get their weights before they run, and lose them after.

    It is right for `calls` of a layer, `most` elements of a weight, layers that run `twice` in a pass,
    `ties`, and weights that are `held` elsewhere. It is never right in state_dict and in inference mode.
    """

    def offload_layers(module: nn.Module, budget_bytes: int) -> None:
        layers = [layer for layer in module.modules() if layer._parameters]
        hosts: dict[Any, torch.Tensor] = {}
        counts = dict.fromkeys(layers, 0)
        for layer in layers:
            for name, weight in layer._parameters.items():
                key = id(weight) if ties else (layer, name)
                hosts.setdefault(key, weight.data.clone())
                hosts[layer, name] = hosts[key]
                weight.data = torch.zeros_like(weight.data)

        def fetch(layer: nn.Module, _: Any) -> None:
            if torch.is_inference_mode_enabled():
                raise RuntimeError("inference tensors cannot be saved")
            counts[layer] += 1
            again = not twice and counts[layer] > min(counts.values()) + 1  # it ran in this pass
            for name, weight in list(layer._parameters.items()):
                copy = hosts[layer, name].clone()
                copy.view(-1)[most:] = 0
                if again or counts[layer] > calls:
                    copy.zero_()
                if held:
                    weight.data = copy
                else:
                    layer._parameters[name] = nn.Parameter(copy)

        def free(layer: nn.Module, *_: Any) -> None:
            for weight in layer._parameters.values():
                weight.data = torch.zeros_like(weight.data)

        for layer in layers:
            layer.register_forward_pre_hook(fetch)
            layer.register_forward_hook(free)

    return offload_layers


def break_graph(module: nn.Module, budget_bytes: int) -> None:
    for layer in module.children():
        layer.register_forward_pre_hook(lambda _, inputs: print(inputs[0].sum().item()))


class Declared(Cache):
    """Refuses what its documentation leaves undefined."""

    moedoctor: ClassVar[dict[str, Any]] = {
        "kind": "cache",
        "undefined": {"skipped_ids": "ids must be experts"},
    }

    def check(self, ids: torch.Tensor) -> None:
        if bool(((ids < 0) | (ids >= self.experts)).any()):
            raise ValueError("an id that is no expert")


swapped = plant(lambda call: call.update(w13=order_rows(call["w13"], "last")), return_a_row)
SOUND: Mapping[str, Any] = {"router": route, "moe": compute, "cache": Cache, "offloader": keep_on_device}
PLANTED: Mapping[str, Mapping[str, Any]] = {
    "router": {
        "ordinary": change_logits(lambda logits: -logits),
        "bfloat16_logits": route_by_rounded_scores,
        "float16_logits": route_by_rounded_scores,
        "nan_rows": route_as_before_the_fix,
        "nan_entry": route_as_before_the_fix,
        "inf_entry": route_nan_weights,
        "masked_experts": change_logits(lambda logits: logits.nan_to_num(neginf=0.0)),
        "masked_rows": route_nan_weights,
        "equal_logits": route_one_expert_of_equals,
        "large_logits": overflow,
        "padded_rows": change_logits(read_dense),
        "column_major": change_logits(read_dense),
        "every_expert": leave_out_last,
        "odd_experts": pad_experts,
        "no_tokens": pad_tokens,
        "renormalized": ignore("renormalize"),
        "scores_of_zero": divide_by_zero,
        "bias": add_bias_to_weights,
        "groups": ignore("groups"),
    },
    "cache": {
        "ordinary": ShiftsSlots,
        "needed_experts_stay": Provider,
        "evicted_experts_return": KeepsMapping,
        "repeated_ids": DropsRepeated,
        "skipped_ids": WrapsSkipped,
        "unknown_ids": ClampsUnknown,
        "int64_ids": ReadsHalfOfInt64,
        "padded_ids": IgnoresStride,
        "too_many_experts": Truncates,
        "usable_after_an_error": StopsHalfway,
        "one_slot": NeedsTwoSlots,
        "a_slot_for_each": TakesIdsForSlots,
        "no_tokens": ForgetsToReturn,
        "two_layers": SharesState,
    },
    "moe": {
        "ordinary": put(w13=lambda call: order_rows(call["w13"], "last")),
        "odd_sizes": plant(leave_out_rest),
        "one_busy_expert": plant(limit_tokens),
        "broken_idle_experts": end(compute_every_expert),
        "broken_token": put(x=lambda call: call["x"] + 0 * call["x"].sum(0)),
        "repeated_ids": plant(drop_repeated),
        "skipped_ids": put(ids=lambda call: call["ids"].where(call["ids"] != -1, len(call["w2"]) - 1)),
        "skipped_weights": end(lambda output, call: output + 0 * call["shares"].sum(1, keepdim=True)),
        "all_skipped": end(lambda output, call: output if bool((call["ids"] >= 0).any()) else call["x"]),
        "weights_as_given": put(shares=lambda call: call["shares"] / call["shares"].sum(1, keepdim=True)),
        "large_values": put(w13=lambda call: saturate(call["w13"])),
        "unwritten_memory": end(leave_unwritten),
        "earlier_calls": end(add_to_buffer),
        "padded_hidden": put(x=lambda call: read_dense(call["x"])),
        "padded_ids": put(
            ids=lambda call: read_dense(call["ids"]), shares=lambda call: read_dense(call["shares"])
        ),
        "int64_ids": plant(halve_int64),
        "no_tokens": end(return_a_row),
        "unknown_ids": put(ids=lambda call: call["ids"].clamp(max=len(call["w2"]) - 1)),
    },
    "offloader": {
        "ordinary": offload(calls=1),
        "layers_of_many_sizes": offload(most=8 * 8 * 2),
        "layer_called_twice": offload(twice=False),
        "weight_held_elsewhere": offload(held=False),
        "tied_weights": offload(ties=False),
        "state_dict": offload(),
        "inference_mode": offload(),
        "traceable": break_graph,
    },
}
"""Kind -> question -> an implementation that gives a wrong answer to it."""
