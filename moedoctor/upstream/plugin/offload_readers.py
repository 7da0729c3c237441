"""Where vLLM's MoE layers read the weights of their experts: in a function that runs inside the MoE operator,
which compilers do not look into.

Weights that are fetched there leave the compiled code as it is. Operators of ours around each decoder layer
would do as well, but would keep the compiler from computing the residual anew where it is used, without
rounding it to bfloat16 between.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.upstream.plugin.fix_support import FixError, expect

_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_ENTRY, _READER = "_forward_entry", "_forward_impl"


def readers(layers: Sequence[Any], offloaded: Sequence[Any]) -> Mapping[Any, tuple[Any, str]]:
    """For the modules that own the parameters `offloaded` of `layers`: which function reads them.

    Empty where one of them is not an expert's weight, where the MoE operator is left out, and in releases
    before 0.20.0, whose functions are others.
    """
    if not _as_expected():
        return {}
    found = {}
    for layer in layers:
        for module in layer.modules():
            runner = getattr(module, "runner", module)
            if not _is_operator(getattr(runner, _ENTRY, None)):
                continue
            experts = getattr(runner, "routed_experts", module)  # newer releases: a module beside
            if any(one.numel() for one in experts.parameters(recurse=False)):
                found[experts] = (runner, _READER)
    read = {id(one) for experts in found for one in experts.parameters(recurse=False)}
    return found if all(id(one) in read for one in offloaded) else {}


def _as_expected() -> bool:
    """Whether the MoE operator of the installed vLLM calls the function that we look for."""
    try:
        module = importlib.import_module(_RUNNER)
        for name in ("_moe_forward", "_moe_forward_shared"):
            expect(module, name, ("hidden_states", "layer_name"), (f".{_READER}(",))
        expect(module.MoERunner, _READER, ("hidden_states", "router_logits"), ())
        expect(module.MoERunner, "forward", ("hidden_states", "router_logits"), (f"self.{_ENTRY}(",))
    except (ImportError, AttributeError, FixError):
        return False
    return True


def _is_operator(function: Any) -> bool:
    """Whether it is an operator of torch's, and not the Python function of that name, as on a CPU."""
    import torch

    return isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
