"""The NaN locator and outputs of other shapes than the step's, or of other types than tensors."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moedoctor.trace import NanLocator
from moedoctor.trace.nan_report import Finding, NanReport
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
