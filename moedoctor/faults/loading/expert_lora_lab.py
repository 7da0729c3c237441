"""MD029 in the child: an adapter as it is, and in the layout that the model reads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from moedoctor.diagnose.checkpoint.adapter_layout import Layout, convert_adapter, split_experts
from moedoctor.diagnose.preflight.checkpoint_load import make_adapter_flags
from moedoctor.faults.loading.expert_lora import ExpertLoraParameters
from moedoctor.faults.loading.loading_lab import ask_installed
from moedoctor.reference.checkpoints import Tensors
from moedoctor.results import Case, Evidence

# E = experts, r = rank, H = hidden size, I = intermediate size

_LAYER = "base_model.model.model.layers.0."
_MODULE = f"{_LAYER}mlp.experts"
_PARTS = ("gate", "up", "down")


def model(case: Case, parameters: ExpertLoraParameters, release: object) -> Evidence:
    """Apply the adapter by the rules of 0.33.0, and compare what each expert gets with B @ A of the file."""
    tensors = make_adapter(parameters)
    meant = compute_changes(tensors, parameters)
    given = tensors
    if case.subject == "fixed":
        given = convert_adapter(tensors, parameters.reads, parameters.experts)
    try:
        applied = compute_changes(apply(given, parameters.reads, parameters.experts), parameters)
    except (ValueError, AssertionError) as error:
        return {"stopped": f"{type(error).__name__}: {error}", "wrong": None, "right": None}
    lost = sum(not torch.allclose(applied[key], meant[key], atol=1e-12) for key in meant)
    return {
        "stopped": None,
        "wrong": f"{lost} of {len(meant)} matrices do not get their change" if lost else None,
        "right": f"all {len(meant)} matrices get their change",
    }


def library(case: Case, parameters: ExpertLoraParameters, release: object) -> Evidence:
    """Ask the installed vLLM to apply the adapter, which changes the attention, too."""
    settings = {"peft_type": "LORA", "r": parameters.rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
    tensors = make_adapter(parameters)
    tensors[f"{_LAYER}self_attn.q_proj.lora_A.weight"] = torch.zeros(parameters.rank, parameters.hidden)
    tensors[f"{_LAYER}self_attn.q_proj.lora_B.weight"] = torch.zeros(parameters.hidden, parameters.rank)
    sizes = parameters.model_dump(include={"hidden", "intermediate", "experts", "seed"})
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        held = {key: tensor.bfloat16().contiguous() for key, tensor in tensors.items()}
        save_file(held, f"{name}/adapter_model.safetensors")
        Path(name, "adapter_config.json").write_text(json.dumps({**settings, "bias": "none"}))
        return ask_installed("bf16", None, *make_adapter_flags(Path(name)), layers=1, **sizes)


def make_adapter(parameters: ExpertLoraParameters) -> Tensors:
    """Return the adapter's file, with its mistake."""
    generator = torch.Generator().manual_seed(parameters.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, width, rank = parameters.hidden, parameters.intermediate, parameters.rank
    each: Tensors = {}
    for expert in range(parameters.experts):
        for part in _PARTS:
            inputs, outputs = (width, hidden) if part == "down" else (hidden, width)
            each[f"{_MODULE}.{expert}.{part}_proj.lora_A.weight"] = draw(rank, inputs)  # [r, inputs]
            each[f"{_MODULE}.{expert}.{part}_proj.lora_B.weight"] = draw(outputs, rank)  # [outputs, r]
    columns = rank * parameters.experts  # as PEFT writes it: gate and up share A
    up = f"{_MODULE}.base_layer"
    stacked = {f"{up}.lora_A.weight": draw(columns, hidden), f"{up}.lora_B.weight": draw(2 * width, columns)}
    if parameters.mistake == "gate_and_up_alone":
        return stacked
    down = {"lora_A.weight": draw(columns, width), "lora_B.weight": draw(hidden, columns)}
    stacked |= {f"{_MODULE}.{name}": tensor for name, tensor in down.items()}
    if parameters.mistake == "other_layout":
        return stacked if parameters.reads == "each" else each
    lost = ".1." if parameters.mistake == "missing_expert" else ".up_proj."
    return {name: tensor for name, tensor in each.items() if lost not in name.removeprefix(_MODULE)}


def apply(tensors: Tensors, reads: Layout, experts: int) -> Tensors:
    """Return what 0.33.0 takes of an adapter. Raises its ValueError or AssertionError.

    vllm/lora/lora_model.py:246-283 checks names, but none with base_layer; lora_weights.py:206 and
    model_manager.py:847-1050 and 1310-1325 merge what belongs to a module, and leave out the rest.
    """
    modules = {name.partition(".lora_")[0] for name in tensors}
    parts = [f"{_MODULE}.{expert}.{part}_proj" for expert in range(experts) for part in _PARTS]
    known = {_MODULE, *(parts if reads == "each" else ())}
    foreign = sorted(name for name in modules - known if "base_layer" not in name)
    if foreign:
        raise ValueError(f"expected target modules in {sorted(known)[:2]} but received {foreign[:1]}")
    if reads == "each":
        if _MODULE in modules:
            raise ValueError(f"LoRA adapter 1 contains fused 3D MoE weights for '{_MODULE}'")
        if modules & {*parts} and not modules >= {*parts}:
            raise AssertionError("assert w1_lora is not None")
        return {name: tensor for name, tensor in tensors.items() if "base_layer" not in name}
    return tensors if _MODULE in modules else {}


def compute_changes(
    tensors: Mapping[str, torch.Tensor], parameters: ExpertLoraParameters
) -> dict[tuple[int, str], torch.Tensor]:
    """Return B @ A [outputs, inputs] of each (expert, part); zeros where the adapter has none."""
    split = split_experts(tensors, parameters.experts).get(_MODULE, {})
    sizes = dict.fromkeys(("gate", "up"), (parameters.intermediate, parameters.hidden))
    sizes["down"] = (parameters.hidden, parameters.intermediate)
    return {
        (expert, part): split[expert, part][1] @ split[expert, part][0]
        if (expert, part) in split
        else torch.zeros(sizes[part], dtype=torch.float64)
        for expert in range(parameters.experts)
        for part in _PARTS
    }
