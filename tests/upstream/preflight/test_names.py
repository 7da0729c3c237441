"""Names and shapes that are made from the parameters of a model, with a model in vLLM's place."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedoctor.upstream.preflight.names import list_tensors


def make_parameter(*shape: int, dtype: torch.dtype = torch.bfloat16, **attributes: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    vars(parameter).update(attributes)
    return parameter


def make_module(attributes: dict[str, Any], **parameters: torch.nn.Parameter) -> torch.nn.Module:
    module = torch.nn.Module()
    vars(module).update(attributes)
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    return module


def test_merged_layers_and_experts_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Module()
    model.embed = make_module({"org_vocab_size": 10}, weight=make_parameter(64, 4))
    model.qkv_proj = make_module(
        {"output_sizes": [384, 160]},
        weight=make_parameter(544, 4, dtype=torch.float8_e4m3fn, output_dim=0),
        weight_scale_inv=make_parameter(5, 1, dtype=torch.float32, output_dim=0),  # blocks of 128 rows
        input_scale=make_parameter(2, dtype=torch.float32),
    )
    model.experts = make_module(
        {"moe_config": SimpleNamespace(is_act_and_mul=True)},
        w13_weight=make_parameter(2, 12, 4),
        w13_scale=make_parameter(2, 2, dtype=torch.float32),
        w2_weight=make_parameter(2, 4, 6),
    )
    sides = {"gate": "w13_", "up": "w13_", "down": "w2_"}
    mapping = [
        (f"experts.routed_experts.{part}", f"experts.{expert}.{side}_proj.", expert, side)
        for expert in (0, 1)
        for side, part in sides.items()
    ]
    utils = SimpleNamespace(
        get_moe_expert_mapping=lambda model: mapping,
        get_packed_modules_mapping=lambda model: {"qkv_proj": ["q_proj", "kv_proj"]},
    )
    monkeypatch.setitem(sys.modules, "vllm.model_executor.utils", utils)
    tensors = {name: (kind, tuple(shape)) for name, kind, shape in list_tensors(model)}
    each = {
        "gate_proj.weight": ("BF16", (6, 4)),
        "up_proj.weight": ("BF16", (6, 4)),
        "gate_proj.scale": ("F32", ()),
        "up_proj.scale": ("F32", ()),
        "down_proj.weight": ("BF16", (4, 6)),
    }
    assert tensors == {
        "embed.weight": ("BF16", (10, 4)),
        "q_proj.weight": ("F8_E4M3", (384, 4)),
        "kv_proj.weight": ("F8_E4M3", (160, 4)),
        "q_proj.weight_scale_inv": ("F32", (3, 1)),
        "kv_proj.weight_scale_inv": ("F32", (2, 1)),
        "q_proj.input_scale": ("F32", ()),
        "kv_proj.input_scale": ("F32", ()),
        **{f"experts.{expert}.{name}": entry for expert in (0, 1) for name, entry in each.items()},
    }
    mapping.clear()
    with pytest.raises(LookupError, match="does not have"):
        list(list_tensors(model))
