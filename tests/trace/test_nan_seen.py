"""The NaN locator reports what it did not check, and leaves models unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moedoctor.trace import NanLocator
from moedoctor.trace.nan_report import Finding
from moedoctor.trace.nan_state import NanState
from tests.trace.test_nan_outputs import Gives, traced

NAN = float("nan")
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

    def fails() -> None:
        raise RuntimeError("the device is lost")

    locator = NanLocator(model).__enter__()
    assert hooks(model)
    monkeypatch.setattr(locator._state, "end", fails)
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
