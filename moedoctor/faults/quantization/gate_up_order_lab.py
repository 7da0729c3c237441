"""MD017 in the child: a kernel that reads the up half first, and loaders that forget that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from moedoctor.faults.quantization.checkpoint_lab import (
    Changes,
    compare_layer,
    list_expert_prefixes,
    make_routed_layer,
)
from moedoctor.faults.quantization.gate_up_order import GateUpOrderParameters
from moedoctor.fixes.moe.weight_layout import put_up_first
from moedoctor.reference.checkpoints import Tensors
from moedoctor.reference.moe import Weight, dequantize_expert
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.results import Case, Evidence

Loader = Callable[[Weight], Weight]
"""w13 [E, 2I, H] of the checkpoint -> w13 that the kernel is given."""


def forget_exchange(w13: Weight, *, mistake: str) -> Weight:
    """Leave out the exchange, or exchange only the values or only their scales."""
    if mistake == "not_swapped" or not isinstance(w13, Nvfp4):
        return w13
    swapped = put_up_first(w13)
    assert isinstance(swapped, Nvfp4)
    if mistake == "only_values":
        return replace(swapped, block_scales=w13.block_scales)
    return replace(swapped, packed=w13.packed)


def model(case: Case, parameters: GateUpOrderParameters, release: object) -> Evidence:
    """Run the kernel with the loader that forgets, or with ours."""
    control = functools.partial(forget_exchange, mistake=parameters.mistake)
    return measure(parameters, case.device, control if case.subject == "faulty" else put_up_first)


def library(case: Case, parameters: GateUpOrderParameters, release: object) -> Evidence:
    """Run the kernel with the installed vLLM's function."""
    from moedoctor.upstream.releases import installed

    return measure(parameters, case.device, installed.put_up_first)


def measure(parameters: GateUpOrderParameters, device: str, load: Loader) -> Evidence:
    """Compare a kernel that reads the up half first, as FlashInfer's do, with the reference.

    `load` makes the weight that the kernel is given of the checkpoint's.
    """
    problem = make_routed_layer(parameters, parameters.quantization, device)
    given = load(problem.layer.w13)
    read = [dequantize_expert(given, expert) for expert in range(parameters.experts)]  # [2I, H] each
    gate_first = torch.stack(read).roll(parameters.intermediate, 1)  # [E, 2I, H]
    tested = replace(problem.layer, w13=gate_first)
    return {"mistake": parameters.mistake, **compare_layer(tested, problem)}


def exchange_halves(tensors: Tensors, config: dict[str, Any]) -> None:
    """Store the up projection under the name of the gate, and the reverse."""
    for prefix in list_expert_prefixes():
        for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            gate, up = f"{prefix}.gate_proj.{part}", f"{prefix}.up_proj.{part}"
            tensors[gate], tensors[up] = tensors[up], tensors[gate]


def restore_halves(tensors: Tensors, config: dict[str, Any]) -> None:
    """Repair: put the fused weight of each expert into the other order."""
    exchange_halves(tensors, config)
    for prefix in list_expert_prefixes():
        names = [f"{prefix}.{half}_proj" for half in ("gate", "up")]
        scales = [tensors[f"{name}.weight_scale"].view(torch.uint8) for name in names]  # [I, H/16] each
        fused = Nvfp4(
            torch.cat([tensors[f"{name}.weight"] for name in names]),  # [2I, H/2]
            torch.cat(scales).view(torch.float8_e4m3fn),  # [2I, H/16]
            tensors[f"{names[0]}.weight_scale_2"],
        )
        restored = put_up_first(fused)
        assert isinstance(restored, Nvfp4)
        halves = zip(restored.packed.chunk(2), restored.block_scales.view(torch.uint8).chunk(2), strict=True)
        for name, (packed, half) in zip(names, halves, strict=True):
            tensors[f"{name}.weight"] = packed.contiguous()
            tensors[f"{name}.weight_scale"] = half.contiguous().view(torch.float8_e4m3fn)


CHANGES = Changes(exchange_halves, restore_halves)
engine = CHANGES.engine
