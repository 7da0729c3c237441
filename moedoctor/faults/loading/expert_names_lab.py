"""MD021 in the child: the loaders of two releases, with a checkpoint as it is and with our names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from moedoctor.faults.loading.expert_names import ExpertNamesParameters, Mistake
from moedoctor.faults.loading.loading_lab import ask_installed
from moedoctor.fixes.moe.expert_names import rename_experts
from moedoctor.reference.checkpoints import Tensors, make_expert_tensors
from moedoctor.results import Case, Evidence

# E = experts, I = intermediate size, H = hidden size

_LAYER = "model.layers.0.mlp."
_SHARDS = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
Entry = tuple[str, str, int, str]
"""Parameter, part of a tensor's name, expert (of a tensor of all: which half), and shard."""


def model(case: Case, parameters: ExpertNamesParameters, release: object) -> Evidence:
    """Load the checkpoint by the loader of a release, with its names or with ours."""
    generator = torch.Generator().manual_seed(parameters.seed)
    hidden, width = parameters.hidden, parameters.intermediate
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    tensors: Tensors = {}
    for expert in range(parameters.experts):
        drawn = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
        for name, tensor in make_expert_tensors("bf16", drawn).items():
            tensors[f"{_LAYER}experts.{expert}.{name}"] = tensor
    expected, _ = load(tensors, parameters)
    change_names(tensors, parameters.mistake)
    given = rename_experts(tensors, hidden) if case.subject == "fixed" else tensors
    try:
        loaded, skipped = load(given, parameters)
    except AttributeError as error:
        return {"stopped": f"AttributeError: {error}", "wrong": None, "right": None}
    total = sum(tensor.numel() for tensor in expected.values())
    wrong = sum(int((loaded[name] != expected[name]).sum()) for name in expected)
    return {
        "stopped": None,
        "skipped": len(skipped),
        "wrong": f"{wrong / total:.0%} of the values are what the memory held" if wrong else None,
        "right": f"all {total} values are the checkpoint's",
    }


def library(case: Case, parameters: ExpertNamesParameters, release: object) -> Evidence:
    """Ask the installed vLLM to load the checkpoint."""
    sizes = parameters.model_dump(include={"hidden", "intermediate", "experts", "seed"})
    return ask_installed(
        "bf16", lambda tensors, config: change_names(tensors, parameters.mistake), layers=1, **sizes
    )


def load(tensors: Mapping[str, torch.Tensor], parameters: ExpertNamesParameters) -> tuple[Tensors, list[str]]:
    """Return w13 [E, 2I, H] and w2 [E, H, I], and the tensors that were skipped.

    0.21.0: vllm/model_executor/models/qwen3_moe.py:609-659; 0.33.0:
    vllm/model_executor/layers/fused_moe/routed_experts.py:1004-1105. What is not loaded keeps what the memory
    held, here zeros. Raises AttributeError, as the newer one does.
    """
    experts, width, hidden = parameters.experts, parameters.intermediate, parameters.hidden
    w13 = torch.zeros(experts, 2, width, hidden, dtype=torch.bfloat16)
    w2 = torch.zeros(experts, hidden, width, dtype=torch.bfloat16)
    loaded = {"experts.w13_weight": w13, "experts.w2_weight": w2}
    is_new = parameters.loader == "0.33.0"
    mapping = list(make_mapping(experts, fused=is_new))
    skipped = []
    for full_name, weight in tensors.items():
        name = full_name.removeprefix(_LAYER)
        fused = is_new and weight.dim() == 3
        matches = [entry for entry in mapping if entry[1] in name]
        for parameter, part, expert, shard in matches if fused else matches[:1]:
            target = name.replace(part, parameter)
            if target not in loaded:  # the older loader skips every name of a mistake
                attribute = target.removeprefix("experts.")
                raise AttributeError(
                    f"Layer {_LAYER}experts has no parameter {attribute!r} for checkpoint weight {name!r}"
                )
            places: slice | int = slice(None) if fused else expert
            if shard == "w2":
                w2[places] = weight
            else:
                half = weight.chunk(2, dim=1)[expert] if fused else weight
                w13[places, int(shard == "w3")] = half
        if not matches:
            skipped.append(full_name)
    return loaded, skipped


def make_mapping(experts: int, *, fused: bool) -> Iterator[Entry]:
    """Give the entries in the releases' order: routed_experts.py:1162-1291, fused_moe/layer.py:1600-1616."""
    if fused:
        yield "experts.w13_weight", "experts.gate_up_proj", 0, "w1"
        yield "experts.w13_weight", "experts.gate_up_proj", 1, "w3"
        yield "experts.w2_weight", "experts.down_proj", 0, "w2"
    for expert in range(experts):
        for shard, name in _SHARDS:
            owner = "experts.w2_" if shard == "w2" else "experts.w13_"
            yield owner, f"experts.{expert}.{name}.", expert, shard


def change_names(tensors: Tensors, mistake: Mistake) -> None:
    """Rename the experts of layer 0, or put them into two tensors, [E, 2I, H] and [E, H, I]."""
    names = [name for name in tensors if name.startswith(f"{_LAYER}experts.")]
    for name in names if mistake in RENAMED else ():
        new = name
        for old, other in RENAMED[mistake]:
            new = new.replace(old, other)
        tensors[new] = tensors.pop(name)
    if mistake in STACKED:
        parts: dict[str, list[torch.Tensor]] = {}
        for name in names:
            parts.setdefault(name.split(".")[-2], []).append(tensors.pop(name))
        gate, up, w2 = (torch.stack(parts[name]) for name in ("gate_proj", "up_proj", "down_proj"))
        gate_up, down = (f"{_LAYER}experts.{name}" for name in STACKED[mistake])
        tensors |= {gate_up: torch.cat([gate, up], 1), down: w2}


RENAMED: Mapping[str, Sequence[tuple[str, str]]] = {
    "gate_renamed": [("gate_proj", "w1_proj")],
    "other_family": [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")],
    "numbered": [(".experts.", ".experts.expert_")],
}
STACKED: Mapping[str, Sequence[str]] = {
    "one_tensor": ("gate_up_proj", "down_proj"),
    "one_tensor_renamed": ("gate_up_projection", "down_projection"),
}
