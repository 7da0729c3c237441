"""The trace `nan` on the CPU, in a stub of the parts of vLLM 0.21.0 that it hooks."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from moedoctor.plugin import nan_trace
from moedoctor.plugin.register import FixError
from moedoctor.trace.nan_report import Finding, NanReport
from moedoctor.upstream.engine import nan_padding
from tests.plugin import nan_stub
from tests.plugin.nan_stub import Model, module, run_script, scheduled, step, write_stub

NAN = float("nan")


@pytest.fixture(autouse=True)
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    write_stub(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nan_trace.ExitReport, "prepare", lambda self: None)  # the processes below really end
    monkeypatch.setattr(nan_trace, "_active", None)


@pytest.fixture
def model(vllm: None) -> Model:
    """A model in a process with the trace."""
    assert "report at exit" in nan_trace.apply("0.21.0")
    return Model()


def run_step(forward: Callable[[torch.Tensor], Any]) -> None:
    """Run a step of 3 real tokens in a batch of 4 through `forward` instead of the model."""
    module("v1.worker.gpu_model_runner").GPUModelRunner(forward).execute_model(scheduled(3))


def report() -> NanReport:
    made = nan_trace.trace_of_this_process().report()
    assert made is not None
    return made


def test_nan_that_attention_leaves_in_padding_is_found_up_to_the_router(model: Model) -> None:
    model.leftover = NAN
    model(torch.zeros(4))  # as in a warm-up: no step runs
    step(model)
    model.real = 4
    step(model)
    result = report()
    row = {"steps": 2, "steps_with_padding": 1, "nan_in_padding": 1, "nan_share": 1.0}
    assert result.to_row() == {**row, "inf_in_padding": 0, "mean_pad_tokens": 1.0}
    assert result.first_padding == Finding("layers.0.attn", "NaN", 1, 1)
    assert result.first_real is None
    (router,) = result.routers
    assert (router.repeated, router.first_repeated) == ((0, 1, 0), 1)
    assert router.point == "layers.0.experts.topk_ids"
    points = [place.point for place in result.points]
    assert points == ["layers.0.attn", "layers.0.experts.router_logits", "layers.0.experts", "model"]
    assert nan_padding.report(None)["nan_in_padding"] == 1


def test_operators_in_a_graph_are_watched_at_the_capture(model: Model) -> None:
    model(torch.zeros(4))  # the capture
    run_step(lambda input_ids: torch.zeros(4, 8))  # the replay: no layer runs in Python
    result = report()
    assert (result.points, result.routers, result.steps_with_padding) == ((), (), 1)
    assert (result.steps, result.watched, result.looked_at, result.not_reached) == (1, 5, 5, 0)
    assert "looked at" not in result.to_text()
    assert "first in real rows: nothing" in result.to_text()


def test_rows_of_all_ranks_are_not_taken_for_this_ranks_rows(model: Model) -> None:
    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        x = model.attention(torch.zeros(3, 8), torch.full((4, 8), NAN))
        gathered = torch.cat([x, x])  # what another rank sent comes after this rank's rows
        model.runner._apply_quant_method(model.layer, gathered, gathered, None)
        return torch.zeros(4, 8)

    run_step(forward)
    result = report()
    assert [point.point for point in result.points] == ["layers.0.attn"]
    assert (result.routers, result.nan_in_padding) == ((), 1)


def test_a_second_request_keeps_the_first_trace(model: Model) -> None:
    trace = nan_trace.trace_of_this_process()
    assert nan_trace.apply("0.21.0") == "is active already"
    step(model)
    assert nan_trace.trace_of_this_process() is trace
    assert report().steps == 1


def test_another_vllm_is_left_unchanged() -> None:
    runner = module("v1.worker.gpu_model_runner").GPUModelRunner
    original = runner.execute_model
    del module("model_executor.layers.fused_moe.runner.moe_runner").MoERunner._apply_quant_method
    with pytest.raises(FixError, match=r"there is no MoERunner\._apply_quant_method"):
        nan_trace.apply("0.21.0")
    assert runner.execute_model is original
    with pytest.raises(LookupError, match="MOEDOCTOR_TRACE=nan"):
        nan_trace.trace_of_this_process()


def test_a_step_that_raised_is_over(model: Model) -> None:
    model.leftover = NAN

    def forward(input_ids: torch.Tensor) -> None:
        model(input_ids)
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        run_step(forward)
    state = nan_trace.trace_of_this_process().state
    before = state.report()
    assert (before.steps, before.nan_in_padding) == (1, 1)
    model(torch.zeros(4))  # outside a step
    assert state.report() == before


def test_ids_are_separate_if_no_attention_gave_the_number_of_rows(model: Model) -> None:
    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        x = torch.full((6, 8), NAN)  # neither the step's rows nor a multiple of them
        model.runner._apply_quant_method(model.layer, x, x, None)
        return torch.zeros(4, 8)

    run_step(forward)
    result = report()
    assert [router.repeated for router in result.routers] == [(0, 0, 6)]
    assert (result.nan_in_real, result.nan_in_padding, result.nan_in_unknown) == (0, 0, 1)


def test_the_v2_model_runner_is_traced_in_a_newer_release(tmp_path, monkeypatch):
    write_stub(tmp_path / "newer", newer=True)
    monkeypatch.syspath_prepend(str(tmp_path / "newer"))
    assert "report at exit" in nan_trace.apply("0.33.0")
    model = Model(leftover=NAN)
    runner = module("v1.worker.gpu.model_runner").GPUModelRunner(model)
    runner.execute_model(scheduled(4), dummy_run=True)  # a dummy run is no step
    assert runner.execute_model(scheduled(0)) == "nothing to do"
    worker = module("v1.worker.gpu_worker").Worker()
    worker.compile_or_warm_up_model(lambda: runner.execute_model(scheduled(3)))  # a warm-up is no step
    runner.execute_model(scheduled(3))
    result = report()
    assert (result.steps, result.steps_with_padding, result.nan_in_padding) == (1, 1, 1)
    assert result.first_padding == Finding("layers.0.attn", "NaN", 1, 1)
    assert [router.repeated for router in result.routers] == [(0, 1, 0)]
    points = [place.point for place in result.points]
    assert points == ["layers.0.attn", "layers.0.experts.router_logits", "layers.0.experts", "model"]
    runner.model = Mock(side_effect=ValueError("on purpose"))
    with pytest.raises(ValueError, match="on purpose"):
        runner.execute_model(scheduled(3))
    model(torch.zeros(4))  # outside a step
    assert (report().steps, report().nan_in_padding) == (2, 1)


def test_a_report_survives_the_device(model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    trace = nan_trace.trace_of_this_process()
    state = trace.state
    state._copies = [torch.zeros_like(part) for part in state._parts]
    mirror = state.mirror

    def as_on_a_gpu() -> None:
        state._device = torch.device("cuda")
        mirror()
        state._device = torch.device("cpu")

    state.mirror = as_on_a_gpu
    model.leftover = NAN
    step(model)  # copies the record at its end
    before = report()
    for part in state._parts:
        part.zero_()  # what the device holds is lost
    assert state.last_report() == before
    assert before.nan_in_padding == 1
    error = RuntimeError("CUDA error: device-side assert triggered\nFor debugging")
    trace.report = Mock(side_effect=error)  # type: ignore[method-assign]
    nan_trace.ExitReport(trace).print()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].endswith("for the device failed: CUDA error: device-side assert triggered")
    assert any("first in padding: NaN at layers.0.attn, step 1" in line for line in lines)


def test_without_pinned_memory_nothing_is_copied(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    state = nan_trace.trace_of_this_process().state
    state._device = torch.device("cuda")
    with monkeypatch.context() as without:
        without.setattr(torch, "zeros_like", Mock(side_effect=RuntimeError("CUDA error: out of memory")))
        state.mirror()
    state.mirror()  # not tried again
    assert state.last_report() is None


def test_experts_that_are_added_up_later_are_not_looked_at(model: Model) -> None:
    runner = module("model_executor.layers.fused_moe.runner.moe_runner").MoERunner(model.runner.router)
    finished = types.SimpleNamespace(gemm2_permuted=torch.zeros(8, 8))
    trace = nan_trace.trace_of_this_process()
    apply_quant_method = trace.wrap_moe(lambda self, layer, router_logits: (None, finished))
    x = torch.full((4, 8), NAN)

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        apply_quant_method(runner, model.layer, x)
        return torch.zeros(4, 8)

    run_step(forward)
    assert [place.point for place in report().points] == ["layers.0.experts.router_logits"]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "printing"), [("fork", 1), ("spawn", 1), ("inherit", 0)])
def test_the_process_that_ran_prints_once(tmp_path: Path, how: str, printing: int) -> None:
    write_stub(tmp_path)
    done = run_script(nan_stub.__file__, str(tmp_path), how)
    assert done.returncode == 0, done.stderr[-3000:]
    started = [line.split()[1] for line in done.stdout.splitlines()]
    assert len(started) == 2
    assert done.stderr.count("NaN trace of process") == 1, done.stderr
    assert f"NaN trace of process {started[printing]}\n" in done.stderr
    assert "first in padding: NaN at layers.0.attn, step 1" in done.stderr
    assert "repeated ids (0, 1, 0)" in done.stderr
