"""A stub of the parts of vLLM 0.21.0 that the NaN trace hooks, with a model.

    nan_stub.py FOLDER_OF_THE_STUB HOW

is a process with the trace in the stub, which ends as vLLM's own processes do. `fork`, `spawn`: a child runs
a step, and ends as the engine does at SIGTERM. `inherit`: this process runs a step, and a fork runs none.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch

from tests.interpreted import ROOT
from tests.vllm_stub import write_files

RUNNER = "vllm/model_executor/layers/fused_moe/runner/moe_runner.py"
FILES = {
    "vllm/__init__.py": "__version__ = '0.21.0'\n",
    "vllm/_custom_ops.py": """
import torch


def topk_softmax(topk_weights, topk_ids, token_expert_indices, gating_output, renormalize=False, bias=None):
    torch.ops._moe_C.topk_softmax(topk_weights, topk_ids)
""",
    "vllm/model_executor/layers/attention/attention.py": """
class Impl:
    def forward(self, layer, query, output=None):
        output[: len(query)] = query


class Attention:
    def __init__(self, name):
        self.layer_name = name
        self.impl = Impl()

    def __call__(self, query, output):
        self.impl.forward(self, query, output=output)
        return output
""",
    RUNNER: """
class MoERunner:
    def __init__(self, router):
        self.router = router

    def _apply_quant_method(self, layer, hidden_states, router_logits, shared_experts_input, input_ids=None):
        topk_weights, topk_ids = self.router.select_experts(
            hidden_states=hidden_states, router_logits=router_logits, input_ids=input_ids
        )
        return None, hidden_states * topk_weights.sum(1, keepdim=True)
""",
    "vllm/model_executor/layers/fused_moe/router/base_router.py": """
class BaseRouter:
    global_num_experts = 8

    def __init__(self, route):
        self.route = route

    def select_experts(self, hidden_states, router_logits, *, input_ids=None):
        topk_weights, topk_ids = self.route(router_logits)
        return topk_weights, topk_ids
""",
    "vllm/v1/worker/gpu_model_runner.py": """
class GPUModelRunner:
    def __init__(self, model):
        self.model = model

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        return self._model_forward(input_ids=scheduler_output.input_ids, positions=None)

    def _model_forward(self, input_ids=None, positions=None, intermediate_tensors=None, inputs_embeds=None):
        return self.model(input_ids=input_ids)
""",
    "vllm/v1/worker/gpu_worker.py": """
class Worker:
    def compile_or_warm_up_model(self, warm_up=None):
        warm_up()
""",
    "vllm/v1/worker/gpu/model_runner.py": """
from types import SimpleNamespace


def ExecuteModelState(hidden_states):
    return SimpleNamespace(hidden_states=hidden_states)


class GPUModelRunner:
    def __init__(self, model):
        self.model = model
        self.execute_model_state = None

    def prepare_inputs(self, scheduler_output, batch_desc):
        num_tokens_after_padding = batch_desc
        return SimpleNamespace(
            num_tokens=scheduler_output.total_num_scheduled_tokens,
            num_tokens_after_padding=num_tokens_after_padding,
        )

    def execute_model(self, scheduler_output, dummy_run=False):
        if not scheduler_output.total_num_scheduled_tokens:
            return "nothing to do"
        if not dummy_run:
            self.prepare_inputs(scheduler_output, len(scheduler_output.input_ids))
        model_output = self.model(input_ids=scheduler_output.input_ids)
        self.execute_model_state = ExecuteModelState(model_output)
""",
}
NEWER_RUNNER = (
    FILES[RUNNER]
    .replace("self, layer, ", "self, ")
    .replace("class MoERunner:", 'class MoERunner:\n    layer_name = "layers.0.experts"\n')
)
"""As in 0.27.1 and later: the runner is the layer."""


def write_stub(folder: Path, *, newer: bool = False) -> None:
    """Write the package `vllm` into `folder`."""
    write_files(folder, {**FILES, RUNNER: NEWER_RUNNER} if newer else FILES)


def module(name: str) -> Any:
    return importlib.import_module(f"vllm.{name}")


def argmax_twice(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts a row; a NaN row gets expert 0 twice, as up to 0.19.1."""
    ids = logits.nan_to_num(-1.0).topk(2).indices.int()
    ids[logits.isnan().any(1)] = 0
    return torch.ones_like(ids, dtype=torch.float32) / 2, ids


class Model:
    """One layer: attention that leaves padding as it was, then experts."""

    def __init__(self, leftover: float = 0.0) -> None:
        self.attention = module("model_executor.layers.attention.attention").Attention("layers.0.attn")
        router = module("model_executor.layers.fused_moe.router.base_router").BaseRouter(argmax_twice)
        self.runner = module("model_executor.layers.fused_moe.runner.moe_runner").MoERunner(router)
        self.layer = types.SimpleNamespace(layer_name="layers.0.experts")
        self.leftover = leftover
        self.real = 3

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        output = torch.full((len(input_ids), 8), self.leftover)  # [tokens, H]
        query = torch.arange(float(self.real * 8)).reshape(self.real, 8)
        x = self.attention(query, output)
        if hasattr(self.runner, "layer_name"):
            out: torch.Tensor = self.runner._apply_quant_method(x, x, None)[1]
        else:
            out = self.runner._apply_quant_method(self.layer, x, x, None)[1]
        return out


def scheduled(real: int, rows: int = 4) -> types.SimpleNamespace:
    """Return the output of a scheduler: `real` tokens, in a batch that is padded to `rows`."""
    return types.SimpleNamespace(total_num_scheduled_tokens=real, input_ids=torch.zeros(rows))


def run_script(file: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the tests in a process of its own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, file, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def step(model: Model, rows: int = 4) -> torch.Tensor:
    asked = scheduled(model.real, rows)
    out: torch.Tensor = module("v1.worker.gpu_model_runner").GPUModelRunner(model).execute_model(asked)
    return out


def work(stub: str, run: bool, apply: bool) -> None:
    print(f"started {os.getpid()}", flush=True)
    sys.path.insert(0, stub)
    from moedoctor.plugin import nan_trace

    if apply:
        nan_trace.apply("0.21.0")
    if run:
        step(Model(leftover=float("nan")))


def child(stub: str, run: bool, apply: bool) -> None:
    work(stub, run, apply)
    raise SystemExit


if __name__ == "__main__":
    folder, how = sys.argv[1:]
    work(folder, run=how == "inherit", apply=True)
    context = multiprocessing.get_context("spawn" if how == "spawn" else "fork")
    process = context.Process(target=child, args=(folder, how != "inherit", how == "spawn"))
    process.start()
    process.join()
