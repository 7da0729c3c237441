"""A LoRA adapter of experts in the layout of names that a model of vLLM reads (MD029)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Layout = Literal["each", "stacked"]
"""``experts.0.gate_proj.lora_A`` for each expert, or ``experts.base_layer.lora_A`` for gate and up of all."""
_EACH = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.lora_([AB])\.weight")
_STACKED = re.compile(r"(.+\.experts)(\.base_layer)?\.lora_([AB])\.weight")
_PARTS = ("gate", "up", "down")

# E = experts, r = rank, H = hidden size, I = intermediate size; A is [r, inputs], B is [outputs, r]


def split_experts(
    tensors: Mapping[str, torch.Tensor], experts: int
) -> dict[str, dict[tuple[int, str], list[torch.Tensor]]]:
    """Return, for each module of experts, the matrices A [r, inputs] and B [outputs, r] of (expert, part).

    Stacked, A is [E * r, inputs] and B [outputs, r * E], where the experts of one rank follow each other. The
    rows of ``base_layer`` are those of all gates, then of all ups, which share A.
    """
    found: dict[str, dict[tuple[int, str], list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))
    for name, tensor in sorted(tensors.items()):  # A before B
        if match := _EACH.fullmatch(name):
            found[match[1]][int(match[2]), match[3]].append(tensor)
        elif match := _STACKED.fullmatch(name):
            parts = ("gate", "up") if match[2] else ("down",)
            for expert in range(experts):
                if match[3] == "A":
                    pieces = [tensor.chunk(experts)[expert]] * len(parts)
                else:
                    pieces = [*tensor.reshape(len(tensor), -1, experts)[..., expert].chunk(len(parts))]
                for part, piece in zip(parts, pieces, strict=True):
                    found[match[1]][expert, part].append(piece)
    return found


def convert_adapter(
    tensors: Mapping[str, torch.Tensor], layout: Layout, experts: int
) -> dict[str, torch.Tensor]:
    """Return an adapter whose modules of experts have this layout; other modules stay.

    What is missing of a module becomes zeros, which change nothing. Stacked, gate and up get the rank 2r,
    since each has an A of its own: --max-lora-rank must allow it, and r and lora_alpha of adapter_config.json
    stay, which give the scale. Raises ValueError for more experts, and for an A or B without the other.
    """
    import torch

    converted = {
        name: t for name, t in tensors.items() if not (_EACH.fullmatch(name) or _STACKED.fullmatch(name))
    }
    for module, given in split_experts(tensors, experts).items():
        if max(expert for expert, _ in given) >= experts or any(len(pair) != 2 for pair in given.values()):
            raise ValueError(f"{module}: expected A and B of at most {experts} experts")
        (_, part), (a, b) = next(iter(given.items()))
        hidden, width = (len(b), a.shape[1]) if part == "down" else (a.shape[1], len(b))
        pairs = {}
        for key in [(expert, part) for expert in range(experts) for part in _PARTS]:
            inputs, outputs = (width, hidden) if key[1] == "down" else (hidden, width)
            pairs[key] = given.get(key) or [a.new_zeros(len(a), inputs), a.new_zeros(outputs, len(a))]
        if layout == "each":
            for (expert, part), pair in pairs.items():
                for side, tensor in zip("AB", pair, strict=True):
                    name = f"{module}.{expert}.{part}_proj.lora_{side}.weight"
                    converted[name] = tensor.contiguous().clone()
            continue
        for place, parts in ((f"{module}.base_layer", ("gate", "up")), (module, ("down",))):
            shared = [[pairs[expert, part] for part in parts] for expert in range(experts)]
            rows = torch.cat([pair[0] for each in shared for pair in each])  # [E * r * parts, inputs]
            columns = torch.stack([torch.block_diag(*(pair[1] for pair in each)) for each in shared], -1)
            converted[f"{place}.lora_A.weight"] = rows
            converted[f"{place}.lora_B.weight"] = columns.flatten(1)  # [outputs, r * parts * E]
    return converted
