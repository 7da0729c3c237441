"""vLLM's `FusedMoEConfig`, whose fields differ by release. Imports no torch by itself."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from moedoctor.models.layer_shape import LayerShape


def make_moe_config(
    shape: LayerShape, activation: str, *, ep: bool = False, dp: bool = False, **more: Any
) -> Any:
    """Return the configuration of a layer on one GPU, or on one of two with `ep` or `dp`.

    `activation` is vLLM's name. `more` are fields of `FusedMoEConfig`, and ``all2all_backend``. Fields that
    the installed release lacks are left out.
    """
    import torch

    layers = "vllm.model_executor.layers.fused_moe"
    config = importlib.import_module(f"{layers}.config")
    parallel = {
        **dict.fromkeys(("pcp_size", "sp_size"), 1),
        "tp_size": 2 if dp and not ep else 1,
        "dp_size": 2 if dp else 1,
        "ep_size": 2 if ep else 1,
        "use_ep": ep,
        "enable_eplb": False,
        # vLLM's default since 0.17.1, used if experts and data are both split.
        "all2all_backend": more.pop("all2all_backend", "allgather_reducescatter"),
    }
    values = {
        "num_experts": shape.experts,
        "experts_per_token": shape.top_k,
        "hidden_dim": shape.hidden,
        "intermediate_size": shape.intermediate,
        "intermediate_size_per_partition": shape.intermediate,
        "num_local_experts": shape.experts // 2 if ep else shape.experts,
        "num_logical_experts": shape.experts,
        "activation": importlib.import_module(f"{layers}.activation").MoEActivation(activation),
        "device": "cuda",
        "routing_method": config.RoutingMethodType.Renormalize,
        "moe_parallel_config": _fill(config.FusedMoEParallelConfig, parallel),
        "in_dtype": torch.bfloat16,
        "is_act_and_mul": not activation.endswith("_no_mul"),
        **more,
    }
    if "intermediate_size" in {field.name for field in dataclasses.fields(config.FusedMoEConfig)}:
        del values["intermediate_size_per_partition"]  # newer releases compute it
    return _fill(config.FusedMoEConfig, values)


def _fill(kind: Any, values: Mapping[str, Any]) -> Any:
    """Make a `kind` of the `values` that it has fields for; other fields without a default get 0."""
    fields = [field for field in dataclasses.fields(kind) if field.init]
    needed = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    names = {field.name for field in fields}
    return kind(**{**dict.fromkeys(needed, 0), **{name: values[name] for name in names & values.keys()}})
