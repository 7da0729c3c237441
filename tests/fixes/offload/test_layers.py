"""Weight offload of modules of any structure gives the same bits, or an error that names the reader."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from moedoctor.fixes.offload.plan import find_layers
from tests.fixes.offload.models import WIDTH, assert_same_bits, offloaded, reasons, stack


class Listed(nn.Module):
    """Its parameters are in lists, which have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(2))
        self.named = nn.ParameterDict({"last": torch.randn(WIDTH, WIDTH) / 4})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.many:
            x = x @ weight
        return x @ self.named["last"]


class Table(nn.Module):
    """Returns a part of its weight: plain, in a tuple or in a mapping."""

    def __init__(self, shape: str = "plain") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, WIDTH))
        self.shape = shape

    def forward(self, count: int) -> Any:
        rows = self.weight[:count]
        return {"plain": rows, "tuple": (rows, rows * 2), "mapping": {"rows": rows}}[self.shape]


class Reading(nn.Module):
    """A parent with a weight of its own that also reads its child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.gate @ self.inner.weight)


class Holder(nn.Module):
    """A module without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Holder()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.parts[0].weight)


def first(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]


plain = nn.Module.__call__
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]
KINDS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), plain),
    "sequence": (lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)), plain),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), lambda f, x: f(x, x, x)[0]),
    "encoder": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), plain),
    "lstm": (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), first),
    "gru": (lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True), first),
    "weight_norm": (lambda: weight_norm(nn.Linear(WIDTH, WIDTH)), plain),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), plain),
    "spectral_norm": (lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)), plain),
    "lists": (Listed, plain),
    "table": (Table, lambda layer, x: x + layer(x.shape[1])),
    "reading": (Reading, plain),
    "held": (Held, plain),
}


class Mixed(nn.Module):
    """Parts of all kinds, in a ModuleList or as attributes."""

    def __init__(self, kinds: Sequence[str], *, listed: bool) -> None:
        super().__init__()
        made = [KINDS[kind][0]() for kind in kinds]
        if listed:
            self.parts = nn.ModuleList(made)
        for number, part in enumerate([] if listed else made):
            setattr(self, f"part{number}", part)
        self.calls = [KINDS[kind][1] for kind in kinds]
        self.runs = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = 0.0  # returned weights are used after other layers have reused the buffer
        parts = list(self.parts if hasattr(self, "parts") else self.children())
        for part, call in list(zip(parts, self.calls, strict=True)) * self.runs:
            if isinstance(part, Table):
                tables = part(x.shape[1]) + 2 * tables
            else:
                x = call(part, x)
        return torch.tanh(x) + tables


@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6),
    listed=st.booleans(),
    runs=st.integers(1, 2),
    share=st.sampled_from([0.4, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_any_mix_of_layers_gives_the_same_bits(kinds, listed, runs, share, seed):
    torch.manual_seed(seed)
    model, x = Mixed(kinds, listed=listed).eval().requires_grad_(False), torch.randn(2, 5, WIDTH)
    model.runs = runs  # each layer runs once or twice in a pass
    assert_same_bits(model, x, budget=int(share * sum(parameter.nbytes for parameter in model.parameters())))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"weight_norm", "spectral_norm"}))
def test_four_layers_of_each_kind_are_offloaded(kind: str) -> None:
    model, x = Mixed([kind] * 4, listed=True).eval().requires_grad_(False), torch.randn(2, 5, WIDTH)
    assert assert_same_bits(model, x).host_bytes > 0


@pytest.mark.parametrize(
    ("shape", "compiler"),
    [("plain", None), ("tuple", "eager"), pytest.param("mapping", "aot_eager", marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore:weights are no longer prefetched")
def test_weights_that_a_layer_returns_keep_their_values(shape: str, compiler: str | None) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Table(shape) for _ in range(5))

        def forward(self, count: int) -> torch.Tensor:
            weights = [part(count) for part in self.parts]
            if shape != "plain":
                weights = [rows["rows"] if shape == "mapping" else rows[0] for rows in weights]
            return torch.stack(weights)  # [parts, count, W]

    model = Tables()
    expected = model(3)
    offloaded(model)
    torch._dynamo.reset()
    function = model if compiler is None else torch.compile(model, fullgraph=True, backend=compiler)
    assert all(torch.equal(function(3), expected) for _ in range(3))
    torch._dynamo.reset()


def test_weights_returned_in_an_unknown_type_are_refused() -> None:
    from types import MappingProxyType

    class Wrapped(Table):
        def forward(self, count: int) -> Any:
            return MappingProxyType({"rows": self.weight[:count]})

    model = nn.ModuleList(Wrapped() for _ in range(4))
    offloaded(model)
    with pytest.raises(RuntimeError, match="returns its own weights in a mappingproxy"):
        model[0](3)


def test_a_layer_with_a_forward_pre_hook_stays_on_the_device(x: torch.Tensor) -> None:
    model: Any = stack(5)
    sums: list[float] = []
    model[2].register_forward_pre_hook(lambda module, inputs: sums.append(float(module.weight.sum())))
    why = reasons(model)
    model(x)
    assert why["2.weight"] == "a hook before its layer's forward may read it"
    assert why["1.weight"] == "weight of 1"
    assert sums == [float(model[2].weight.sum())]


@pytest.mark.parametrize("part", ["conj", "neg"])
def test_conjugate_and_negated_views_stay_on_the_device(part: str) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randn(WIDTH, WIDTH, dtype=torch.cfloat).conj()
            self.weight = nn.Parameter(weight.imag if part == "neg" else weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(self.weight.dtype) @ self.weight

    model, x = nn.ModuleList(Complex() for _ in range(4)), torch.randn(3, WIDTH)
    expected = [layer(x) for layer in model]
    assert set(reasons(model).values()) == {"conjugate or negative bit set: not plain memory"}
    assert all(torch.equal(layer(x), output) for layer, output in zip(model, expected, strict=True))


def test_a_weight_shared_with_a_module_outside_its_layer_stays_on_the_device() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.head = self.layers[1].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x @ self.head

    report = assert_same_bits(Tied().requires_grad_(False), torch.randn(3, WIDTH))
    why = {row.name: row.reason for row in report.placements}
    assert why["layers.1.weight"] == why["head"] == "a module outside of its layer owns it too"
    assert why["layers.2.weight"] == "weight of layers.2"


def test_which_modules_are_the_layers() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reading, self.held, self.lists = Reading(), Held(), Listed()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lists(self.held(self.reading(x)))

    assert [name for name, _ in find_layers(Pair())] == ["reading", "held", "lists"]
    nested = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    assert [name for name, _ in find_layers(nested)] == ["0.0", "0.1", "1.0", "1.1"]
    assert find_layers(nn.ModuleList(nn.ParameterList([torch.ones(2, 2)]) for _ in range(4))) == []
    transformer = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    names = ["encoder.layers.0", "encoder.layers.1", "encoder.norm"]
    names += ["decoder.layers.0", "decoder.layers.1", "decoder.norm"]
    assert [name for name, _ in find_layers(transformer)] == names
    attention = nn.MultiheadAttention(16, 2)
    assert find_layers(attention) == [("", attention)]
