"""The NaN locator: the first finding, its rows, outputs of other shapes and types, ids, compiled models."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from moedoctor.trace import NanLocator
from moedoctor.trace.nan_report import Finding, NanReport, make_row
from moedoctor.trace.nan_state import NanState

NAN, INF = float("nan"), float("inf")
BATCH, TOKENS, HEADS = 2, 5, 3
MASK = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])


class Gives(torch.nn.Module):
    """Returns `make` of its input."""

    num_experts = 8

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


def traced(make: Callable[[torch.Tensor], Any], x: torch.Tensor, **begin: Any) -> NanReport:
    model = Gives(make)
    with NanLocator(model, device="cpu") as locator:
        if begin:
            locator.begin_step(**begin)
        model(x)
        locator.end_step()
    return locator.report()


@dataclasses.dataclass(frozen=True)
class Step:
    """Tokens in this shape, one of them padding and one real, and what the locator gets to know of them."""

    tokens: tuple[int, ...]
    padding: tuple[int, ...]
    real: tuple[int, ...]
    begin: dict[str, Any]


MASKED = Step((BATCH, TOKENS), (0, 1), (0, 2), {"padding": MASK})
COUNTED = Step((4,), (3,), (2,), {"real_rows": 3, "rows": 4})


@pytest.mark.parametrize("is_padding", [True, False])
@pytest.mark.parametrize(
    ("step", "make", "known"),
    [
        (MASKED, lambda x: x, True),
        (MASKED, lambda x: x.flatten(2), True),
        (MASKED, lambda x: x.flatten(0, 1), True),
        (MASKED, lambda x: x.flatten(0, 2), True),
        (MASKED, lambda x: x[..., 0, 0], True),
        (MASKED, lambda x: x.transpose(1, 2), False),
        (MASKED, lambda x: x.transpose(0, 1), False),
        (MASKED, lambda x: x[:1, :3], False),
        (MASKED, lambda x: x[:, :, :1].expand(-1, -1, TOKENS, -1), False),  # heads may be first or last
        (MASKED, lambda x: x[:, :, :1].expand(-1, -1, TOKENS, -1).flatten(0, 1), False),
        (COUNTED, lambda x: x, True),
        (COUNTED, lambda x: x[None], True),
        (COUNTED, lambda x: x[:, 0, 0], True),
        (COUNTED, lambda x: x.flatten(0, 1), True),
        (COUNTED, lambda x: x.transpose(0, 1), False),
        (COUNTED, lambda x: torch.cat([x.flatten(0, 1), torch.ones(1, 4)]), False),
    ],
)
def test_rows_are_padding_if_their_token_is(step: Step, make: Any, known: bool, is_padding: bool) -> None:
    x = torch.ones(*step.tokens, HEADS, 4)  # [B, T, heads, D] or [T, heads, D]
    x[step.padding if is_padding else step.real] = NAN
    report = traced(make, x, **step.begin)
    which = (1 if is_padding else 0) if known else 2
    kinds = (report.first_real, report.first_padding, report.first_unknown)
    assert kinds == tuple(Finding("model", "NaN", 1, 1) if index == which else None for index in range(3))
    steps = (report.nan_in_real, report.nan_in_padding, report.nan_in_unknown)
    assert steps == tuple(int(index == which) for index in range(3))
    assert (report.steps_with_padding, report.pad_tokens) == (1, 2 if step is MASKED else 1)
    assert ("rows that may be either: NaN in 1 steps" in report.to_text()) is not known


@pytest.mark.parametrize("begin", [{}, {"real_rows": 4}, {"padding": torch.zeros(2, 2)}])
def test_without_padding_all_rows_are_real(begin: dict[str, Any]) -> None:
    report = traced(lambda x: x, torch.full((3, 2), NAN), **begin)
    assert (report.nan_in_real, report.nan_in_unknown) == (1, 0)


@dataclasses.dataclass
class Output:
    count: int
    logits: torch.Tensor


OUTPUTS = {
    "mapping": lambda x: OrderedDict(loss=None, logits=x),
    "nested tuple": lambda x: (torch.ones(2, 2), (None, [x])),
    "dataclass": lambda x: Output(1, x),
    "one dimension": lambda x: x.sum(1),
    "no dimension": lambda x: x.sum(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_any_structure_are_checked(kind: str) -> None:
    x = torch.ones(3, 4)
    assert traced(OUTPUTS[kind], x).first_real is None
    x[1, 1] = NAN
    report = traced(OUTPUTS[kind], x)
    assert report.first_real == Finding("model", "NaN", 1, 1)


def test_an_output_without_elements_is_skipped() -> None:
    for shape in ((3, 0), (0, 3), (0,)):
        assert traced(lambda x: x, torch.ones(shape)).points == ()


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        ({"padding": torch.tensor([1, 0, 0, 1])}, (1, 2, 0)),
        ({"padding": torch.tensor([[1, 0]])}, (1, 2, 0)),  # two rows of ids for each
        ({"padding": torch.tensor([1, 0, 0])}, (0, 0, 3)),
        ({"padding": torch.zeros(3)}, (3, 0, 0)),
        ({"real_rows": 3, "rows": 4}, (2, 1, 0)),
        ({"real_rows": 1, "rows": 2}, (2, 1, 0)),
        ({"real_rows": 2, "rows": 3}, (0, 0, 3)),
        ({}, (3, 0, 0)),
    ],
)
def test_ids_are_padding_if_their_row_is(begin: dict[str, Any], repeated: tuple[int, ...]) -> None:
    ids = torch.tensor([[1, 1], [2, 2], [3, 4], [5, 5]])
    report = traced(lambda x: (x, ids), torch.ones(4, 2), **begin)
    (found,) = report.routers
    assert (found.repeated, found.first_repeated) == (repeated, 1)
    assert report.routers_watched == 1


def test_the_report_says_what_is_not_known() -> None:
    text = traced(lambda x: x, torch.ones(3, 4)).to_text()
    assert text.endswith("no router was watched, so nothing is known of expert ids")
    locator = NanLocator(device="cpu")
    assert "no step was traced" in locator.report().to_text()
    locator.begin_step()
    locator.watch_ids(locator.add_point("router"), torch.tensor([[0, 1]]), 4)
    locator.end_step()
    assert locator.report().to_text().endswith("none of 1 routers gave repeated ids, ids out of range or -1")


def test_a_step_that_raised_is_counted_with_its_findings() -> None:
    def fail_at_nan(x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("on purpose")
        return x

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Gives(fail_at_nan))
    with NanLocator(model) as locator:
        with pytest.raises(ValueError, match="on purpose"):
            model(torch.full((2, 2), NAN))
        for _ in range(2):  # asking changes nothing
            report = locator.report()
            assert (report.steps, report.nan_in_real) == (1, 1)
        model(torch.ones(2, 2))
    report = locator.report()
    assert report.first_real == Finding("0", "NaN", 1, 1)
    assert (report.steps, report.nan_in_real) == (2, 1)


def test_masks_of_one_size_share_one_buffer() -> None:
    """A CUDA graph reads the mask at the address that it had at the capture."""
    state = NanState("cpu", 1)
    places = set()
    for mask in ([[1, 0], [0, 1]], [[0, 0], [1, 1]]):
        state.begin_masked(torch.tensor(mask))
        assert state.padding is not None
        assert state.padding.tolist() == mask
        places.add(state.padding.data_ptr())
    state.begin(2, 2)
    assert state.padding is None
    state.begin_masked(torch.zeros(9))  # another size has a place of its own
    state.begin_masked(torch.ones(4))
    assert state.padding.data_ptr() in places
    assert len(places) == 1


def test_two_points_cannot_have_the_same_name() -> None:
    model = Gives(lambda x: x)
    model.model = torch.nn.Linear(2, 2)
    assert NanLocator(model)._state.names == ["Gives", "model"]


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


NEVER = "modules were never looked at (compiled before the locator was entered, or not called)"


class Layers(torch.nn.Module):
    """Two layers in a list that is never called itself; NaN between them does not reach the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x)).nan_to_num()


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


def hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_a_compiled_model_is_not_reported_as_clean() -> None:
    model = Layers()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(3, 4))
    with NanLocator(model) as locator:
        compiled(torch.full((3, 4), NAN))
    report = locator.report()
    assert (report.watched, report.looked_at, report.not_reached) == (3, 1, 2)
    assert f"2 of 3 {NEVER}" in report.to_text()
    assert "first in real rows that were looked at: nothing" in report.to_text()
    with NanLocator(model) as locator:
        model(torch.full((3, 4), NAN))
    report = locator.report()
    assert report.first_real == Finding("layers.0", "NaN", 1, 1)
    assert (report.watched, report.looked_at, report.not_reached) == (3, 3, 0)
    assert "first in real rows: NaN at layers.0" in report.to_text()
    assert "never looked at" not in report.to_text()


def test_without_checked_outputs_the_report_names_no_first_module() -> None:
    model = Layers()
    with NanLocator(model, wanted=lambda name, module: False) as locator:
        model(torch.ones(3, 4))
    text = locator.report().to_text()
    assert "nothing was looked at" in text
    assert "first in" not in text
    with NanLocator(model) as locator:
        model.layers[0](torch.ones(3, 4))  # no call of the model, so no step
    assert "first in" not in locator.report().to_text()


def test_compiled_code_marks_its_points_and_compiles_once_per_locator() -> None:
    compiled_graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        nonlocal compiled_graphs
        compiled_graphs += 1
        return graph

    model = Layers()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):  # the second finds code that was compiled with the hooks of the first
        with torch.no_grad(), NanLocator(model) as locator:
            compiled(torch.ones(3, 4))
            after_one = compiled_graphs
            for _ in range(2):
                compiled(torch.ones(3, 4))
        report = locator.report()
        assert (report.steps, report.looked_at, report.not_reached) == (3, 3, 0)
        assert compiled_graphs == after_one > 0


