"""An offload that fails leaves the module as it was: no weight is lost, no forward stays wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moedoctor.fixes.offload import storage as offload_storage
from moedoctor.fixes.offload.hooks import MARK
from moedoctor.fixes.offload.plan import make_plan
from moedoctor.fixes.offloader import Offload, offload

WIDTH = 16


def stack(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).requires_grad_(False)


def offloaded(model: nn.Module, **options: Any) -> Offload:
    return offload(model, 1 << 40, **{"keep_below": 0, "pin": lambda memory: lambda: None, **options})


def out_of_memory(*args: Any) -> Any:
    raise torch.OutOfMemoryError("no room")


def assert_untouched(model: nn.Module) -> None:
    assert all("forward" not in vars(one) and MARK not in vars(one) for one in model.modules())


@pytest.mark.parametrize(
    "place",
    [
        "moedoctor.fixes.offload.storage.buffers_for",
        "moedoctor.fixes.offloader.Hooks",
        "moedoctor.fixes.offloader.settle_in",
    ],
)
def test_memory_that_runs_out_leaves_the_module_as_it_was(
    monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, place: str
) -> None:
    model = stack()
    expected = model(x)
    with monkeypatch.context() as patched:
        patched.setattr(place, out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            offloaded(model)
    assert torch.equal(model(x), expected)
    assert_untouched(model)
    offloaded(model)
    assert torch.equal(model(x), expected)


def test_where_the_device_has_no_room_any_more_weights_stay_on_the_host_and_are_named(
    monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    model = stack()
    expected = model(x)
    monkeypatch.setattr(offload_storage, "buffers_for", out_of_memory)
    monkeypatch.setattr(offload_storage, "_bring_back", out_of_memory)
    with pytest.warns(RuntimeWarning) as caught, pytest.raises(torch.OutOfMemoryError):
        offloaded(model)
    (said,) = [str(one.message) for one in caught]
    assert said.endswith(
        "no room left for what lay there: on the host now: 0.weight, 1.weight, 2.weight and 1 more"
    )
    assert [tuple(one.weight.shape) for one in model] == [(WIDTH, WIDTH)] * 4
    assert torch.equal(model(x), expected)


def test_what_a_loader_left_on_the_host_is_there_again_as_it_was(x: torch.Tensor) -> None:
    model = stack()
    expected, before = model(x), [one.data_ptr() for one in model.parameters()]
    elsewhere = torch.device("cpu", 0)  # torch takes it for another device than "cpu"
    stored, _ = offload_storage.store(make_plan(model, 1 << 40, (), None, 0), None)
    kept = offload_storage.empty(stored, elsewhere)
    assert [one.weight.numel() for one in model] == [0] * 4
    offload_storage.undo(stored, elsewhere, kept)
    assert [one.data_ptr() for one in model.parameters()] == before
    assert torch.equal(model(x), expected)


class Rigid(nn.Linear):
    """Takes no other forward."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise AttributeError("no")
        super().__setattr__(name, value)


def test_a_layer_that_cannot_be_wrapped_leaves_none_wrapped(x: torch.Tensor) -> None:
    model = stack()
    model[2] = Rigid(WIDTH, WIDTH)
    expected = model(x)
    hooks = [len(one._state_dict_hooks) for one in model]
    for _ in range(2):  # a second time nothing is in the way of the same error
        with pytest.raises(AttributeError, match="no"):
            offloaded(model)
    assert_untouched(model)
    assert [len(one._state_dict_hooks) for one in model] == hooks
    assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_layer_stays_among_others_that_go(x: torch.Tensor) -> None:
    model = stack(5)
    model[2] = torch.jit.script(model[2])
    expected = model(x)
    handle = offloaded(model)
    rows = {one.name: one for one in handle.report().placements}
    assert (rows["2.weight"].lives, rows["2.weight"].reason) == ("device", "outside of the layers")
    assert rows["1.weight"].lives == rows["3.weight"].lives == "host"
    assert all(torch.equal(model(x), expected) for _ in range(3))
    scripted = torch.jit.script(stack())
    assert offloaded(scripted).report().notes[0].startswith("nothing was offloaded")


def test_a_warning_that_is_an_error_comes_before_anything_is_changed(x: torch.Tensor) -> None:
    def failing(memory: torch.Tensor) -> Callable[[], None]:
        raise RuntimeError("no lock")

    model = stack()
    before = [one.data_ptr() for one in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="no lock"):
            offloaded(model, pin=failing)
    assert [one.data_ptr() for one in model.parameters()] == before
    assert_untouched(model)
