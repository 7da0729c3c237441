"""The probes inside an engine, on a model of plain torch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_stub import layer_outputs
from torch import nn

from moedoctor.upstream.engine import probes


class Layer(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), gain), requires_grad=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        state = x if residual is None else x + residual
        return x * self.weight, state


class Model(nn.Module):
    def __init__(self, gains: tuple[float, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(gain) for gain in gains)
        self.heads = nn.ModuleList([nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x


class Engine:
    """An `LLM` with one worker, or several."""

    def __init__(self, model: nn.Module, workers: int = 1) -> None:
        self.model, self.workers = model, workers

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self.model) for _ in range(self.workers)]


def outputs(*gains: float) -> list[dict[str, Any]]:
    engine = Engine(Model(gains))
    after = probes.record_layer_outputs(engine)
    for _ in range(2):
        engine.model(torch.arange(8.0).reshape(2, 4))
    found = after()
    assert found["layers"] == len(gains)
    return list(found["outputs"])


def test_equal_bits_equal_digest_and_the_first_layer_that_differs() -> None:
    first, second = outputs(1.0, 2.0, 3.0), outputs(1.0, math.inf, 3.0)
    assert first == outputs(1.0, 2.0, 3.0)
    assert [a["digest"] == b["digest"] for a, b in zip(first, second, strict=True)] == [True, False, False]
    assert [row["finite"] for row in second] == [True, False, False]
    update_and_residual = 2 * math.sqrt(sum(i * i for i in range(8)))
    assert first[0]["norm"] == pytest.approx(update_and_residual)


@pytest.mark.parametrize(
    ("later", "pieces", "equal_tokens", "expected"),
    [
        ((2.0, 9.0, 9.0), 1, 2, ("layers.0", 3, True)),
        ((2.0, 9.0, 9.0), 1, 1, (None, 2, True)),
        ((2.0,), 1, 2, (None, 2, False)),
        ((2.0, 9.0), 2, 0, (None, 2, True)),  # a prompt in two pieces is two calls
        ((2.0, 9.0), 2, 1, ("layers.0", 3, True)),
    ],
)
def test_calls_are_compared_until_the_tokens_differ_and_no_further(later, pieces, equal_tokens, expected):
    control, other = (layer_outputs(1.0, later=each, pieces=pieces) for each in ((2.0, 3.0, 4.0), later))
    found = probes.find_first_difference(control, other, equal_tokens)
    assert (found["first_layer"], found["calls_compared"], found["until_parting"]) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda state: -state,
        lambda state: state.flip(0),
        lambda state: state * torch.tensor([1.0, -1.0] * (len(state) // 2))[:, None],
        lambda state: torch.cat([state[:-1], -state[-1:]]),
        lambda state: torch.cat([state[:7], state[:1], state[8:]]),
    ],
    ids=["negated", "reversed", "signs", "one token negated", "one token is another"],
)
@pytest.mark.parametrize("tokens", [8, 100])
def test_layers_that_differ_are_noticed_whatever_their_size(change: Any, tokens: int) -> None:
    """A mean over tokens, or of squares, does not notice these changes."""

    def recorded(state: torch.Tensor) -> dict[str, Any]:
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Identity()])
        after = probes.record_layer_outputs(Engine(model))
        model.layers[0](state)
        return after()

    state = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(3))
    assert probes.find_first_difference(recorded(state), recorded(change(state)))["first_layer"] == "layers.0"
    rounded = probes.find_first_difference(recorded(state), recorded(state.bfloat16().float()))
    assert (rounded["first_bit"], rounded["first_layer"]) == ("layers.0", None)
    assert sum(len(row) for row in recorded(state)["outputs"][0]["projection"]) <= 128


def test_bytes_on_the_host_are_counted_in_every_place() -> None:
    from moedoctor.fixes.offloader import offload

    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    everything = {"parameter_bytes": 4096, "host_bytes": 4096}
    assert probes.count_bytes_on_host(model) == everything, "all of it is on the CPU"
    assert probes.count_bytes_on_host(model, "2.weight") == {"parameter_bytes": 1024, "host_bytes": 1024}
    handle = offload(model, 1 << 30, keep_below=0)
    stored = probes.count_bytes_on_host(model)["host_bytes"] - 4096
    assert stored == handle.report().host_bytes > 0


def test_one_probe_records_layers_and_bytes() -> None:
    engine = Engine(Model((1.0, 2.0)))
    after = probes.record_layers_and_places(engine, calls=2)
    bytes_alone = probes.record_layers_and_places(engine, "layers.1")
    for _ in range(3):
        engine.model(torch.arange(8.0).reshape(2, 4))
    found = after()
    recorded = [(row["layer"], row["call"], row["tokens"]) for row in found["outputs"]]
    assert recorded == [(layer, call, 2) for call in (1, 2) for layer in ("layers.0", "layers.1")]
    assert (found["layers"], found["host_bytes"], found["parameter_bytes"]) == (2, 32, 32)
    assert bytes_alone() == {"host_bytes": 16, "parameter_bytes": 16}


def test_a_model_without_layers_and_several_workers() -> None:
    with pytest.raises(ValueError, match="has no list of layers"):
        list(probes.list_decoder_layers(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="2 workers answered"):
        probes.get_model(Engine(Model((1.0,)), workers=2))


@pytest.mark.gpu
def test_the_driver_distinguishes_mapped_memory_from_the_gpus_own() -> None:
    from moedoctor.fixes.offload.pinned import view_on_device

    own = torch.ones(1024, dtype=torch.uint8, device="cuda")
    host = torch.ones(1 << 16, dtype=torch.uint8).pin_memory()
    assert probes.locate_memory(own) == "device"
    assert probes.locate_memory(host) == "cpu"
    assert probes.locate_memory(view_on_device(host, torch.device("cuda:0"))) == "host"


def test_weights_are_served_from_the_device_and_no_longer_from_the_host() -> None:
    from moedoctor.fixes.offloader import offload

    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(3, 16)
    with torch.no_grad():
        expected = model(x)
        handle = offload(model, 1 << 30, keep_below=0)
        assert torch.equal(model(x), expected)
        served = probes.serve_from_gpu(Engine(model))
        assert served["bytes"] >= handle.report().host_bytes > 0
        assert all(torch.equal(model(x), expected) for _ in range(2))
    assert bool(handle.get_host_weight("0.weight").isnan().all()), "what was on the host could still be read"
    assert probes.serve_from_gpu(nn.Linear(2, 2)) == {"bytes": 0}


def test_scales_of_the_kv_cache() -> None:
    model = Model((1.0,))
    attention = nn.Module()
    attention.kv_cache_dtype = "fp8_e4m3"
    attention._k_scale_float, attention._v_scale_float = 1.0, 0.5
    model.layers[0].attn = attention
    assert probes.read_kv_cache_scales(Engine(model)) == [
        {"layer": "layers.0.attn", "dtype": "fp8_e4m3", "k_scale": 1.0, "v_scale": 0.5}
    ]
    assert probes.read_kv_cache_scales(Engine(Model((1.0,)))) == []
