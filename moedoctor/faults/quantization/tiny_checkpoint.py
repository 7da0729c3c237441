"""A tiny checkpoint that is written, looked at by `lint` and loaded again, for faults of checkpoints."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.reference.checkpoints import Change, Tensors, write_qwen3_moe
from moedoctor.reference.nvfp4 import Nvfp4


@dataclass(frozen=True)
class Loaded:
    """What a loader sees of a checkpoint, and what `moedoctor lint` says about it."""

    tensors: Tensors
    config: dict[str, Any]
    lint: tuple[str, ...]
    """Ids of the findings."""


def write_and_load(
    change: Change, *, scheme: str, hidden: int, intermediate: int, experts: int, seed: int
) -> Loaded:
    """Write a Qwen3-MoE checkpoint of one layer with `change` made to it, and read it back."""
    seen: dict[str, Any] = {}

    def changed(tensors: Tensors, config: dict[str, Any]) -> None:
        change(tensors, config)
        seen.update(config)

    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folder = write_qwen3_moe(
            Path(name) / "checkpoint",
            scheme=scheme,  # type: ignore[arg-type]
            layers=1,
            hidden=hidden,
            intermediate=intermediate,
            experts=experts,
            seed=seed,
            change=changed,
        )
        found = tuple(dict.fromkeys(one.id for one in lint(folder).findings))
        return Loaded(load_file(folder / "model.safetensors"), seen, found)


def projection(tensors: Tensors, name: str, experts: int) -> Nvfp4:
    """``gate``, ``up`` or ``down`` of all experts of layer 0, each with its own global scale."""
    prefixes = [f"model.layers.0.mlp.experts.{expert}.{name}_proj" for expert in range(experts)]

    def stacked(part: str) -> torch.Tensor:
        return torch.stack([tensors[f"{prefix}.{part}"] for prefix in prefixes])

    scales = torch.stack([tensors[f"{one}.weight_scale"].view(torch.uint8) for one in prefixes])
    return Nvfp4(stacked("weight"), scales.view(torch.float8_e4m3fn), stacked("weight_scale_2"))
