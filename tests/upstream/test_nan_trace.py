"""The trace `nan` in a stub that is shaped like vLLM 0.21.0 where it is hooked, on the CPU."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.trace.nan_report import Finding
from moedoctor.upstream import nan_engine, nan_trace, vllm_plugin
from moedoctor.upstream.fix_support import FixError
from moedoctor.upstream.padding_experiment import VARIABLE, Experiment, renamed

NAN = float("nan")
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
    "vllm/model_executor/layers/fused_moe/runner/moe_runner.py": """
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
}


@pytest.fixture(autouse=True)
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for folder in [one for one in (tmp_path / "vllm").rglob("*") if one.is_dir()]:
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(nan_trace.atexit, "register", lambda *arguments: None)
    forget()
    yield
    forget()


def forget() -> None:
    for name in [one for one in sys.modules if one == "vllm" or one.startswith("vllm.")]:
        del sys.modules[name]


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
        return self.runner._apply_quant_method(self.layer, x, x, None)[1]


def step(model: Model, rows: int = 4) -> torch.Tensor:
    asked = types.SimpleNamespace(total_num_scheduled_tokens=model.real, input_ids=torch.zeros(rows))
    out: torch.Tensor = module("v1.worker.gpu_model_runner").GPUModelRunner(model).execute_model(asked)
    return out


def test_nan_that_attention_leaves_in_padding_is_found_up_to_the_router() -> None:
    assert "report at exit" in nan_trace.apply("0.21.0")
    model = Model(leftover=NAN)
    model(torch.zeros(4))  # as in a warm-up: no step runs
    step(model)
    model.real = 4
    step(model)
    report = nan_trace.trace_of_this_process().report()
    assert report is not None
    assert report.row() == {
        "steps": 2,
        "steps_with_padding": 1,
        "nan_in_padding": 1,
        "nan_share": 1.0,
        "inf_in_padding": 0,
        "mean_pad_tokens": 1.0,
    }
    assert report.first_padding == Finding("layers.0.attn", "NaN", 1, 1)
    assert report.first_real is None
    (router,) = report.routers
    assert (router.point, router.repeated, router.first_repeated) == ("layers.0.experts.topk_ids", (0, 1), 1)
    seen = [one.point for one in report.points]
    assert seen == ["layers.0.attn", "layers.0.experts.router_logits", "layers.0.experts", "model"]
    assert nan_engine.report(None)["nan_in_padding"] == 1


def test_a_clean_model_shows_nothing() -> None:
    nan_trace.apply("0.21.0")
    step(Model())
    report = nan_trace.trace_of_this_process().report()
    assert report is not None
    assert (report.points, report.routers, report.steps_with_padding) == ((), (), 1)


def test_attention_is_looked_at_with_the_experts_and_a_step_is_two_launches_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nan_trace.apply("0.21.0")
    model = Model()
    model(torch.zeros(4))  # the profile run, where it shows that experts follow
    state, seen = nan_trace.trace_of_this_process().state, []
    for name in ("begin", "watch", "watch_three", "watch_ids", "watch_last"):
        monkeypatch.setattr(state, name, lambda *arguments, name=name: seen.append((name, arguments[0])))
    runner = module("v1.worker.gpu_model_runner").GPUModelRunner
    replayed = types.SimpleNamespace(total_num_scheduled_tokens=3, input_ids=torch.zeros(4))

    def replay(input_ids: torch.Tensor) -> torch.Tensor:
        """As where a graph holds the experts: only attention runs in Python."""
        return model.attention(torch.zeros(3, 8), torch.zeros(4, 8))

    for _ in range(2):
        runner(replay).execute_model(replayed)
    assert [name for name, _ in seen] == ["begin", "watch_last"] * 2
    seen.clear()
    step(model)
    assert [name for name, _ in seen] == ["begin", "watch_ids", "watch_three", "watch_last"]
    assert [state.names[one] for one in seen[2][1]] == [
        "layers.0.attn",
        "layers.0.experts.router_logits",
        "layers.0.experts",
    ]


