"""The fix `expert_cache` on vLLM's own layers and methods, without a GPU, in processes of their own."""

from pathlib import Path
from typing import Any

import pytest

from moedoctor.plugin.extensions import FIXES
from moedoctor.reference.checkpoints import write_qwen3_moe
from tests.real_vllm import WITHOUT_GPU, ask_child, skip_unless_made_for

EXPERTS, TOP_K, SLOTS = 8, 2, 5

CODE = (
    WITHOUT_GPU
    + """
import dataclasses, inspect, json, sys
from vllm.v1.worker import workspace

folder, backend, change = sys.argv[1:4]
answer = {}
arguments = EngineArgs(
    model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, moe_backend=backend
)
config = arguments.create_engine_config()

import vllm._custom_ops as ops
from vllm.model_executor.layers.fused_moe import layer as module
from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4, marlin_utils_fp8
from vllm.model_executor.model_loader import base_loader
from moedoctor.plugin import expert_cache_layer as ours

torch.accelerator.empty_cache = lambda: None
no_dp_ep._quantize_input = lambda a1, *rest: (a1, None)  # FP8 activations need a GPU

def repacked(*, b_q_weight, size_k, **rest):
    return b_q_weight.reshape(size_k // 16, -1).contiguous()  # int32 as Marlin's, in another order

ops.gptq_marlin_repack = repacked
for utilities in (marlin_utils_fp4, marlin_utils_fp8):
    utilities.marlin_make_workspace_new = lambda device, *rest, **options: None

def checksum(tensor):
    bits = tensor.reshape(-1).contiguous().view(torch.uint8).double()
    return float((bits * torch.arange(1, len(bits) + 1).double().sin().add(2)).sum())

def compute(
    self, output, hidden_states, w1, w2, topk_weights, topk_ids, *, global_num_experts, expert_map, **rest
):
    # Anything that depends on every tensor of every expert, scales of this config among them.
    held = [w1, w2, self.w1_scale, self.w2_scale, self.g1_alphas, self.g2_alphas, self.w1_bias, self.w2_bias]
    held = [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
    assert topk_ids.is_contiguous() and int(topk_ids.min()) >= 0
    assert int(topk_ids.max()) < global_num_experts == 8, topk_ids
    total = torch.zeros(hidden_states.shape, dtype=torch.float64)
    answer["tensors"], answer["slots"] = len(held), w1.shape[0]
    for row in range(len(topk_ids)):
        for place in range(topk_ids.shape[1]):
            expert = int(topk_ids[row, place])
            expert = expert if expert_map is None else int(expert_map[expert])
            if expert >= 0:
                gain = sum(checksum(tensor[expert]) for tensor in held)
                total[row] += float(topk_weights[row, place]) * hidden_states[row].double() * gain / 1e9
    output.copy_(total)

with set_current_vllm_config(config):
    # As `initialize_model` would for one layer of the model.
    def make():
        if change == "ep":
            real = module.FusedMoEParallelConfig.make
            spread = {"use_ep": True, "ep_size": 2}
            module.FusedMoEParallelConfig.make = lambda **given: dataclasses.replace(real(**given), **spread)
        if change == "lora":
            config.lora_config = types.SimpleNamespace()
        try:
            make_layer = getattr(module, "FusedMoEFactory", None) or module.FusedMoE
            made = make_layer(
                8, 2, 256, 128, params_dtype=torch.bfloat16, tp_size=1, dp_size=1, pcp_size=1,
                quant_config=config.quant_config, prefix="model.layers.0.mlp.experts", renormalize=True,
            )
        finally:
            if change == "ep":
                module.FusedMoEParallelConfig.make = real
        made = getattr(made, "routed_experts", made)  # from 0.22.0 on the layer has its experts in a module
        answer["made on"] = sorted({str(parameter.device) for parameter in made.parameters()})
        return made

    def fill(self, model, model_config):
        draw = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            if parameter.dtype in (torch.uint8, torch.float8_e4m3fn):
                bits = torch.randint(1, 100, parameter.shape, generator=draw, dtype=torch.uint8)
                parameter.data.copy_(bits.view(parameter.dtype))
            else:
                parameter.data.copy_(torch.rand(parameter.shape, generator=draw) + 0.5)

    plain = {}
    def initialize(**given):
        return torch.nn.ModuleDict({"experts": make()})

    process = base_loader.process_weights_after_loading
    def then_compute(model, model_config, target_device):
        # The last thing that vLLM does: what the layer computes without a cache is kept to compare.
        process(model, model_config, target_device)
        layer = model["experts"]
        if layer.quant_method.moe_kernel is not None:
            type(layer.quant_method.moe_kernel.fused_experts).apply = compute
            plain["outputs"] = [run(layer, tokens, seed) for tokens, seed in calls]

    calls = [(1, 1), (2, 2), (2, 3), (1, 4), (9, 5), (2, 6), (30, 7)]
    def run(layer, tokens, seed):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, 256, generator=draw, dtype=torch.float32).bfloat16()
        topk_weights, ids = torch.rand(tokens, 8, generator=draw, dtype=torch.float32).topk(2)
        shared = [None] * (len(inspect.signature(layer.quant_method.apply).parameters) - 4)
        return layer.quant_method.apply(layer, x, topk_weights, ids.int(), *shared).clone()

    class Loader(base_loader.BaseModelLoader):
        def download_model(self, model_config): ...
        load_weights = fill

    base_loader.initialize_model = initialize
    base_loader.process_weights_after_loading = then_compute
    base_loader.log_model_inspection = lambda model: None
    base_loader.current_platform = types.SimpleNamespace(
        is_cuda_alike=lambda: False, is_xpu=lambda: False
    )
    base_loader._has_online_quant = lambda model: False
    config.device_config.device = torch.device("cpu")
    workspace.init_workspace_manager(torch.device("cpu"))
    try:
        model = Loader(config.load_config).load_model(config, config.model_config)
    except SystemExit as error:
        answer["refused"] = str(error)
    else:
        layer = model["experts"]
        made = ours.find_host_experts(model)
        answer["caches"] = len(made)
        pairs = list(zip([run(layer, *inputs) for inputs in calls], plain["outputs"]))
        answer["same bits"] = [bool((a == b).all()) for a, b in pairs]
        wide = [(a.double(), b.double()) for a, b in pairs]
        answer["error"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in wide)
        if made:
            answer["engine"], answer["misses"] = made[0].cache.engine, made[0].cache.stats.misses
            whole = (name for name, parameter in layer.named_parameters() if parameter.shape[:1] == (8,))
            answer["whole"] = sorted(whole)
print("\\nANSWER " + json.dumps(answer))
"""
)


