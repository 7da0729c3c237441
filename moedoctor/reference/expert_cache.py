"""The expert cache of vllm-project/vllm#37190, restated, and a layer to test expert caches with.

`PrRule` is the bookkeeping of `expert_weight_provider.py` in the PR at 6d0ac79f. It walks through the
distinct experts of a call in ascending order. A hit raises the expert's frequency. A miss takes a free slot,
or else the slot of the resident expert with the lowest frequency over age, even if the same call needs that
expert. The kernel's mapping is updated for the expert that comes in, but not for the expert that leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moedoctor.reference.agreement import relative_error
from moedoctor.reference.moe import MoeWeights, forward

# E = experts, C = slots, T = tokens, K = top_k, H = hidden size, I = intermediate size

POLICIES = ("lfru", "lru")
"""`lfru` is the PR's policy; `lru` was its first version."""
CLOCKS = ("access", "call")
"""The unit of age: the PR counts single accesses, a fork of it counts calls."""


class PrRule:
    """Slots under the PR's rule; drive it with `moedoctor.fixes.eviction.replay`."""

    def __init__(
        self, num_experts: int, capacity: int, *, policy: str = "lfru", clock: str = "access"
    ) -> None:
        if policy not in POLICIES or clock not in CLOCKS:
            raise ValueError(f"expected policy {' or '.join(POLICIES)}, clock {' or '.join(CLOCKS)}")
        self.capacity = capacity
        self.slot_of = [0] * num_experts
        """[E]: the PR's mapping. It starts as zeros and keeps its value for an evicted expert."""
        self.expert_of = [-1] * capacity
        """[C]: what each slot really holds."""
        self.loads: list[tuple[int, int]] = []
        """(expert, slot) of the last call, in the order of its copies; a slot may appear twice."""
        self.dropped: list[int] = []
        """Experts of the last call that were left out because there were not enough slots."""
        self._policy, self._clock_kind, self._clock = policy, clock, 0
        self._frequency = [0] * num_experts
        self._last = [0] * num_experts
        self._resident: dict[int, int] = {}
        self._free = list(range(capacity))

    def split(self, experts: Iterable[int]) -> list[list[int]]:
        """Return what the PR computes of a call that does not fit: the highest expert ids, in one part."""
        return [sorted(set(experts))[-self.capacity :]]

    def step(self, experts: Sequence[int]) -> int:
        """Place the distinct, ascending `experts` of a call and return how many had to be loaded."""
        self.loads = []
        placed = experts[-self.capacity :]
        self.dropped = list(experts[: len(experts) - len(placed)])
        self._clock += self._clock_kind == "call"
        for expert in placed:
            if expert in self._resident:
                self._frequency[expert] += 1
            else:
                slot = self._free.pop() if self._free else self._resident.pop(self._choose_victim())
                self._resident[expert] = slot
                self.slot_of[expert], self.expert_of[slot] = slot, expert
                self._frequency[expert] = 1
                self.loads.append((expert, slot))
            self._clock += self._clock_kind == "access"
            self._last[expert] = self._clock
        return len(self.loads)

    def _choose_victim(self) -> int:
        if self._policy == "lru":
            return min(self._resident, key=self._last.__getitem__)
        frequency, last, now = self._frequency, self._last, self._clock
        return min(self._resident, key=lambda expert: frequency[expert] / (now - last[expert] + 1))


class PrCache:
    """The PR's cache: `PrRule`, and one blocking copy for each tensor of a loaded expert."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        capacity: int,
        *,
        device: str,
        policy: str = "lfru",
        clock: str = "access",
    ) -> None:
        experts = next(iter(weights.values())).shape[0]
        self.rule = PrRule(experts, capacity, policy=policy, clock=clock)
        self._host = weights
        self.slots = {
            name: torch.zeros(capacity, *tensor.shape[1:], dtype=tensor.dtype, device=device)
            for name, tensor in weights.items()
        }
        self._mapping = torch.zeros(experts, dtype=torch.int32, device=device)  # [E]

    def acquire(self, ids: torch.Tensor, needed: torch.Tensor | None = None) -> torch.Tensor:
        """Load the experts `needed`, or all of `ids` [T, K], and return the kernel's slots [T, K]."""
        self.rule.step((ids if needed is None else needed).unique().tolist())
        for expert, slot in self.rule.loads:
            for name, buffer in self.slots.items():
                buffer[slot].copy_(self._host[name][expert])
            self._mapping[expert] = slot
        return self._mapping[ids.long()].to(ids.dtype)  # [T, K]


@dataclass(frozen=True)
class Problem:
    """One layer with all its experts in host memory, and the output that it should have."""

    weights: Mapping[str, torch.Tensor]
    """``w13`` [E, 2I, H] and ``w2`` [E, H, I], float32, on the host."""
    device: str

    @classmethod
    def make(cls, experts: int, hidden_size: int, intermediate_size: int, device: str, seed: int) -> Problem:
        """Draw random weights that keep the size of what passes through them."""
        draw = torch.Generator().manual_seed(seed)
        rows = 2 * intermediate_size
        w13 = torch.randn(experts, rows, hidden_size, generator=draw) / hidden_size**0.5  # [E, 2I, H]
        w2 = torch.randn(experts, hidden_size, intermediate_size, generator=draw)  # [E, H, I]
        return cls({"w13": w13, "w2": w2 / intermediate_size**0.5}, device)

    def draw_tokens(self, count: int, seed: int) -> torch.Tensor:
        """Draw hidden states, float32 [count, H] on the device."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.weights["w13"].shape[2], generator=draw).to(self.device)  # [T, H]

    def compute_expected(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the output with every expert at hand, float32 [T, H]."""
        here = {name: tensor.to(self.device) for name, tensor in self.weights.items()}
        return forward(x, MoeWeights.from_tensors(here), topk_weights, topk_ids)


class Difference(NamedTuple):
    """The difference between two outputs [T, H]."""

    rows: torch.Tensor
    """bool [T]: rows that differ by more than the tolerance."""
    worst: float
    """The largest relative error of a row."""


def differ(output: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> Difference:
    """Compare two outputs [T, H]; the default `tolerance` is more than rounding in float32 can explain."""
    errors = relative_error(output, expected)  # [T]
    return Difference(errors > tolerance, float(errors.max()) if len(errors) else 0.0)