def test_an_attention_layer_without_experts_is_looked_at_at_once() -> None:
    nan_trace.apply("0.21.0")
    model = Model()
    dense = module("model_executor.layers.attention.attention").Attention("layers.dense.attn")

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        dense(torch.zeros(3, 8), torch.full((4, 8), NAN))
        return model(input_ids)

    asked = types.SimpleNamespace(total_num_scheduled_tokens=3, input_ids=torch.zeros(4))
    runner = module("v1.worker.gpu_model_runner").GPUModelRunner(forward)
    forward(asked.input_ids)  # the profile run
    runner.execute_model(asked)
    report = nan_trace.trace_of_this_process().report()
    assert report is not None
    assert report.first_padding == Finding("layers.dense.attn", "NaN", 1, 1)
    assert [one.point for one in report.points] == ["layers.dense.attn"]


def test_rows_of_all_ranks_are_not_taken_for_this_ranks_rows() -> None:
    nan_trace.apply("0.21.0")
    model = Model(leftover=NAN)

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        x = model.attention(torch.zeros(3, 8), torch.full((4, 8), NAN))
        gathered = torch.cat([x, x])  # what another rank sent comes after this rank's rows
        model.runner._apply_quant_method(model.layer, gathered, gathered, None)
        return torch.zeros(4, 8)

    asked = types.SimpleNamespace(total_num_scheduled_tokens=3, input_ids=torch.zeros(4))
    module("v1.worker.gpu_model_runner").GPUModelRunner(forward).execute_model(asked)
    report = nan_trace.trace_of_this_process().report()
    assert report is not None
    assert [one.point for one in report.points] == ["layers.0.attn"]
    assert (report.routers, report.nan_in_padding) == ((), 1)


def test_the_experiment_makes_padding_nan_and_only_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"poison_padding": true}')
    assert "padding rows are made NaN" in nan_trace.apply("0.21.0")
    out = step(Model(), rows=6)
    assert out.isnan().any(1).tolist() == [False] * 3 + [True] * 3


def test_asked_twice_the_first_trace_stays() -> None:
    nan_trace.apply("0.21.0")
    trace = nan_trace.trace_of_this_process()
    assert nan_trace.apply("0.21.0") == "is active already"
    step(Model(leftover=NAN))
    assert nan_trace.trace_of_this_process() is trace
    found = trace.report()
    assert found is not None
    assert found.steps == 1


def test_another_vllm_is_left_alone() -> None:
    runner = module("v1.worker.gpu_model_runner").GPUModelRunner
    original = runner.execute_model
    del module("model_executor.layers.fused_moe.runner.moe_runner").MoERunner._apply_quant_method
    with pytest.raises(FixError, match=r"there is no MoERunner\._apply_quant_method"):
        nan_trace.apply("0.21.0")
    assert runner.execute_model is original
    with pytest.raises(LookupError, match="MOEDOCTOR_TRACE=nan"):
        nan_trace.trace_of_this_process()


def test_the_report_is_printed_at_exit(capsys: pytest.CaptureFixture[str]) -> None:
    nan_trace.apply("0.21.0")
    step(Model(leftover=NAN))
    nan_trace._print(nan_trace.trace_of_this_process())
    said = capsys.readouterr().err
    assert "first in padding: NaN at layers.0.attn, step 1" in said
    assert "repeated ids (0, 1)" in said


def test_the_plug_in_knows_the_trace() -> None:
    assert vllm_plugin.TRACES["nan"] == "moedoctor.upstream.nan_trace"


@pytest.mark.parametrize("text", ["no json", '{"other": 1}', "[]"])
def test_an_experiment_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(FixError, match=VARIABLE):
        Experiment.from_environment({VARIABLE: text})


def test_no_experiment_unless_it_is_asked_for() -> None:
    assert Experiment.from_environment({}) is None
    assert Experiment.from_environment({VARIABLE: '{"poison_padding": false}'}) == Experiment()


def test_the_namespace_is_renamed_where_it_is_once() -> None:
    library = b"\x7fELF\0PyInit__moe_C\0topk\0_moe_C\0\0end"
    assert renamed(library) == b"\x7fELF\0PyInit__moe_C\0topk\0_moe_X\0\0end"
    for other in (b"nothing", library + library):
        with pytest.raises(FixError, match="expected it once"):
            renamed(other)
