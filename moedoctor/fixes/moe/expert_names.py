"""Expert tensors under the names, and in the layout, that every vLLM release from 0.17.1 on reads (MD021)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

NAMES: Mapping[str, tuple[str, ...]] = {
    "gate_proj": ("gate_proj", "gate", "w1", "w1_proj", "gate_projection"),
    "up_proj": ("up_proj", "up", "w3", "w3_proj", "up_projection"),
    "down_proj": ("down_proj", "down", "w2", "w2_proj", "down_projection"),
    "gate_up_proj": ("gate_up_proj", "gate_up", "w13", "w13_proj", "gate_up_projection"),
}
"""Name that is read -> the names that checkpoints use for it."""
_READ = {other: name for name, others in NAMES.items() for other in others}
_EXPERT = re.compile(
    r"(?P<layer>.+\.experts)\.(?:(?:expert_)?(?P<expert>\d+)\.)?(?P<projection>\w+)(?:\.(?P<part>\w+))?"
)


def rename_experts(tensors: Mapping[str, torch.Tensor], hidden_size: int) -> dict[str, torch.Tensor]:
    """Return the tensors with ``…experts.N.gate_proj``, ``up_proj`` and ``down_proj`` of each expert.

    A tensor of all experts, [E, 2I, H] or [E, H, 2I] for gate and up and [E, H, I] or [E, I, H] for down, is
    split. Other tensors stay as they are. Raises ValueError for a name of an expert's part that is not known,
    and for scales of all experts in one tensor.
    """
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        for new, part in ((name, tensor),) if match is None else _split(match, tensor, hidden_size):
            if new in renamed:
                raise ValueError(f"{name}: another tensor becomes {new}, too")
            renamed[new] = part
    return renamed


def _split(
    match: re.Match[str], tensor: torch.Tensor, hidden_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    projection, part = _READ.get(match["projection"]), match["part"] or "weight"
    if projection is None:
        known = ", ".join(sorted(_READ))
        raise ValueError(f"{match[0]}: unknown part of an expert, expected one of {known}")
    if match["expert"] is not None:
        yield from _split_halves(f"{match['layer']}.{match['expert']}", projection, part, tensor)
        return
    if part != "weight" or tensor.dim() != 3:
        raise ValueError(f"{match[0]}: only weights of all experts can be split, [experts, rows, columns]")
    wide = 1 if projection == "down_proj" else 2  # the dimension that has the hidden size
    if tensor.shape[wide] != hidden_size:
        tensor = tensor.transpose(1, 2)
    for expert, weight in enumerate(tensor.unbind()):
        yield from _split_halves(f"{match['layer']}.{expert}", projection, part, weight)


def _split_halves(
    place: str, projection: str, part: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one tensor, or the halves of gate and up, which are its first and last rows."""
    if projection != "gate_up_proj":
        yield f"{place}.{projection}.{part}", tensor
        return
    for name, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
        yield f"{place}.{name}.{part}", half
