"""The search for tiles of vLLM's Triton kernel, with times made up for each choice."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.bench.moe import triton_tiles
from moedoctor.bench.timing import compare_rounds
from moedoctor.models.layer_shape import LayerShape

RULE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "SPLIT_K": 1, "num_stages": 4}
CHOICES = {name: triton_tiles._CHOICES[name] for name in RULE if name in triton_tiles._CHOICES}
EVERY = {name: st.sampled_from(values) for name, values in CHOICES.items()}


@given(st.fixed_dictionaries(EVERY), st.sets(st.sampled_from([32, 64, 256])))
def test_a_search_ends_at_the_fastest_tiles_that_faster_ones_lead_to(fastest, refused):
    def time_tiles(tiles: Mapping[str, int]) -> float:
        if tiles["BLOCK_SIZE_K"] in refused:
            return math.inf
        return sum(abs(math.log2(tiles[name]) - math.log2(fastest[name])) for name in CHOICES) + 1

    found, tried = triton_tiles.search_tiles(RULE, time_tiles, CHOICES)
    assert time_tiles(found) <= time_tiles(RULE)
    assert found["SPLIT_K"] == 1
    assert tried <= 1 + triton_tiles._SWEEPS * 2 * len(CHOICES)
    if not refused and all(
        abs(values.index(fastest[name]) - values.index(RULE[name])) <= triton_tiles._SWEEPS
        for name, values in CHOICES.items()
    ):
        assert {name: found[name] for name in CHOICES} == fastest


class Layer:
    """A layer whose time depends on the tiles that vLLM was told to take."""

    def __init__(self, files: dict[int, dict[str, int]] | None) -> None:
        self.tiles: dict[str, int] = {}
        self.called_with: dict[str, int] = {}
        self.asked: list[Any] = []
        self.files = files

    @contextlib.contextmanager
    def override_config(self, tiles: dict[str, int]) -> Iterator[None]:
        before, self.tiles = self.tiles, tiles
        yield  # vLLM's has no `finally` either
        self.tiles = before

    def get_default_config(self, M: int, E: int, N: int, K: int, dtype: str | None) -> dict[str, int]:  # noqa: N803
        self.asked.append((M, E, N, K, dtype))
        return RULE

    def get_moe_configs(self, *names: Any) -> dict[int, dict[str, int]] | None:
        self.asked.append(names)
        return self.files

    def get_config_file_name(self, *names: Any) -> str:
        return f"E={names[0]},N={names[1]}.json"

    def time(self, call: Callable[[], object], check: Callable[[object], None] | None = None) -> float:
        output = call()
        if check is not None:
            check(output)
        return 100.0 * 64 / self.called_with["BLOCK_SIZE_N"]

    def call(self) -> int:
        self.called_with = self.tiles
        if self.tiles["BLOCK_SIZE_K"] > 128:
            raise RuntimeError("out of resource: shared memory")
        return self.tiles["num_stages"]


@pytest.mark.parametrize(("quantization", "blocks"), [("bf16", (None, None)), ("fp8-block", (128, 128))])
def test_the_ratio_is_the_rule_over_what_was_found_and_wrong_tiles_are_passed_over(
    quantization: str, blocks: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer({1: RULE | {"BLOCK_SIZE_N": 32}, 64: RULE | {"BLOCK_SIZE_N": 128}})

    def time_cold(call: Any, device: str, *, check: Any = None, **_: object) -> Any:
        return SimpleNamespace(median=layer.time(call, check))

    def compare_cold(calls: Any, device: str, *, baseline: str, rounds: int, **_: object) -> Any:
        measures = {name: lambda each=each: layer.time(each) for name, each in calls.items()}
        return compare_rounds(measures, baseline=baseline, rounds=rounds)

    def check(stages: object) -> None:
        if stages != 4:
            raise ValueError("wrong")

    monkeypatch.setattr(triton_tiles, "load", lambda name: layer)
    monkeypatch.setattr(triton_tiles, "import_vllm_module", lambda name: layer)
    monkeypatch.setattr(triton_tiles, "time_cold", time_cold)
    monkeypatch.setattr(triton_tiles, "compare_cold", compare_cold)
    shape = LayerShape(2048, 768, 128, 8, "silu")
    tiles = triton_tiles.tune_tiles(layer.call, shape, quantization, 48, "cuda", check)
    widest = 128 if quantization == "fp8-block" else 256
    assert tiles["found"] == RULE | {"BLOCK_SIZE_N": widest}
    assert (tiles["ratio"], tiles["file_ratio"]) == (widest / 64, 2.0), "the file's tiles for 64 tokens"
    assert tiles["passed_over"] >= 2
    assert layer.tiles == {}, "what is measured next has vLLM's own tiles"
    assert tiles["file_name"] == "E=128,N=768.json"
    dtype = None if quantization == "bf16" else "fp8_w8a8"
    assert layer.asked == [(48, 128, 768, 2048, dtype), (128, 768, dtype, *blocks)]
