"""The recorder on models shaped like transformers and vLLM, and on a real Qwen3-MoE of random weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from moedoctor.trace.format import TraceError
from moedoctor.trace.recorder import RoutingRecorder

E, K, H = 8, 2, 16


class Router(nn.Module):
    """As in transformers from 5.0: returns logits, scores and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts = K, E
        self.weight = nn.Parameter(torch.randn(E, H))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x.reshape(-1, H) @ self.weight.T  # [T, E]
        scores, ids = logits.softmax(1).topk(K)  # [T, K] each
        return logits, scores, ids


class Experts(nn.Module):
    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.num_experts, self.shift = E, shift
        self.calls: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(ids)
        return x


class Block(nn.Module):
    """Calls its experts with other ids than the router's; the experts' ids must be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Router(), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, scores, ids = self.gate(x)
        return self.experts(x.reshape(-1, H), ids.flip(1), scores).view(x.shape)


class OldBlock(nn.Module):
    """As in transformers 4: a linear gate, a list of experts, top-k in the block."""

    def __init__(self, **more: object) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(E))
        self.top_k = K
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ids = self.gate(x.reshape(-1, H)).softmax(1).topk(K).indices  # [T, K]
        return x


class VllmRouter:
    """Not a module, as in vLLM; calls the capture function with the ids after routing."""

    def __init__(self) -> None:
        self.capture: Callable[[torch.Tensor], None] | None = None

    def set_capture_fn(self, capture: Callable[[torch.Tensor], None] | None) -> None:
        self.capture = capture


class VllmLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.global_num_experts = VllmRouter(), E

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ids = torch.randint(E, (len(x), K), dtype=torch.int32)
        if self.router.capture is not None:
            self.router.capture(self.ids)
        return x


class VllmBlock(nn.Module):
    """vLLM's block has a gate too; the router of the layer is more exact."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E), VllmLayer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gate(x)
        return self.experts(x)


def recorded(model: nn.Module, *batches: torch.Tensor) -> RoutingRecorder:
    with RoutingRecorder(model) as recorder:
        for batch in batches:
            model(batch)
    return recorder


def test_the_ids_of_each_call_of_the_experts_are_recorded() -> None:
    model = nn.Sequential(Block(), Block())
    trace = recorded(model, torch.randn(2, 3, H), torch.randn(1, 1, H)).trace({"by": "a test"})
    assert (trace.num_experts, trace.top_k, trace.layers, trace.call_rows) == (E, K, ("0", "1"), (6, 1))
    ids = torch.tensor(trace.topk_ids).view(7, 2, K)
    for layer in range(2):
        assert torch.equal(ids[:, layer], torch.cat(model[layer].experts.calls).int())
    assert trace.made == {"recorded_from": ["ids that the experts are called with"], "by": "a test"}


def test_top_k_comes_from_the_logits_without_other_sources() -> None:
    model = OldBlock()
    trace = recorded(model, torch.randn(5, H)).trace()
    assert list(trace.topk_ids) == model.ids.flatten().tolist()
    assert trace.made["recorded_from"] == ["top-k of the router's logits"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"e_score_correction_bias": torch.zeros(E)}, "correction_bias"), ({"n_group": 2}, "groups")],
)
def test_logits_that_do_not_determine_the_ids_are_refused(more: dict[str, object], reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        recorded(OldBlock(**more), torch.randn(5, H)).trace()


def test_the_capture_function_of_vllm_is_used_and_removed() -> None:
    model = nn.Sequential(VllmBlock())
    trace = recorded(model, torch.randn(4, H)).trace()
    assert list(trace.topk_ids) == model[0].experts.ids.flatten().tolist()
    assert trace.layers == ("0.experts",)
    assert model[0].experts.router.capture is None


def test_hooks_are_removed_after_the_context_and_after_an_error_in_it() -> None:
    model = nn.Sequential(Block())
    recorder = recorded(model, torch.randn(3, H))
    with pytest.raises(RuntimeError, match="stop"), RoutingRecorder(model):
        raise RuntimeError("stop")
    model(torch.randn(2, H))
    assert recorder.trace().rows == 3
    assert not model[0].gate._forward_hooks
    assert not model[0].experts._forward_pre_hooks


class Unknown(nn.Module):
    """Does not say how many experts it has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Identity(), nn.Identity()


class Unhookable(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate.register_forward_hook = None


def test_an_error_at_the_start_leaves_no_hooks_and_no_layers() -> None:
    model = nn.Sequential(VllmBlock(), Block(), Unknown())
    recorder = RoutingRecorder(model)
    for problem in (Unknown(), Unhookable()):
        model[2] = problem
        with pytest.raises((TraceError, TypeError)):
            recorder.__enter__()
        assert model[0].experts.router.capture is None
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model[2] = Block()
    with recorder:
        model(torch.randn(3, H))
    assert recorder.trace().layers == ("0.experts", "1", "2")


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(TraceError, match="no MoE layer"), RoutingRecorder(nn.Linear(H, H)):
        pass


def test_an_empty_recording_is_an_error() -> None:
    with pytest.raises(TraceError, match="no forward pass"):
        recorded(nn.Sequential(Block())).trace()


def test_layers_with_different_calls_are_refused() -> None:
    model = nn.Sequential(Block(), Block())
    with RoutingRecorder(model) as recorder:
        model(torch.randn(3, H))
        model[0](torch.randn(3, H))
    with pytest.raises(TraceError, match="was called 1 times"):
        recorder.trace()


@pytest.mark.upstream
def test_the_recording_of_a_real_qwen3_moe_matches_its_router_logits() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(parameter)
    tokens = torch.randint(64, (2, 5))
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        output = model(tokens, output_router_logits=True)
    trace = recorder.trace()
    assert trace.layers == ("model.layers.0.mlp", "model.layers.2.mlp")
    ids = torch.tensor(trace.topk_ids).view(10, 2, 2)
    router_logits = [logits for logits in output.router_logits if logits is not None and logits.dim() == 2]
    assert len(router_logits) == 2
    for layer, logits in enumerate(router_logits):
        assert torch.equal(ids[:, layer].sort(1).values, logits.float().topk(2).indices.sort(1).values.int())


@pytest.mark.upstream
def test_a_real_router_of_vllm_is_recorded() -> None:
    routers = pytest.importorskip("vllm.model_executor.layers.fused_moe.router.custom_routing_router")
    state = pytest.importorskip("vllm.distributed.eplb.eplb_state")
    parameters = inspect.signature(routers.CustomRoutingRouter).parameters.values()
    needed = {parameter.name for parameter in parameters if parameter.default is parameter.empty}

    def route(**given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = given["gating_output"].softmax(1).topk(K)
        return weights, ids

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            given = {"top_k": K, "global_num_experts": E, "custom_routing_function": route}
            if "eplb_state" in needed:
                given["eplb_state"] = state.EplbLayerState()
            self.router = routers.CustomRoutingRouter(**given)
            self.global_num_experts = E
            self.gate = nn.Linear(H, E)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.ids = self.router.select_experts(x, self.gate(x))[1]
            return x

    model = nn.Sequential(Layer(), Layer())
    trace = recorded(model, torch.randn(5, H)).trace()
    assert trace.made["recorded_from"] == ["router's capture function"]
    ids = torch.tensor(trace.topk_ids).view(5, 2, K)
    assert torch.equal(ids[:, 1], model[1].ids)
    assert model[0].router.capture_fn is None
