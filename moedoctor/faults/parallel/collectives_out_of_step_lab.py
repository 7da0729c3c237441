"""The lab of MD028: steps of data-parallel ranks with experts, through gloo with a short time limit.

Each layer gathers the tokens of all ranks, multiplies them by the rank's number, and adds the ranks up: two
collectives, as dispatch and combine are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch

from moedoctor.faults.parallel.collectives_out_of_step import CollectivesOutOfStepParameters
from moedoctor.faults.parallel.ranks import Ended, Rank, run_ranks
from moedoctor.results import Case, Evidence


def model(case: Case, parameters: CollectivesOutOfStepParameters, release: None) -> Evidence:
    """Run one step on all ranks, and say which rank the others wait for."""
    step = step_alone if case.subject == "faulty" else step_together
    ends = run_ranks(parameters.ranks, lambda rank: step(rank, parameters), parameters.seconds)
    factor = (parameters.ranks * (parameters.ranks + 1) // 2) ** parameters.layers
    wrong = [
        end.result is not None and not bool((end.result == factor * make_batch(number, parameters)).all())
        for number, end in enumerate(ends)
    ]
    return {
        "ranks": parameters.ranks,
        "ranks_waiting": sum("timed out" in str(end.error).lower() for end in ends),
        "ranks_stopped": sum(isinstance(end.error, AssertionError) for end in ends),
        "ranks_wrong": sum(wrong),
        "named": name_difference(ends),
        "errors": [str(end.error) for end in ends if end.error is not None],
    }


def name_difference(ends: Sequence[Ended]) -> str:
    """Return the first collective that not all ranks called, with the ranks; empty if all called the same."""
    for number, end in enumerate(ends):
        if isinstance(end.error, AssertionError):
            return f"rank {number} stopped before call {len(end.calls) + 1}: {end.error}"
    for place, calls in enumerate(zip_longest(*(end.calls for end in ends), fillvalue="nothing"), start=1):
        if len(set(calls)) > 1:
            ranks = ", ".join(f"rank {number} {name}" for number, name in enumerate(calls))
            return f"call {place} differs: {ranks}"
    return ""


def make_batch(number: int, parameters: CollectivesOutOfStepParameters) -> torch.Tensor:
    """Return the tokens [T] of a rank: the last has none if it idles, and fewer than the first otherwise."""
    last = number == parameters.ranks - 1
    count = 0 if last and parameters.way == "idle_rank" else parameters.tokens - (number > 0)
    return torch.arange(1, count + 1, dtype=torch.float64)


def step_alone(rank: Rank, parameters: CollectivesOutOfStepParameters) -> torch.Tensor:
    """Let each rank decide for itself.

    - idle_rank: `execute_model` returns before `coordinate_batch_across_dp` if nothing is scheduled
      (vllm/v1/worker/gpu_model_runner.py:3955 of 0.33.0, without the dummy batch of its caller).
    - sizes_differ: the size that was agreed upon is compared with that of the batch, as in
      vllm/forward_context.py:104 of 0.33.0.
    - order_differs: two micro-batches on one rank, one on the others.
    """
    batch = make_batch(rank.number, parameters)  # [T]
    last = rank.number == rank.count - 1
    if not len(batch):
        return batch
    agreed = rank.gather(torch.tensor([len(batch)]), "sizes")  # [R]
    size = int(agreed.max())
    if parameters.way == "sizes_differ":
        padded = -(-len(batch) // 4) * 4 if last else size  # sizes of CUDA graphs are multiples of 4 here
        assert padded == size, f"{size} {padded}"
    return compute(
        rank, parameters.layers, batch, size, parts=2 if last and parameters.way == "order_differs" else 1
    )


def step_together(rank: Rank, parameters: CollectivesOutOfStepParameters) -> torch.Tensor:
    """Let the ranks agree on size and parts first; a rank without tokens runs a dummy batch of that size."""
    batch = make_batch(rank.number, parameters)  # [T]
    splits = parameters.way == "order_differs" and rank.number == rank.count - 1
    wishes = rank.gather(torch.tensor([[len(batch), 2 if splits else 1]]), "sizes")  # [R, 2]
    size, parts = int(wishes[:, 0].max()), int(wishes[:, 1].min())
    return compute(rank, parameters.layers, batch, size, parts)


def compute(rank: Rank, layers: int, batch: torch.Tensor, size: int, parts: int) -> torch.Tensor:
    """Return what the layers make of a batch [T], padded to `size` and, in `parts`, computed one by one."""
    x = torch.nn.functional.pad(batch, (0, size - len(batch)))  # [size]
    for layer in range(layers):
        outputs = []
        for part in range(parts):
            place = f"layer {layer}" + (f" part {part}" if parts > 1 else "")
            everything = rank.gather(x, f"dispatch of {place}")  # [R * size]
            total = rank.reduce(everything * (rank.number + 1), f"combine of {place}")  # [R * size]
            outputs.append(rank.take_shard(total, 0))  # [size]
        x = outputs[-1]
    return x[: len(batch)]
