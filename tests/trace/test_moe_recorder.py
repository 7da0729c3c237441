"""Recorders on models shaped like transformers, in its old and its stacked form, and like vLLM."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from moedoctor.diagnose.capsule.replay import judge
from moedoctor.trace import MoeRecorder, crash_ring, crash_watcher, moe_recorder
from moedoctor.trace.capsule import SUFFIX, load
from moedoctor.trace.format import TraceError
from moedoctor.trace.recorder import RoutingRecorder
from tests.trace.moe_models import Block, E, H, K, OldBlock, make_transformers_model


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            out = block(x)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x


BLOCKS = {
    "stacked": Block,
    "mixtral": OldBlock,
    "qwen": lambda: OldBlock(("gate_proj", "up_proj", "down_proj"), norm_topk_prob=False),
}


def get_model(kind: str, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model(*(BLOCKS[kind]() for _ in range(2))).to(dtype).requires_grad_(False)


def x_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, H, generator=torch.Generator().manual_seed(1)).to(dtype)  # batch, sequence


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_is_recorded_whole_and_is_right(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = get_model(kind, dtype)
    with MoeRecorder(model, tmp_path, when="call=layers.1:2") as recorder:
        for _ in range(3):
            model(x_of(dtype))
    (file,) = recorder.files
    capsule = load(file)
    assert (capsule.record.layer, capsule.record.call) == ("layers.1.experts", 2)
    assert capsule.tensors["x"].shape == (6, H)
    assert capsule.tensors["router_logits"].shape == (6, E)
    assert capsule.tensors["w13"].dtype == dtype
    assert judge(capsule)["right"] is True
    assert recorder.left_out == []


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_wrong_call_is_found_and_a_right_one_is_not(kind: str, tmp_path: Path) -> None:
    model = get_model(kind)
    with MoeRecorder(model, tmp_path, when="mismatch=1") as recorder:
        for _ in range(6):
            model(x_of())
        assert recorder.files == []
        for block in model.layers:
            for part in (block, *block.children()):
                if hasattr(part, "scale"):
                    part.scale = 1.5
        for _ in range(3):
            model(x_of())
    assert len(recorder.files) == 1
    assert load(recorder.files[0]).record.reason == "its output is past the bound of the reference"


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_nan_that_a_compiled_layer_makes_is_found_without_a_graph_break(backend: str, tmp_path: Path) -> None:
    model = get_model("stacked")
    with MoeRecorder(model, tmp_path) as recorder:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            compiled(x_of())
        assert recorder.keeper.done is False
        model.layers[1].experts.down_proj[:3, 5, 7] = float("nan")
        compiled(x_of())
        compiled(x_of())
    (file,) = recorder.files
    capsule = load(file)
    assert (capsule.record.layer, capsule.record.call) == ("layers.1.experts", 3)
    assert capsule.tensors["output"].isnan()[:, 5].all()
    assert 0 < len(capsule.tensors["x"]) < 6
    assert (capsule.tensors["topk_ids"] < 3).any(1).all()


def test_an_error_at_the_start_leaves_no_hooks(tmp_path: Path) -> None:
    model = get_model("stacked")
    pre, after = "register_forward_pre_hook", "register_forward_hook"
    for module, method in ((model.layers[1].gate, after), (model, pre), (model, after)):
        setattr(module, method, None)
        with pytest.raises(TypeError):
            MoeRecorder(model, tmp_path).__enter__()
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        assert not moe_recorder._recorders
        delattr(module, method)


def test_nothing_is_left_if_the_end_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_model("stacked")
    recorder = MoeRecorder(model, tmp_path)
    monkeypatch.setattr(recorder.keeper, "collect", Mock(side_effect=RuntimeError("the device is lost")))
    with pytest.raises(RuntimeError, match="the device is lost"), recorder:
        model(x_of())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert (moe_recorder._recorders, recorder._logits) == ({}, {})


def test_capsules_are_for_one_user(tmp_path: Path) -> None:
    model = get_model("stacked")
    with MoeRecorder(model, tmp_path / "a" / "b", when="first") as recorder:
        model(x_of())
    (file,) = recorder.files
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent, file.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


class Shared(OldBlock):
    def __init__(self) -> None:
        super().__init__()
        self.shared_expert = nn.Linear(H, H)


class Biased(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts.down_proj_bias = nn.Parameter(torch.zeros(E, H))


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (Shared, "includes shared_expert's"),
        (Biased, "biases or transposed weights"),
        (lambda: Block(act=nn.Tanh()), "its activation Tanh is not"),
        (lambda: nn.Linear(H, H), "no module with experts beside a router"),
    ],
)
def test_what_cannot_be_recorded_is_said(block: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=problem):
        MoeRecorder(Model(block()), tmp_path).__enter__()
    with MoeRecorder(Model(Block(), block()), tmp_path) as recorder:
        pass
    assert [problem in line for line in recorder.left_out] == ([] if "no module" in problem else [True])


class Unrouted(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gate(x)
        return self.experts(x)


@pytest.mark.parametrize("when", ["nan", "crash"])
def test_experts_without_ids_are_left_out_and_the_forward_goes_on(when: str, tmp_path: Path) -> None:
    block = Unrouted()
    block.experts.forward = lambda x: x
    with MoeRecorder(Model(block), tmp_path, when=when) as recorder:
        for _ in range(2):
            recorder._model(x_of())
    (line,) = recorder.left_out
    assert "without ids and weights [T, K]" in line


@pytest.mark.parametrize("kind", ["stacked", "qwen"])
def test_calls_outlive_their_process(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_crash_ring` kills the process; here it goes on, and what the watcher would do is called."""
    monkeypatch.setattr(crash_ring.subprocess, "run", lambda *given, **options: None)
    model = get_model(kind)
    with MoeRecorder(model, tmp_path, when="crash") as recorder:
        model(x_of()[:, :1])
        model(x_of())
        ring = recorder.ring
        assert ring is not None
        crash_watcher.write_calls(ring._memory.fileno(), ring._notes.fileno(), 10**6, tmp_path, 1)
    capsules = [load(file) for file in tmp_path.glob(f"*{SUFFIX}")]
    rows = {(left.record.layer, left.record.call): len(left.tensors["x"]) for left in capsules}
    names = "layers.0.experts", "layers.1.experts"
    assert rows == {(name, call): count for name in names for call, count in ((1, 2), (2, 6))}


@pytest.mark.upstream
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_a_real_model_of_transformers_is_recorded(kind: str, tmp_path: Path) -> None:
    model = make_transformers_model(kind)
    with torch.no_grad(), MoeRecorder(model, tmp_path, when="first") as recorder:
        model(torch.arange(6)[None])
    (file,) = recorder.files
    assert load(file).record.layer.startswith("model.layers.0.")
    assert judge(load(file))["right"] is True


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
