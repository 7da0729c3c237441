"""A stub of the parts of vLLM that recordings hook, with a model that computes a checkpoint's MoE layers.

    record_stub.py FOLDER_OF_THE_STUB CHECKPOINT

is a process that records one step, in which the second layer gives NaN, and ends.
"""

import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch

from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_layer import Layer, Problem, compute_expected
from moedoctor.trace.expert_weights import ExpertFiles
from tests.plugin.nan_stub import FILES, RUNNER, module, step
from tests.vllm_stub import write_files

LAYERS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2, 64, 64, 8, 2
BASE = "vllm/model_executor/layers/fused_moe/fused_moe_method_base.py"
_CALL = """
class MoERunner:
    def __init__(self, router, experts):
        self.router, self.experts = router, experts

    def _apply_quant_method(self, {layer}hidden_states, router_logits, shared_experts_input, input_ids=None):
        if self._quant_method.is_monolithic:
            topk_weights, topk_ids = self.router.route(router_logits)
            return None, self.experts(hidden_states, topk_weights, topk_ids)
        topk_weights, topk_ids = self.router.select_experts(
            hidden_states=hidden_states, router_logits=router_logits, input_ids=input_ids
        )
        return None, self.experts(hidden_states, topk_weights, topk_ids)
"""


def write_stub(folder: Path, model: Path, *, newer: bool) -> None:
    """Write the package `vllm`, whose engine serves the checkpoint `model`, into `folder`."""
    files = {
        **FILES,
        RUNNER: _CALL.format(layer="" if newer else "layer, "),
        BASE: "class FusedMoEMethodBase:\n    def __init__(self, moe):\n        self.moe = moe\n",
        "vllm/config.py": (
            "from types import SimpleNamespace\n\n"
            f"def get_current_vllm_config():\n    model = SimpleNamespace(model={str(model)!r})\n"
            "    return SimpleNamespace(model_config=model)\n"
        ),
    }
    write_files(folder, files)


def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids [T, K] of the largest logits [T, E]."""
    weights, ids = logits.float().softmax(1).topk(TOP_K)
    return weights / weights.sum(1, keepdim=True), ids.int()


class Model:
    """The MoE layers of a checkpoint, one after another; the router's logits are the first columns of x."""

    def __init__(self, checkpoint: Path, *, newer: bool, monolithic: bool = False) -> None:
        files, fused = ExpertFiles(checkpoint), "model_executor.layers.fused_moe"
        self.newer, self.real, self.outputs = newer, 3, [torch.empty(0)] * LAYERS
        self.spoil: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        """Layer -> what happens to its output."""
        base = module(f"{fused}.fused_moe_method_base").FusedMoEMethodBase
        method_class = type("UnquantizedFusedMoEMethod", (base,), {"is_monolithic": monolithic})
        self.layers = []
        for number in range(LAYERS):
            name = f"model.layers.{number}.mlp.experts"
            tensors = files.read_tensors(name, list(range(EXPERTS)), "bf16")
            shape = LayerShape(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, "silu")
            layer = Layer(shape, "bf16", tensors["w13"], tensors["w2"])
            router = module(f"{fused}.router.base_router").BaseRouter(route)
            runner = module(f"{fused}.runner.moe_runner").MoERunner(router, self._experts(number, layer))
            runner._quant_method = method_class(_config())
            weights = torch.nn.Module()
            weights.w13_weight = torch.nn.Parameter(tensors["w13"])
            weights.layer_name = runner.layer_name = name
            if newer:
                runner.routed_experts = weights
            self.layers.append((runner, weights))

    def _experts(self, number: int, layer: Layer) -> Callable[..., torch.Tensor]:
        def experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            output = compute_expected(Problem(layer, x, weights, ids), "none").bfloat16()  # [T, H]
            self.outputs[number] = self.spoil.get(number, lambda output: output)(output)
            return self.outputs[number]

        return experts

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(len(input_ids), HIDDEN, generator=draw).bfloat16()  # [T, H]
        for runner, layer in self.layers:
            arguments = () if self.newer else (layer,)
            x = x + runner._apply_quant_method(*arguments, x, x[:, :EXPERTS], None)[1].nan_to_num()
        return x


def _config() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        hidden_dim=HIDDEN + 64,  # as some backends pad it
        hidden_dim_unpadded=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        num_experts=EXPERTS,
        experts_per_token=TOP_K,
        activation=types.SimpleNamespace(value="silu"),
        moe_parallel_config=types.SimpleNamespace(tp_size=1, dp_size=1, ep_size=1),
    )


def main(stub: str, checkpoint: str) -> None:
    sys.path.insert(0, stub)
    from moedoctor.plugin import record

    record.apply("0.33.0")
    model = Model(Path(checkpoint), newer=True)
    model(torch.zeros(4))  # the profile run
    model.spoil[1] = lambda output: torch.full_like(output, float("nan"))
    step(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