ELSEWHERE: dict[str, Callable[[torch.Tensor], Any]] = {
    "another device": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_every_check_skips_unreadable_outputs(kind: str) -> None:
    state = NanState("cpu", 8)
    for name in "abcdefg":
        state.add_point(name)
    bad = torch.full((3, 4), NAN)
    other = ELSEWHERE[kind](bad)
    state.begin(3, 3)
    state.watch(0, other)
    state.watch_three((1, 2, 3), (other, bad, other))
    ids = torch.zeros(3, 2, dtype=torch.int64)
    state.watch_ids(4, ids.to("meta") if kind == "another device" else ids.to_sparse(), 8, own=True)
    state.watch_last(5, other)
    report = state.report()
    assert [point.point for point in report.points] == ["c"]
    assert (report.steps, report.looked_at, report.passed_over, report.not_reached) == (1, 1, 5, 1)
    assert report.routers_watched == 0
    assert "5 outputs on other devices or layouts were not looked at" in report.to_text()


def test_a_module_that_gives_no_tensor_is_reached_and_one_that_is_not_called_is_not() -> None:
    model = Gives(lambda x: None)
    model.unused = torch.nn.Linear(4, 4)
    with NanLocator(model) as locator:
        model(torch.ones(3, 4))
    assert f"1 of 2 {NEVER}" in locator.report().to_text()


def test_hooks_are_removed_if_the_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers()
    locator = NanLocator(model).__enter__()
    assert hooks(model)
    monkeypatch.setattr(locator._state, "end", Mock(side_effect=RuntimeError("the device is lost")))
    with pytest.raises(RuntimeError, match="the device is lost"):
        locator.__exit__()
    assert hooks(model) == 0


def test_an_error_at_the_start_leaves_no_hooks() -> None:
    model = Layers()
    last = list(model.modules())[-1]
    last.register_forward_hook = None
    locator = NanLocator(model)
    with pytest.raises(TypeError):
        locator.__enter__()
    assert hooks(model) == 0
    del last.register_forward_hook
    with locator:
        assert hooks(model) == 5
    assert hooks(model) == 0


def test_a_locator_from_inference_mode_works_outside() -> None:
    model, mask = Layers(), torch.tensor([0, 0, 1])
    with torch.inference_mode():
        locator = NanLocator(model)
        locator.begin_step(padding=mask)
    with locator:
        locator.begin_step(padding=mask)
        model(torch.full((3, 4), NAN))
    assert locator.report().first_real == Finding("layers.0", "NaN", 2, 1)
    assert hooks(model) == 0


IDS = torch.tensor([[7, 7], [2, 9]])
GIVEN: dict[str, tuple[tuple[torch.Tensor, ...], int]] = {
    "alone, as ids of tokens": ((IDS,), 0),
    "with logits of other rows": ((IDS, torch.ones(3, 8)), 0),
    "with the logits of a vocabulary": ((IDS, torch.ones(2, 2, 100)), 0),
    "with other integers": ((IDS, torch.ones(2, 2, dtype=torch.int64)), 0),
    "with their weights": ((torch.ones(2, 2), IDS), 1),
    "with the router's logits": ((torch.ones(2, 8), IDS), 1),
}


@pytest.mark.parametrize("given", GIVEN)
def test_integers_are_expert_ids_if_weights_or_logits_come_with_them(given: str) -> None:
    outputs, routers = GIVEN[given]
    report = traced(lambda x: outputs, torch.ones(2, 4))
    assert report.routers_watched == len(report.routers) == routers
    for router in report.routers:
        assert (router.repeated, router.out_of_range) == ((1, 0, 0), (1, 0, 0))