def answer(folder: Path, backend: str, slots: int | str, change: str = "") -> dict[str, Any]:
    caches = {"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_CONFIG_ROOT": str(folder / "cache")}
    variables = {"MOEDOCTOR_FIXES": "expert_cache", "MOEDOCTOR_EXPERT_CACHE": str(slots)}
    found: dict[str, Any] = ask_child(CODE, str(folder), backend, change, **caches, **variables)[0]
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    skip_unless_made_for(FIXES["expert_cache"])
    made = tmp_path_factory.mktemp("models")
    return {
        scheme: write_qwen3_moe(made / scheme, scheme=scheme, experts=EXPERTS, top_k=TOP_K)
        for scheme in ("bf16", "fp8", "nvfp4")
    }


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("scheme", "backend", "tensors"),
    [("bf16", "triton", 2), ("fp8", "triton", 4), ("fp8", "marlin", 4), ("nvfp4", "marlin", 6)],
)
def test_vllms_own_layers_compute_the_same_through_a_cache(folders, scheme, backend, tensors):
    got = answer(folders[scheme], backend, SLOTS)
    assert "refused" not in got, got
    assert got["made on"] == ["cpu"]
    assert (got["caches"], got["slots"], got["tensors"], got["engine"]) == (1, SLOTS, tensors, "host")
    assert got["misses"] > EXPERTS
    assert got["same bits"][:4] == [True] * 4, "a call that fits is one call of the kernel"
    assert got["error"] < 0.02, "groups are rounded one by one"
    assert got["whole"] == [], "nothing keeps all experts"


@pytest.mark.upstream
def test_long_calls_of_vllms_own_layers_pass_through_the_buffers(folders: dict[str, Path]) -> None:
    got = answer(folders["nvfp4"], "marlin", f"{SLOTS}:policy=lfru,stream=9")
    assert got["same bits"] == [True] * 7, "a call of 9 or 30 tokens is one call with all experts"
    assert (got["caches"], got["slots"], got["whole"]) == (1, EXPERTS, []), "the last call had them all"


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("slots", "scheme", "backend", "change", "reason"),
    [
        (1, "bf16", "triton", "", "1 slots hold fewer experts than one token needs (top_k 2)"),
        (5, "bf16", "triton", "ep", "spread over several GPUs"),
        (5, "bf16", "triton", "lora", "LoRA goes by the ids of experts"),
        (5, "nvfp4", "emulation", "", "computes with Nvfp4QuantizationEmulationTritonExperts"),
    ],
)
def test_vllms_own_settings_are_refused(folders, slots, scheme, backend, change, reason):
    got = answer(folders[scheme], backend, slots, change)
    assert f"MOEDOCTOR_EXPERT_CACHE={slots}: " in got["refused"]
    assert reason in got["refused"]
