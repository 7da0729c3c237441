"""The recorder on models shaped like transformers and vLLM, and on a real Qwen3-MoE of random weights."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from moedoctor.trace.format import TraceError
from moedoctor.trace.recorder import RoutingRecorder
from tests.trace.moe_models import Block, E, H, K, OldBlock


class Flipping(Block):
    """Calls its experts with other ids than the router's; the experts' ids must be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, H)
        _, weights, ids = self.gate(flat)
        self.calls.append(ids.flip(1))
        return self.experts(flat, ids.flip(1), weights).view(x.shape)


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
    model = nn.Sequential(Flipping(), Flipping())
    trace = recorded(model, torch.randn(2, 3, H), torch.randn(1, 1, H)).trace({"by": "a test"})
    assert (trace.num_experts, trace.top_k, trace.layers, trace.call_rows) == (E, K, ("0", "1"), (6, 1))
    ids = torch.tensor(trace.topk_ids).view(7, 2, K)
    for layer in range(2):
        assert torch.equal(ids[:, layer], torch.cat(model[layer].calls).int())
    assert trace.made == {"recorded_from": ["ids that the experts are called with"], "by": "a test"}


def test_top_k_comes_from_the_logits_without_other_sources() -> None:
    model, x = OldBlock(), torch.randn(5, H)
    trace = recorded(model, x).trace()
    assert list(trace.topk_ids) == model.gate(x).topk(K).indices.flatten().tolist()
    assert trace.made["recorded_from"] == ["top-k of the router's logits"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"e_score_correction_bias": torch.zeros(E)}, "correction_bias"), ({"n_group": 2}, "groups")],
)
def test_logits_that_do_not_determine_the_ids_are_refused(more: dict[str, object], reason: str) -> None:
    model = OldBlock()
    vars(model).update(more)
    with pytest.raises(TraceError, match=reason):
        recorded(model, torch.randn(5, H)).trace()


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


def test_what_is_no_recording_of_a_model_is_refused() -> None:
    with pytest.raises(TraceError, match="no MoE layer"), RoutingRecorder(nn.Linear(H, H)):
        pass
    with pytest.raises(TraceError, match="no forward pass"):
        recorded(nn.Sequential(Block())).trace()
    model = nn.Sequential(Block(), Block())
    with RoutingRecorder(model) as recorder:
        model(torch.randn(3, H))
        model[0](torch.randn(3, H))
    with pytest.raises(TraceError, match="was called 1 times"):
        recorder.trace()
