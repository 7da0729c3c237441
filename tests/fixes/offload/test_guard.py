"""Errors: refused writes and reads, passes in two threads, and an offload that fails changes nothing."""

import copy
import pickle
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from moedoctor.faults.offload.late_device import LateDevice
from moedoctor.fixes.offload import storage as offload_storage
from moedoctor.fixes.offload.hooks import MARK
from moedoctor.fixes.offload.plan import make_plan
from moedoctor.fixes.offload.storage import settle_in
from tests.fixes.offload.models import WIDTH, assert_same_bits, offloaded, stack


def write(model: Any, new: torch.Tensor) -> None:
    model[1].weight.copy_(new)


def exchange(model: Any, new: torch.Tensor) -> None:
    model[1].weight.data = new


def replace(model: Any, new: torch.Tensor) -> None:
    model[1].weight = nn.Parameter(new)


@pytest.mark.parametrize(
    ("change", "what"),
    [(write, "written in place"), (exchange, "data was exchanged"), (replace, "another tensor was put")],
)
def test_a_write_is_an_error_until_weights_are_loaded(x, change, what):
    model, other = stack(), stack()
    state, new = other.state_dict(), torch.zeros(WIDTH, WIDTH)
    offloaded(model)
    model(x)
    change(model, new)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"1\.weight is offloaded and .*{what}.* load_state_dict"):
            model(x)
    with pytest.raises(RuntimeError, match=what):
        model.state_dict()
    assert not new.any(), "the caller's tensor was overwritten"
    if change is not exchange:
        model.load_state_dict(state)
        assert all(torch.equal(model(x), other(x)) for _ in range(2))


def test_restore_names_the_weights_that_were_written(x: torch.Tensor) -> None:
    model = stack()
    expected = model(x)
    handle = offloaded(model)
    write(model, torch.zeros(WIDTH, WIDTH))
    with pytest.warns(RuntimeWarning, match=r"not kept; as before the write: 1\.weight$"):
        handle.restore()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_weights_is_not_a_write(x: torch.Tensor, assign: bool) -> None:
    model, other = stack(), stack()
    handle = offloaded(model)
    before = [layer.weight for layer in model]
    for _ in range(2):
        model.load_state_dict(other.state_dict(), assign=assign)
        assert all(torch.equal(model(x), other(x)) for _ in range(2))
        saved = model.state_dict()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in other.state_dict().items())
    assert all(layer.weight is was for layer, was in zip(model, before, strict=True))
    handle.restore()
    assert torch.equal(model(x), other(x))


def test_a_replay_that_is_queued_reads_the_weights_from_before_a_load() -> None:
    """A graph copies from host memory by itself, so no event of the pipeline shows that it has read it."""
    model, device, read = stack(), LateDevice(), list[torch.Tensor]()
    before = model[1].weight.clone()
    handle = offloaded(model, engine=device)
    device.run(lambda: read.append(handle.get_host_weight("1.weight").clone()))
    model.load_state_dict({name: torch.zeros_like(weight) for name, weight in model.state_dict().items()})
    device.synchronize()
    assert torch.equal(read[0], before)


class Changing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.weight.mul_(0.5)
        return y


def test_a_layer_that_writes_its_own_weight_is_refused(x: torch.Tensor) -> None:
    model = stack(kind=Changing)
    offloaded(model)
    with pytest.raises(RuntimeError, match=r"0\.weight .* written by its layer's own forward"):
        model(x)


def test_an_embedding_with_max_norm_stays_on_the_device() -> None:
    model = nn.Sequential(nn.Embedding(40, WIDTH, max_norm=0.1), *stack())
    same, ids = copy.deepcopy(model), torch.arange(9)
    rows = {row.name: row for row in offloaded(model).report().placements}
    assert (rows["0.weight"].lives, rows["1.weight"].lives) == ("device", "host")
    assert "max_norm" in rows["0.weight"].reason
    assert all(torch.equal(model(ids), same(ids)) for _ in range(3))


