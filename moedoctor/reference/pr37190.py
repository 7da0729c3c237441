"""The bookkeeping of vllm-project/vllm#37190, restated: which expert it puts where, and what it believes.

From `expert_weight_provider.py` as it stood in the PR at 6d0ac79f. It walks through the distinct experts of a
call in ascending order. A hit raises the expert's frequency. A miss takes a free slot, else that of the
resident with the lowest frequency over age, whichever that is. The mapping that the kernel reads is written
for the expert that is placed and stays as it is for the one that had to go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

POLICIES = ("lfru", "lru")
"""`lfru` is the PR's; `lru` was its first version."""
CLOCKS = ("access", "call")
"""What age counts: the PR counts single accesses, a fork of it calls."""


class PrRule:
    """Slots under the PR's rule; drive it with `moedoctor.fixes.eviction.replay`."""

    def __init__(
        self, num_experts: int, capacity: int, *, policy: str = "lfru", clock: str = "access"
    ) -> None:
        if policy not in POLICIES or clock not in CLOCKS:
            raise ValueError(f"expected policy {' or '.join(POLICIES)}, clock {' or '.join(CLOCKS)}")
        self.capacity = capacity
        self.slot_of = [0] * num_experts
        """[E]: the PR's mapping: zeros at first, and unchanged for an expert that was evicted."""
        self.expert_of = [-1] * capacity
        """[capacity]: what each slot really holds."""
        self.loads: list[tuple[int, int]] = []
        """(expert, slot) of the last call, in the order of its copies; a slot may be there twice."""
        self.dropped: list[int] = []
        """Experts of the last call that were left out because there were more than slots."""
        self._policy, self._clock_kind, self._clock = policy, clock, 0
        self._frequency = [0] * num_experts
        self._last = [0] * num_experts
        self._resident: dict[int, int] = {}
        self._free = list(range(capacity))

    def split(self, experts: Iterable[int]) -> list[list[int]]:
        """What is left of a call that does not fit: the experts with the highest ids, as one part."""
        return [sorted(set(experts))[-self.capacity :]]

    def step(self, experts: Sequence[int]) -> int:
        """Place the distinct, ascending `experts` of a call; how many had to be loaded."""
        self.loads = []
        kept = experts[-self.capacity :]
        self.dropped = list(experts[: len(experts) - len(kept)])
        self._clock += self._clock_kind == "call"
        for expert in kept:
            if expert in self._resident:
                self._frequency[expert] += 1
            else:
                slot = self._free.pop() if self._free else self._resident.pop(self._victim())
                self._resident[expert] = slot
                self.slot_of[expert], self.expert_of[slot] = slot, expert
                self._frequency[expert] = 1
                self.loads.append((expert, slot))
            self._clock += self._clock_kind == "access"
            self._last[expert] = self._clock
        return len(self.loads)

    def _victim(self) -> int:
        if self._policy == "lru":
            return min(self._resident, key=self._last.__getitem__)
        frequency, last, now = self._frequency, self._last, self._clock
        return min(self._resident, key=lambda one: frequency[one] / (now - last[one] + 1))
