"""The CPU's part of a cached layer: the choice of a share, and pairs that are left out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedoctor.plugin import cpu_experts
from moedoctor.plugin.cpu_experts import Choice, CpuExperts, choose_share
from moedoctor.plugin.expert_cache_layer import find_host_experts
from tests.plugin.test_expert_cache_fix import Layer, call, draw_call, give_caches


@pytest.mark.parametrize(
    ("seconds", "again", "expected"),
    [
        ({0: 1.0, 128: 0.6, 144: 0.65, 160: 0.7, 192: 0.8}, (0.62, 1.1), Choice(3, 128, 0.6, 0.62, 1.1)),
        ({0: 1.0, 128: 0.99}, (0.98, 1.0), Choice(3, 0, 0.99, 1.0, 1.0)),  # won once, and not by enough
    ],
)
def test_the_fastest_share_is_taken_if_it_wins_twice(seconds, again, expected):
    asked: list[int] = []

    def measure(tokens: int, share: int) -> float:
        asked.append(share)
        repeated = asked.count(share) > 1
        return again[share == 0] if repeated else seconds.get(share, 1.2 if share < 160 else 2.0)

    assert choose_share(3, measure) == expected
    assert asked.count(256) == (192 in seconds), "shares after one that is much too large are not measured"


@pytest.mark.parametrize("slots", [5, 2])
def test_pairs_of_the_cpu_add_nothing_on_the_gpu(slots, monkeypatch, caplog):
    """In one group and in several; other calls are those of a cache without the CPU."""
    model, plain, calls = give_caches([Layer()], slots=slots), Layer(), []
    (experts,) = find_host_experts(model)
    side: Any = CpuExperts([], SimpleNamespace(), torch.device("cpu"))  # type: ignore[arg-type]
    side.shares, side.add, side.checked = {1: 64, 2: 128}, lambda out: calls.append("add"), {3}
    side.ask = lambda number, x, weights, ids, share: calls.append(share) or torch.where(ids < 6, -1, ids)
    experts.kernel.apply = side.wrap(3, experts)
    for usual, tokens in ((True, 1), (True, 2), (True, 3), (False, 1)):
        monkeypatch.setattr(cpu_experts, "_is_usual", lambda x, given, usual=usual: usual)
        x, ids, weights = draw_call(tokens, torch.Generator().manual_seed(tokens))
        ids[0] = torch.tensor([2, 9])
        left = torch.where(ids < 6, 0.0, weights) if usual and tokens < 3 else weights
        torch.testing.assert_close(call(model[0], x, ids, weights), call(plain, x, ids, left))
    assert calls == [64, "add", 128, "add"]
    give_caches([Layer()], cpu=None)
    assert "computes nothing: the cache's engine is host; expected device" in caplog.text
    monkeypatch.setattr(cpu_experts, "start", lambda *given: f"captured {given[3]}")
    caplog.set_level("INFO", "vllm.moedoctor")
    give_caches([Layer()], cpu=None)
    assert "cpu=auto: captured False" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "least", "used"), [(1.0, 0, True), (-1.0, 0, False), (torch.nan, 0, False), (-1.0, 1, True)]
)
def test_the_cpu_is_left_out_if_a_sum_is_not_the_backends(wrong, least, used, monkeypatch, caplog):
    """As if one expert of each token were in another layout; the engine's own call is NaN and padding.

    A backend that differs for inputs above `least` alone is one that cannot quantize them.
    """
    model, plain, calls = give_caches([Layer()], slots=5), Layer(), []
    (experts,) = find_host_experts(model)
    side: Any = CpuExperts([], SimpleNamespace(), torch.device("cpu"))  # type: ignore[arg-type]
    monkeypatch.setattr(cpu_experts, "_is_usual", lambda x, given: True)
    x, ids, weights = draw_call(3, torch.Generator().manual_seed(1))
    call(model[0], x[:2], torch.tensor([[1, 4], [4, 7]]), weights[:2])

    def ask(number: int, *call: torch.Tensor) -> torch.Tensor:
        *side.call, share = call
        calls.append((share, experts.cache.resident()))
        return torch.where(torch.arange(3)[:, None] == 2, call[2], -1)  # the last row is padding: wrong below

    def add(out: torch.Tensor) -> None:
        x, weights, ids = side.call
        factor = wrong if x.abs().max() > least else 1.0
        out[:2] += call(plain, x, ids, torch.cat([factor * weights[:, :1], weights[:, 1:]], 1))[:2]
        out[2] += 5

    side.shares, side.ask, side.add = {3: 64}, ask, add
    experts.kernel.apply = side.wrap(0, experts)
    for capturing in (True, True, False):
        for name in ("is_initialized", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda capturing=capturing: capturing)
        before = sorted(experts.cache.resident())
        given = (x, ids) if capturing else (torch.full_like(x, torch.nan), torch.full_like(ids, -1))
        call(model[0], *given, weights)
    assert calls == [(256, [-1] * 5)] * (1 if wrong == 1 else 2 if least else 3), "none in a capture"
    assert sorted(experts.cache.resident()) == before
    assert caplog.text.count("cpu computes nothing of layer 0 in CUDA graphs") == 1
    assert (side.shares, side.checked) == ({3: 64} if used else {}, {0})
    assert ("cpu computes nothing: its output of layer 0 differs" in caplog.text) != used
    right, asked = call(plain, x / 8, ids, weights), []
    for capturing in (False, True, False):
        for name in ("is_initialized", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda capturing=capturing: capturing)
        torch.testing.assert_close(call(model[0], x / 8, ids, weights)[:2], right[:2])
        asked.append([share for share, _ in calls if share != 256])
    assert asked == ([[64], [64] * 2, [64] * 2] if used else [[]] * 3), "no prompt after the capture"


@pytest.mark.parametrize(
    ("place", "name"), [(0, "swiglu_limit"), (1, "swiglu_limit"), (2, "gemm1_clamp_limit")]
)
def test_an_activation_with_a_limit_is_not_the_workers(place: int, name: str) -> None:
    layer = Layer()
    (experts,) = find_host_experts(give_caches([layer]))
    assert experts.limit is None
    places = layer, layer.moe_config, experts.kernel.fused_experts.quant_config
    setattr(places[place], name, 7.0)
    assert "is limited to 7.0" in cpu_experts.find_obstacle([experts])
