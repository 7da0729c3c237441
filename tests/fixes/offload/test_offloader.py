"""Weight offload on a CPU: same bits, freed memory, refused input, recovery after errors."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moedoctor.fixes.offload.pinned import PinError
from tests.fixes.offload.models import WIDTH, assert_same_bits, offloaded, pinned, reasons, stack


class Block(nn.Module):
    """A layer with a transposed weight, a view with gaps, a scale, a buffer and a tied weight."""

    def __init__(self, dtype: torch.dtype = torch.float32, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype))
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype).t())
        self.gaps = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).to(dtype)[:, ::2])
        self.up_scale = nn.Parameter(torch.rand(WIDTH, 1))
        self.tied = self.up
        self.shared = shared
        self.register_buffer("offset", torch.randn(WIDTH).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = (self.up.float() * self.up_scale).to(x.dtype)  # [W, W]
        y = torch.tanh(x @ up) @ self.down + self.offset
        if self.shared is not None:
            y = y @ self.shared
        return x + torch.tanh(y @ self.gaps + x @ self.tied.t())


class Model(nn.Module):
    """Layers between an embedding and a head that share one weight."""

    def __init__(self, layers: int, dtype: torch.dtype = torch.float32, *, shared: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH, dtype=dtype)
        common = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype)) if shared else None
        self.layers = nn.ModuleList(Block(dtype, common) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.arange(12).view(3, 4)


@given(
    layers=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    shared=st.booleans(),
    share=st.floats(0.05, 1.2),
    pin=st.booleans(),
    patterns=st.sampled_from([(), ("up",), ("layers",), ("down", "gaps"), ("head", "layers.0")]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_any_module_gives_the_same_bits_within_the_budget(layers, dtype, shared, share, pin, patterns, seed):
    torch.manual_seed(seed)
    model = Model(layers, dtype, shared=shared)
    budget = max(1, int(share * sum(parameter.nbytes for parameter in model.parameters())))
    report = assert_same_bits(model, IDS, budget=budget, patterns=patterns, pin=pinned if pin else False)
    assert report.host_bytes <= budget
    assert report.held_bytes == 0
    assert report.freed_bytes >= report.host_bytes
    assert len(report.placements) == len(list(model.named_parameters(remove_duplicate=False)))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:weights are no longer prefetched")
def test_an_offloaded_module_compiles_to_one_graph_with_the_same_bits(compiler: str) -> None:
    model = Model(3)
    expected = torch.compile(model, fullgraph=True, backend=compiler)(IDS)
    torch._dynamo.reset()
    offloaded(model)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    assert all(torch.equal(compiled(IDS), expected) for _ in range(3))
    if compiler != "inductor":  # which rounds in another way
        assert torch.equal(model(IDS), expected)
        assert torch.equal(compiled(IDS), expected)
    assert len(model.state_dict()) > 0, "a compiled pass was taken for a write"
    if compiler == "inductor":
        plain = model.layers[0]._moedoctor_offload.plain  # type: ignore[union-attr]
        assert plain is None, "compiled code must use the buffers without a copy"
    torch._dynamo.reset()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_code_that_was_compiled_for_another_module_computes_with_the_weights_of_this_one(copies):
    """As code out of a compiler's cache: it gets as inputs what belongs to the module that calls it."""
    compiled: list[tuple[Any, tuple[torch.Tensor, ...]]] = []

    def keep(graph: Any, inputs: Any) -> Any:
        compiled.append((graph, tuple(inputs)))
        return graph.forward

    models, x = [stack() for _ in range(2)], torch.randn(3, WIDTH)
    expected = [model(x) for model in models]
    for model in models:
        offloaded(model)
        torch._dynamo.reset()
        torch.compile(model, fullgraph=True, backend=keep)(x)
    (first, _), (_, inputs) = compiled
    # This backend hands over copies of what operators write: of the weights, too.
    run = torch.compile(first, backend="aot_eager") if copies else first
    for _ in range(2):
        assert torch.equal(run(*inputs)[0], expected[1])
        assert torch.equal(models[0](x), expected[0])
    torch._dynamo.reset()


def test_quantization_metadata_stays_on_the_device_and_the_report_names_the_rule() -> None:
    model = Model(3)
    report = offloaded(model).report()
    rows = {row.name: row for row in report.placements}
    scale = rows["layers.0.up_scale"]
    assert (scale.lives, scale.access) == ("device", "resident")
    assert scale.reason.startswith("metadata by name")
    assert rows["embed.weight"].reason == "shared between layers"
    up, tied = rows["layers.0.up"], rows["layers.0.tied"]
    assert (up.lives, up.pinned, up.access, up.bytes) == ("host", True, "copy", 4 * WIDTH * WIDTH)
    assert (tied.lives, tied.bytes) == ("host", 0)
    assert f"{report.freed_bytes} freed on the device" in str(report)
    assert str(report).endswith(f"stays on the device by {report.rules[-1]}")


@dataclass(frozen=True)
class Config:
    """Holds a parameter, as vLLM's `FusedMoEQuantConfig` does."""

    weight: torch.Tensor


