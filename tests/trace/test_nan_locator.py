"""The NaN locator on small models: the first finding, its rows, and compiled models."""

import pytest
import torch

from moedoctor.trace import NanLocator
from moedoctor.trace.nan_report import Finding, make_row
from moedoctor.trace.nan_state import NanState

NAN, INF = float("nan"), float("inf")


class Spoil(torch.nn.Module):
    """Writes `value` into the given rows of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.value = NAN

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows:
            x = x.clone()
            x[self.rows, 0] = self.value
        return x


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.late = torch.nn.Linear(4, 4)  # registered first and called last
        self.early = torch.nn.Linear(4, 4)
        self.spoil = Spoil()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.spoil(self.early(x)))


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6, 4))
        self.ids = torch.zeros(3, 2, dtype=torch.int64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.weight.t(), self.ids


def test_the_first_module_and_step_are_reported() -> None:
    model, x = Model(), torch.ones(3, 4)
    with NanLocator(model) as locator:
        model(x)
        model.spoil.rows = [1]
        model(x)
        model(x)
    report = locator.report()
    assert report.first_real == Finding("spoil", "NaN", step=2, order=1)
    assert report.first_padding is None
    assert (report.steps, report.nan_in_real, report.watched) == (3, 2, 4)
    counts = {point.point: (point.nan_rows, point.nan_steps) for point in report.points}
    assert counts == dict.fromkeys(("spoil", "late", "model"), ((2, 0, 0), (2, 0, 0)))


def test_real_rows_and_padding_are_separate() -> None:
    model, x = Model(), torch.ones(5, 4)
    with NanLocator(model) as locator:
        for rows, value, real in (([], NAN, 5), ([4], NAN, 3), ([0], INF, 4), ([2, 3], INF, 2)):
            model.spoil.rows, model.spoil.value = rows, value
            locator.begin_step(real, 5)
            model(x)
            locator.end_step()
    report = locator.report()
    assert (report.steps, report.steps_with_padding, report.pad_tokens) == (4, 3, 2 + 1 + 3)
    assert report.mean_pad_tokens == 2.0
    assert (report.first_real, report.first_padding) == (
        Finding("spoil", "Inf", 3, report.first_real.order if report.first_real else 0),
        Finding("spoil", "NaN", 2, 1),
    )
    assert (report.inf_in_real, report.inf_in_padding) == (1, 1)
    row = report.to_row()
    assert row["steps_with_padding"] == 3
    assert row == make_row(report.to_evidence())
    assert "first in padding: NaN at spoil, step 2" in report.to_text()


def test_only_calls_inside_a_step_and_the_context_are_recorded() -> None:
    model = Model()
    model.spoil.rows = [0]
    with NanLocator(model) as locator:
        locator.begin_step(3, 3)
        locator.end_step()
        model(torch.ones(3, 4))
    model(torch.ones(3, 4))
    assert (locator.report().steps, locator.report().points) == (1, ())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
def test_a_compiled_model_keeps_its_hooks() -> None:
    torch._dynamo.reset()
    router = Router()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), router)
    with NanLocator(model) as locator:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        x = torch.ones(3, 4)
        for ids in ([[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 2], [-1, 7]], [[0, 1], [2, 3], [4, 5]]):
            router.ids.copy_(torch.tensor(ids))
            locator.begin_step(2, 3)
            compiled(x)
            locator.end_step()
            x[2] = NAN
    report = locator.report()
    assert report.first_padding == Finding("0", "NaN", 2, 1)
    assert (report.steps_with_padding, report.nan_in_padding, report.nan_in_real) == (3, 2, 0)
    (found,) = report.routers
    assert (found.repeated, found.out_of_range, found.sentinel) == ((1, 0, 0), (0, 1, 0), (0, 1, 0))
    assert found.first_repeated == 2


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ValueError, match="device: none is given"):
        NanLocator()
    with pytest.raises(ValueError, match="larger capacity"):
        NanLocator(Model(), capacity=2)


@pytest.mark.parametrize(("together", "first"), [((), "experts"), ((0, 1), "attention")])
def test_within_one_launch_the_first_point_is_reported(together: tuple[int, ...], first: str) -> None:
    """Rows of a launch run in any order, so points may be recorded in any order."""
    state = NanState("cpu", 4)
    for name in ("attention", "experts", "model"):
        state.add_point(name)
    state._together.update(dict.fromkeys(together, 0))
    bad = torch.full((1, 2), NAN)
    state.begin(1, 1)
    state.watch(1, bad)
    state.watch(0, bad)
    state.watch(2, bad)
    state.end()
    assert state.report().first_real == Finding(first, "NaN", 1, 1)


@pytest.mark.gpu
def test_a_cuda_graph_reads_the_mask_of_the_step_that_runs() -> None:
    model, x = Model().cuda(), torch.ones(4, 4, device="cuda")
    with NanLocator(model) as locator:
        masks = [torch.tensor(mask, device="cuda") for mask in ([0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 1])]
        locator.begin_step(padding=masks[0])
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        locator.end_step()
        x[0, 1] = NAN
        for mask in masks[1:]:
            locator.begin_step(padding=mask)
            graph.replay()
            locator.end_step()
        locator.begin_step(4, 5)  # without a mask, and of another number of rows
        graph.replay()
        locator.end_step()
    report = locator.report()
    assert report.first_padding == Finding("early", "NaN", 2, 1)
    assert report.first_real is not None
    assert (report.first_real.point, report.first_real.step) == ("early", 3)
    assert report.first_unknown is not None
    assert (report.first_unknown.point, report.first_unknown.step) == ("early", 4)
    assert (report.nan_in_real, report.nan_in_padding, report.nan_in_unknown) == (1, 1, 1)
