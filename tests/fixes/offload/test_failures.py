"""An offload that fails leaves the module unchanged: no weight is lost, no forward stays wrapped."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from moedoctor.fixes.offload import storage as offload_storage
from moedoctor.fixes.offload.hooks import MARK
from moedoctor.fixes.offload.plan import make_plan
from tests.fixes.offload.models import WIDTH, assert_same_bits, offloaded, stack


def out_of_memory(*args: Any) -> Any:
    raise torch.OutOfMemoryError("no room")


def assert_untouched(model: nn.Module) -> None:
    assert all("forward" not in vars(module) and MARK not in vars(module) for module in model.modules())


@pytest.mark.parametrize("place", ["offload.storage.make_buffers", "offloader.Hooks", "offloader.settle_in"])
def test_running_out_of_memory_leaves_the_module_unchanged(monkeypatch, x, place):
    model = stack()
    expected = model(x)
    with monkeypatch.context() as patched:
        patched.setattr(f"moedoctor.fixes.{place}", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            offloaded(model)
    assert torch.equal(model(x), expected)
    assert_untouched(model)
    offloaded(model)
    assert torch.equal(model(x), expected)


def test_weights_that_cannot_return_to_the_device_stay_on_the_host_and_are_named(monkeypatch, x):
    model = stack()
    expected = model(x)
    monkeypatch.setattr(offload_storage, "make_buffers", out_of_memory)
    monkeypatch.setattr(offload_storage, "_bring_back", out_of_memory)
    with pytest.warns(RuntimeWarning) as caught, pytest.raises(torch.OutOfMemoryError):
        offloaded(model)
    (text,) = [str(warning.message) for warning in caught]
    assert text.endswith("on the host now: 0.weight, 1.weight, 2.weight and 1 more")
    assert [tuple(layer.weight.shape) for layer in model] == [(WIDTH, WIDTH)] * 4
    assert torch.equal(model(x), expected)


def test_undo_puts_back_the_host_tensors_of_a_loader(x: torch.Tensor) -> None:
    model = stack()
    expected, before = model(x), [parameter.data_ptr() for parameter in model.parameters()]
    elsewhere = torch.device("cpu", 0)  # torch treats it as a different device from "cpu"
    stored, _ = offload_storage.store(make_plan(model, 1 << 40, (), None, 0), None)
    kept = offload_storage.free(stored, elsewhere)
    assert [layer.weight.numel() for layer in model] == [0] * 4
    offload_storage.undo(stored, elsewhere, kept)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert torch.equal(model(x), expected)


class Rigid(nn.Linear):
    """Refuses another forward."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise AttributeError("no")
        super().__setattr__(name, value)


def test_if_one_layer_cannot_be_wrapped_no_layer_stays_wrapped(x: torch.Tensor) -> None:
    model = stack()
    model[2] = Rigid(WIDTH, WIDTH)
    expected = model(x)
    hooks = [len(layer._state_dict_hooks) for layer in model]
    for _ in range(2):  # the first attempt leaves nothing behind that changes the second
        with pytest.raises(AttributeError, match="no"):
            offloaded(model)
    assert_untouched(model)
    assert [len(layer._state_dict_hooks) for layer in model] == hooks
    assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_layer_stays_on_the_device(x: torch.Tensor) -> None:
    model = stack(5)
    model[2] = torch.jit.script(model[2])
    rows = {row.name: row for row in assert_same_bits(model, x).placements}
    assert (rows["2.weight"].lives, rows["2.weight"].reason) == ("device", "outside of the layers")
    assert rows["1.weight"].lives == rows["3.weight"].lives == "host"
    scripted = torch.jit.script(stack())
    assert offloaded(scripted).report().notes[0].startswith("nothing was offloaded")


def test_a_warning_raised_as_an_error_leaves_the_module_unchanged(x: torch.Tensor) -> None:
    def failing(memory: torch.Tensor) -> Callable[[], None]:
        raise RuntimeError("no lock")

    model = stack()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="no lock"):
            offloaded(model, pin=failing)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert_untouched(model)


class Fragile(nn.Linear):
    """Raises if it is told to."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize(("listed", "at"), [(False, 0), (False, 4), (True, 2)])
def test_after_a_layer_that_fails_the_next_pass_is_right_and_prefetches_in_order(x, listed, at):
    model: Any = stack(5, Fragile)
    expected = model(x)
    layers = list(model)
    handle = offloaded(nn.ModuleList(layers) if listed else model)

    def run() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return y if listed else model(x)

    assert torch.equal(run(), expected)
    order = dict(handle._pipeline._after)  # type: ignore[union-attr]
    layers[at].fails = True
    with pytest.raises(KeyboardInterrupt):
        run()
    layers[at].fails = False
    with ThreadPoolExecutor(1) as threads:  # the failed pass locks out no other thread
        assert torch.equal(threads.submit(torch.no_grad()(run)).result(), expected)
    for _ in range(2):
        assert torch.equal(run(), expected)
        assert handle._pipeline._after == order  # type: ignore[union-attr]
    handle.restore()
    assert torch.equal(run(), expected)