@pytest.mark.parametrize("at", [1, 3])
def test_the_module_stays_offloaded_if_restore_runs_out_of_memory(monkeypatch, x, at):
    model, calls, real = stack(), 0, offload_storage._bring_back
    expected = model(x)
    handle = offloaded(model)

    def failing(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            raise torch.OutOfMemoryError("no room")
        return real(*args)

    monkeypatch.setattr(offload_storage, "_bring_back", failing)
    with pytest.raises(torch.OutOfMemoryError):
        handle.restore()
    assert all(torch.equal(model(x), expected) for _ in range(2))
    assert "forward" in vars(model[0])
    handle.restore()
    assert torch.equal(model(x), expected)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused(copied: Callable[[Any], Any]) -> None:
    model = stack()
    handle = offloaded(model)
    for item in (model, model[0], handle):
        with pytest.raises(RuntimeError, match=r"cannot be copied or pickled: call restore\(\) first"):
            copied(item)
    handle.restore()
    copy.deepcopy(model)


class Waiting(nn.Linear):
    inside: threading.Event | None = None
    go: threading.Event | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside is not None and self.go is not None:
            self.inside.set()
            assert self.go.wait(60)
        return super().forward(x)


@pytest.mark.parametrize("whole", [True, False])
def test_a_pass_in_a_second_thread_is_refused(x: torch.Tensor, whole: bool) -> None:
    layers = [Waiting(WIDTH, WIDTH) for _ in range(4)]
    model = nn.Sequential(*layers) if whole else nn.ModuleList(layers)
    run: Any = model if whole else layers[2]
    expected = run(x)
    offloaded(model)
    layers[2].inside, layers[2].go = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1, "another") as threads:
        result = threads.submit(torch.no_grad()(run), x)
        assert layers[2].inside.wait(60)
        with pytest.raises(RuntimeError, match=r"one pass at a time, and thread another_0 has one open"):
            run(x)
        layers[2].go.set()
        assert torch.equal(result.result(), expected)
    assert torch.equal(run(x), expected)


@pytest.mark.parametrize("eager_first", [True, False])
def test_a_warning_says_that_a_compiled_first_pass_is_not_watched(recwarn, x, eager_first):
    model = stack()
    handle = offloaded(model)
    if eager_first:
        model(x)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(x)
    compiled(x)
    notes = [str(warning.message) for warning in recwarn if "not watched" in str(warning.message)]
    assert [note for note in handle.report().notes if "not watched" in note] == notes
    assert len(notes) == (not eager_first)
    torch._dynamo.reset()


def test_layers_may_be_an_iterator_and_inference_mode_changes_nothing(x: torch.Tensor) -> None:
    model: Any = stack()
    expected = model(x)
    with torch.inference_mode():
        handle = offloaded(model, layers=iter(list(model)))
        assert handle.report().host_bytes == 4 * 4 * WIDTH * WIDTH
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    model.load_state_dict(model.state_dict())
    handle.restore()
    model[0].weight.zero_()
    assert not model[0].weight.is_inference()


def test_a_config_view_of_a_parameter_moves_with_the_parameter() -> None:
    model: Any = stack(2)
    whole = torch.randn(3 * WIDTH)
    model[0].bias = nn.Parameter(whole[1 : 1 + WIDTH])
    model[1].bias = nn.Parameter(whole[2 * WIDTH :])
    view, alone = model[0].bias.detach()[3:9:2], torch.randn(4)
    model[0].config = types.SimpleNamespace(view=view, alone=alone)
    before, values, stays = view.data_ptr(), view.clone(), alone.data_ptr()
    kept: list[Any] = []
    settle_in(model, torch.device("cpu", 0), [view, alone], kept)  # torch treats it as another device
    assert view.data_ptr() != before
    assert alone.data_ptr() == stays
    assert torch.equal(view, values)
    model[0].bias.fill_(7)
    assert view.eq(7).all()
    assert torch.equal(model[1].bias, whole[2 * WIDTH :])
    assert model[1].bias.untyped_storage().nbytes() <= 4 * WIDTH + 16
    assert len(kept) == 5


class Peeping(nn.Module):
    """Its forward reads a weight outside of the layer that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.peep = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layers[1].weight
        x = x + weight.new_zeros(WIDTH) + torch.zeros_like(weight)[0]  # does not read the values
        for layer in self.layers:
            x = layer(x)
        return x @ weight.t() if self.peep else x


def test_a_weight_read_outside_its_layer_is_an_error(x: torch.Tensor) -> None:
    model = Peeping()
    handle = offloaded(model)
    message = r"layers.1.weight is offloaded, and aten.mm.default uses it outside of its layer's.*layers="
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model(x)
    handle.restore()
    model(x)


def test_a_forward_hook_that_reads_the_weight_is_an_error(x: torch.Tensor) -> None:
    model = stack()
    model[2].register_forward_hook(lambda module, inputs, output: output + module.weight[0])
    offloaded(model)
    with pytest.raises(RuntimeError, match=r"2\.weight is offloaded, and aten\.add\.Tensor uses it"):
        model(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_pass_is_watched_unless_a_part_is_compiled(compiled: bool, x: torch.Tensor) -> None:
    graphs: list[Any] = []
    modes: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    model = Peeping()
    model.peep = False
    expected = model(x)
    offloaded(model)
    if compiled:
        model.layers[2].compile(fullgraph=True, backend=backend)
    model.layers[1].register_forward_hook(lambda *_: modes.append(_get_current_dispatch_mode()))
    assert torch.equal(model(x), expected)
    assert len(graphs) == compiled, "the part runs compiled from the first pass on"
    assert torch.equal(model(x), expected)
    assert [mode is not None for mode in modes] == [not compiled, False]
    torch._dynamo.reset()


out_of_memory = Mock(side_effect=torch.OutOfMemoryError("no room"))


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
    model = stack()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="no lock"):
            offloaded(model, pin=Mock(side_effect=RuntimeError("no lock")))
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