def test_a_weight_that_a_config_holds_as_another_tensor_stays_on_the_device() -> None:
    model = Model(4)
    model.layers[1].config = {"inner": [Config(model.layers[1].up.detach())]}  # type: ignore[assignment]
    why = reasons(model)
    assert "held under another tensor" in why["layers.1.up"]
    assert why["layers.2.up"] == "weight of layers.2"


def test_memory_that_the_caller_still_holds_is_not_reported_as_freed() -> None:
    model = Model(4)
    outside = model.layers[1].up.detach()
    report = offloaded(model).report()
    assert report.held_bytes == outside.nbytes
    assert report.freed_bytes + report.held_bytes == offloaded(Model(4)).report().freed_bytes
    assert "holds on to them" in " ".join(report.notes)


def test_net_bytes_are_the_freed_bytes_less_two_buffers() -> None:
    model = Model(6)
    named = model.layers[0].named_parameters()
    largest = sum(parameter.nbytes for name, parameter in named if "scale" not in name)
    report = offloaded(model).report()
    assert report.freed_bytes >= report.host_bytes > 0
    assert 2 * largest <= report.buffer_bytes <= 2 * (largest + 4096)
    assert report.net_bytes == report.freed_bytes - report.buffer_bytes
    assert offloaded(Model(2), patterns=("layers",)).report().buffer_bytes <= largest + 4096


def test_a_layer_that_runs_inside_another_is_refused() -> None:
    class Nested(Block):
        inner: Callable[[torch.Tensor], torch.Tensor] | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if self.inner is None else self.inner(x))

    model, x = nn.ModuleList(Nested() for _ in range(4)), torch.randn(3, WIDTH)
    expected = model[2](x)
    offloaded(model)
    model[0].inner = model[2].forward  # layers 0 and 2 share a buffer
    with pytest.raises(RuntimeError, match="runs inside 0"):
        model[0](x)
    assert torch.equal(model[2](x), expected)


def snapshot(model: nn.Module) -> list[tuple[str, int, bool]]:
    return [(name, each.data_ptr(), each.requires_grad) for name, each in model.named_parameters()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, r"budget_bytes: must be positive, got 0"),
        ({"patterns": ("layer",)}, r"patterns: no parameter has 'layer' .* the closest are: layers"),
        ({"layers": [nn.Linear(2, 2)]}, r"layers: Linear is not a part of the module"),
        ({"layers": lambda model: [model.layers, model.layers[0]]}, r"layers contains another of the layers"),
        ({"access": "view"}, r"access: a view needs a CUDA device"),
        ({"access": "copies"}, r"access: must be 'copy' or 'view', got 'copies'"),
        ({"budget": float("nan")}, r"budget_bytes: must be a number of bytes, got nan"),
        ({"patterns": "weight"}, r"patterns: must be a sequence of names, got the text 'weight'"),
        ({"keep_below": "a"}, r"keep_below: must be a number of bytes, got 'a'"),
        ({"device": "meta"}, r"device: meta tensors hold no data"),
        ({"device": "cuda:77"}, r"device: 'cuda:77' cannot be used here: "),
        ({"layers": lambda model: [model.layers]}, r"layers \(ModuleList\) has no forward to wrap; name the"),
    ],
)
def test_bad_input_is_named_and_leaves_the_module_unchanged(options: dict[str, Any], message: str) -> None:
    model = Model(4)
    before, expected = snapshot(model), model(IDS)
    if callable(options.get("layers")):
        options = {"layers": options["layers"](model)}
    with pytest.raises(ValueError, match=message):
        offloaded(model, **options)
    assert snapshot(model) == before
    assert torch.equal(model(IDS), expected)


def test_a_module_on_two_devices_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
        for number in (0, 1, 3):
            model[number].weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="cuda"))
        before = [(name, parameter.device) for name, parameter in model.named_parameters()]
        message = r"2\.weight is on cpu, expected everything on cuda:0; move .*, or name it with device="
        with pytest.raises(ValueError, match=message):
            offloaded(model)
        assert [(name, parameter.device) for name, parameter in model.named_parameters()] == before
    assert all("forward" not in vars(module) for module in model.modules())


def test_modules_that_cannot_be_offloaded_are_named() -> None:
    with pytest.raises(ValueError, match="has no parameters"):
        offloaded(nn.ReLU())
    model = Model(4)
    offloaded(model)
    with pytest.raises(ValueError, match=r"is offloaded already; call restore\(\) first"):
        offloaded(model)
    other = Model(4)
    other.layers[0].up = nn.Parameter(torch.empty(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"layers\.0\.\w+ is a meta tensor without data"):
        offloaded(other)


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_pinning_failure_gives_one_warning_and_blocking_copies(number: int) -> None:
    calls = 0

    def failing(memory: torch.Tensor) -> Callable[[], None]:
        nonlocal calls
        calls += 1
        if calls > number:
            raise PinError("no lock")
        return lambda: None

    model = Model(5)
    expected = model(IDS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = offloaded(model, patterns=("layers",), pin=failing)
        results = [model(IDS) for _ in range(4)]
    text = "host memory is not pinned, so copies to the device block: no lock"
    assert [str(warning.message) for warning in caught] == [text]
    assert calls == number + 1, "pinning was tried again after a failure"
    assert all(torch.equal(result, expected) for result in results)
    names = {row.name.split(".")[1] for row in handle.report().placements if row.pinned}
    assert len(names) == number
    assert handle.report().notes[0] == text
