"""The fix `moe` on vLLM's own methods, without a GPU: kernels are interpreted, all cases in one process."""

import json
from typing import Any

import pytest

from moedoctor.plugin.extensions import FIXES
from tests.real_vllm import ask_child, skip_unless_made_for

CODE = """
import inspect, json, os, sys, types
import torch
from moedoctor.upstream.selection.substitute import install
gpu = install()
gpu.use((9, 0))
import vllm.envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.quantization import fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as compressed,
    compressed_tensors_moe_w8a8_fp8 as compressed_fp8,
)
from vllm.v1.worker import workspace
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference import nvfp4
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.upstream.moe_backends.backends import make_moe_config
from moedoctor.plugin import moe_fix, register

parallel_state._TP = types.SimpleNamespace(world_size=1, rank_in_group=0)
torch.cuda.empty_cache = torch.accelerator.empty_cache = lambda: None
workspace.init_workspace_manager(torch.device("cpu"))
if hasattr(fp8, "resolve_fp8_moe_weight_block_shape"):
    fp8.resolve_fp8_moe_weight_block_shape = lambda moe, block, *rest: (block, None)
E, K, H, I, T = 6, 2, 128, 64, 5
active = moe_fix.apply(register.read_vllm_version())


class Case:
    def __init__(self, quantization, activation="silu", changes=(), **rest):
        self.quantization, self.activation = quantization, activation
        self.halves = 1 if activation == "relu2_no_mul" else 2
        self.draw = torch.Generator().manual_seed(0)
        self.shape = LayerShape(H, I, E, K, moe_fix.ACTIVATIONS.get(activation, "silu"))
        self.config = make_moe_config(self.shape, activation, device="cpu")
        self.config.has_bias = quantization == "bf16"
        for name, value in dict(changes).items():
            parallel = self.config.moe_parallel_config
            owner = parallel if name in type(parallel).__dataclass_fields__ else self.config
            setattr(owner, name, value)
        self.layer = layer = torch.nn.Module()
        layer.moe_config, layer.activation = self.config, self.config.activation
        layer.apply_router_weight_on_input, layer.expert_map = False, None
        layer.global_num_experts = layer.local_num_experts = E

    def normal(self, *size):
        return torch.randn(size, generator=self.draw)

    def method(self):
        if self.quantization == "bf16":
            return unquantized_fused_moe_method.UnquantizedFusedMoEMethod(self.config)
        if self.quantization == "fp8 modelopt":
            own = modelopt.ModelOptFp8Config.__new__(modelopt.ModelOptFp8Config)
            own.is_checkpoint_fp8_serialized = True
            return modelopt.ModelOptFp8MoEMethod(own, self.config)
        if self.quantization.startswith("fp8 compressed"):
            kind = compressed_fp8.QuantizationStrategy
            own, given = {
                "tensor": (kind.TENSOR, kind.TENSOR),
                "channel": (kind.CHANNEL, kind.TOKEN),
                "block": (kind.BLOCK, kind.GROUP),
            }[self.quantization.split()[-1]]
            weights = types.SimpleNamespace(strategy=own, block_structure=[32, 64], dynamic=False)
            inputs = types.SimpleNamespace(strategy=given, dynamic=given != kind.TENSOR)
            return compressed_fp8.CompressedTensorsW8A8Fp8MoEMethod(weights, inputs, self.config)
        if self.quantization.startswith("fp8"):
            block = [32, 64] if self.quantization == "fp8 block" else None
            own = fp8.Fp8Config(
                is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=block
            )
            return fp8.Fp8MoEMethod(own, self.layer)
        if self.quantization == "nvfp4":
            own = modelopt.ModelOptNvFp4Config.__new__(modelopt.ModelOptNvFp4Config)
            own.is_checkpoint_nvfp4_serialized, own.group_size, own.quant_method = True, 16, "NVFP4"
            own.moe_activation_override = None
            return modelopt.ModelOptNvFp4FusedMoE(own, self.config)
        return compressed.CompressedTensorsW4A4Nvfp4MoEMethod(self.config)

    def fill(self, name, rows, depth):
        # Writes the weight as a loader would, and returns its values in float32.
        get = lambda part: getattr(self.layer, name + part).data
        if self.quantization == "bf16":
            values = self.normal(E, rows, depth) / depth**0.5
            get("_weight").copy_(values)
            get("_bias").copy_(self.normal(E, rows))
            return values.bfloat16().float()
        parts = self.halves if name == "w13" else 1
        if self.quantization.startswith("fp8"):
            values = self.normal(E, rows, depth).to(torch.float8_e4m3fn)
            get("_weight").copy_(values)
            scales = get("_weight_scale_inv" if self.quantization == "fp8 block" else "_weight_scale")
            scales.copy_((torch.rand(scales.shape, generator=self.draw) + 0.5) / depth**0.5)
            if self.quantization.endswith("block"):
                spread = scales.repeat_interleave(32, 1).repeat_interleave(64, 2)
            elif self.quantization.endswith("channel"):
                spread = scales  # [E, rows, 1]
            else:
                spread = scales.reshape(E, parts).repeat_interleave(rows // parts, 1)[..., None]
            return values.float() * spread
        packed = torch.randint(0, 256, (E, rows, depth // 2), generator=self.draw, dtype=torch.uint8)
        blocks = torch.randint(0x20, 0x40, (E, rows, depth // 16), generator=self.draw, dtype=torch.uint8)
        blocks = blocks.view(torch.float8_e4m3fn)
        scale = (torch.rand(E, parts, generator=self.draw) + 0.5) / depth**0.5 / 4
        own = self.quantization == "nvfp4"
        get("_weight" if own else "_weight_packed").copy_(packed)
        get("_weight_scale").copy_(blocks)
        stored = get("_weight_scale_2" if own else "_weight_global_scale")
        stored.copy_((scale if own else 1 / scale).reshape(stored.shape))
        exact = nvfp4.dequantize(nvfp4.Nvfp4(packed, blocks, torch.ones(E)))
        return exact * scale.repeat_interleave(rows // parts, 1)[..., None]

    def run(self):
        layer, method = self.layer, self.method()
        answer = {"monolithic before loading": method.is_monolithic}
        loader = {"weight_loader": lambda *rest: None, "global_num_experts": E}
        method.create_weights(layer, E, H, I, torch.bfloat16, **loader)
        weights = [self.fill("w13", self.halves * I, H), self.fill("w2", H, I)]
        if hasattr(self.config, "nan"):
            layer.w2_weight.data.view(torch.uint8)[1, 2, 3] = 0xFF
        biases = [getattr(layer, name, None) for name in ("w13_bias", "w2_bias")]
        method.process_weights_after_loading(layer)
        x, shares = self.normal(T, H).bfloat16(), torch.rand(T, K, generator=self.draw)
        ids = torch.stack([torch.randperm(E, generator=self.draw)[:K] for _ in range(T)]).int()
        given = {"shared_experts": None, "shared_experts_input": None}
        taken = inspect.signature(method.apply).parameters
        out = method.apply(layer, x, shares, ids, **{name: None for name in given if name in taken})
        right = forward(x, MoeWeights(*weights, self.shape.activation, *biases), shares, ids)
        kernel = method.moe_kernel
        return answer | {
            "error": float((out.float() - right).norm() / right.norm()),
            "monolithic": method.is_monolithic,
            "kernel": type(kernel.fused_experts).__name__,
            "reduced": kernel.output_is_reduced(),
        }


answers = []
with set_current_vllm_config(VllmConfig()):
    for given in json.loads(sys.argv[1]):
        gpu.use(tuple(given.get("capability", (9, 0))))
        os.environ["MOEDOCTOR_MOE"] = given.get("computer", "kernels")
        try:
            answers.append(Case(**given).run())
        except SystemExit as stopped:
            answers.append({"refused": str(stopped)})
print("\\nANSWER " + json.dumps([active, answers]))
"""
FORMATS = {
    "bf16": "silu relu2_no_mul",
    "fp8 block": "silu",
    "fp8 tensor": "gelu",
    "fp8 modelopt": "silu relu2_no_mul",
    "fp8 compressed tensor": "gelu",
    "fp8 compressed channel": "silu",
    "fp8 compressed block": "silu",
    "nvfp4": "silu relu2_no_mul",
    "compressed nvfp4": "silu",
}
COMPUTED = [
    {"quantization": quantization, "activation": activation, "computer": computer}
    for computer in ("kernels", "reference")
    for quantization, activations in FORMATS.items()
    for activation in activations.split()
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[str]]:
    skip_unless_made_for(FIXES["moe"])
    variables = dict.fromkeys(("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"), str(tmp_path_factory.mktemp("cache")))
    variables |= {"MOEDOCTOR_FIXES": "moe", "TRITON_INTERPRET": "1"}
    (active, got), lines = ask_child(CODE, json.dumps(COMPUTED), **variables)
    assert active == "MoE layers by moedoctor's kernels"
    return got, lines


@pytest.mark.upstream
def test_vllms_own_methods_compute_what_was_loaded(answers: tuple[list[dict[str, Any]], list[str]]) -> None:
    """Gate and up have scales of their own, which no backend of vLLM's keeps apart."""
    got, lines = answers
    for case, answer in zip(COMPUTED, got, strict=True):
        assert "refused" not in answer, (case, answer)
        # The interpreter truncates to bfloat16, and so do three steps of a layer.
        assert answer["error"] < (0.015 if case["computer"] == "kernels" else 0.004), (case, answer)
        assert (answer["monolithic before loading"], answer["monolithic"]) == (False, False)
        assert (answer["kernel"], answer["reduced"]) == ("MoedoctorExperts", False)
    announced = [line for line in lines if "experts are computed by" in line]
    assert len(announced) == 12, "six formats, two ways to compute, each once"
    assert all("in place of" in line and "look elsewhere" in line for line in announced)
