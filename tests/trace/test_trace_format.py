"""The trace file and synthetic routing: save and load, batches, distributions, and one-line errors."""

import json
import random
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save as to_bytes

from moedoctor.trace.format import FORMAT, RoutingTrace, TraceError, load, save
from moedoctor.trace.synthetic import ZipfSettings, draw_zipf_trace


def make(
    experts: int = 8, top_k: int = 2, layers: int = 2, streams: tuple[int, ...] = (3, 1), seed: int = 0
) -> RoutingTrace:
    draw = random.Random(seed)
    rows = sum(streams)
    ids = [expert for _ in range(rows * layers) for expert in draw.sample(range(experts), top_k)]
    names = tuple(f"layers.{index}" for index in range(layers))
    return RoutingTrace(ids, experts, top_k, names, (1,) * rows, streams, "a model", {"seed": seed})


@given(
    experts=st.sampled_from([2, 8, 255, 256, 1000]),
    layers=st.integers(1, 3),
    streams=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 99),
)
def test_a_saved_trace_loads_unchanged(tmp_path_factory, experts, layers, streams, seed):
    path = tmp_path_factory.mktemp("trace") / "t.safetensors"
    trace = make(experts, 2, layers, streams, seed)
    save(trace, path)
    again = load(path)
    assert list(again.topk_ids) == list(trace.topk_ids)
    assert (again.num_experts, again.top_k, again.layers) == (experts, 2, trace.layers)
    assert (again.call_rows, again.stream_rows) == (trace.call_rows, trace.stream_rows)
    assert (again.model, again.made) == ("a model", {"seed": seed})


@pytest.mark.parametrize(("experts", "bytes_an_id"), [(255, 1), (256, 2)])
def test_missing_experts_are_kept_and_small_ids_take_one_byte(tmp_path, experts, bytes_an_id):
    path = tmp_path / "t.safetensors"
    save(RoutingTrace([-1, experts - 1] * 1000, experts, 2, ("a",), (1,) * 1000), path)
    again = load(path)
    assert list(again.topk_ids[:2]) == [-1, experts - 1]
    assert again.list_calls(0)[0] == (experts - 1,)
    assert path.stat().st_size < 2000 * bytes_an_id + 4000 + 600


def test_calls_are_the_distinct_experts_of_all_rows_of_a_forward_pass() -> None:
    trace = RoutingTrace([3, 1, 0, 0, 1, 2, 7, 6], 8, 2, ("a",), (3, 1))
    assert trace.list_calls(0) == [(0, 1, 2, 3), (6, 7)]
    trace = RoutingTrace([0, 1, 2, 3, 4, 5, 6, 7], 8, 2, ("a", "b"), (1, 1))
    assert [trace.list_calls(0), trace.list_calls(1)] == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]
    assert trace.list_steps() == [(0, 1), (10, 11), (4, 5), (14, 15)]


def test_a_batch_takes_one_token_of_each_sequence() -> None:
    trace = RoutingTrace(list(range(12)), 12, 2, ("a",), (1,) * 6, (3, 1, 2))
    assert trace.split_batches(2) == [[0, 3], [1], [2], [4], [5]]
    assert trace.list_calls(0, 2)[0] == (0, 1, 6, 7)
    assert trace.list_calls(0, 1) == trace.list_calls(0)


def test_a_batch_that_cannot_be_replayed_is_refused() -> None:
    refused = ((3, 1), 0, "at least 1"), ((3, 1), -1, "at least 1"), ((), 2, "stream_")
    for streams, batch, message in refused:
        with pytest.raises(TraceError, match=message):
            RoutingTrace([0, 1] * 4, 8, 2, ("a",), (1,) * 4, streams).list_calls(0, batch)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": 0}, "num_experts is 0"),
    ({"top_k": 9}, "top_k is 9"),
    ({"layers": ()}, "layers is empty"),
    ({"call_rows": ()}, "call_rows"),
    ({"call_rows": (1, 0)}, "call_rows"),
    ({"call_rows": (1,)}, "topk_ids holds 4 ids"),
    ({"topk_ids": [0, 1, 2, 8]}, "not below num_experts 8"),
    ({"topk_ids": [0, 1, 2, -2]}, "not below num_experts 8"),
    ({"stream_rows": (3,)}, "stream_rows"),
    ({"call_rows": (2,), "stream_rows": (2,)}, "stream_rows"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_inconsistent_parts_are_refused(change: dict[str, Any], message: str) -> None:
    names = ("topk_ids", "num_experts", "top_k", "layers", "call_rows")
    good = dict(zip(names, ([0, 1, 2, 3], 8, 2, ("a",), (1, 1)), strict=True))
    RoutingTrace(**good)
    with pytest.raises(TraceError, match=message):
        RoutingTrace(**{**good, **change})


METADATA = {"format": FORMAT, "version": "1", "num_experts": "8", "layers": '["a"]', "made": "{}"}
METADATA["model"] = "m"
TENSORS = {"topk_ids": torch.zeros(2, 1, 2, dtype=torch.uint8), "call_rows": torch.ones(2, dtype=torch.int32)}
BAD_FILES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"format": "other"}, {}, "without the format"),
    ({"version": "2"}, {}, "format version 2, expected 1"),
    ({"num_experts": "-8"}, {}, "num_experts is '-8'"),
    ({"layers": "a"}, {}, "layers is not a JSON list"),
    ({"layers": '["a", "b"]'}, {}, "must name the 1 layers"),
    ({"layers": "[1]"}, {}, "must name the 1 layers"),
    ({"made": "[]"}, {}, "made is not a JSON object"),
    ({}, {"topk_ids": torch.zeros(2, 2, dtype=torch.uint8)}, "topk_ids must be there"),
    ({}, {"topk_ids": torch.zeros(2, 1, 2, dtype=torch.int64)}, "topk_ids must be there"),
    ({}, {"call_rows": torch.ones(2)}, "call_rows must be there"),
]


@pytest.mark.parametrize(("metadata", "tensors", "message"), BAD_FILES, ids=[case[2] for case in BAD_FILES])
def test_a_file_that_is_not_a_trace_is_refused_in_one_line(tmp_path, metadata, tensors, message):
    path = tmp_path / "t.safetensors"
    path.write_bytes(to_bytes({**TENSORS, **tensors}, {**METADATA, **metadata}))
    with pytest.raises(TraceError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    for content in (b"", b"not a trace", b"\xff" * 100, json.dumps({"a": 1}).encode()):
        path.write_bytes(content)
        with pytest.raises(TraceError, match="is not a safetensors file"):
            load(path)
    with pytest.raises(TraceError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(TraceError, match="no such file"):
        load(tmp_path / "missing")


def test_a_trace_is_for_one_user(tmp_path: Path) -> None:
    save(make(), tmp_path / "trace")
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600


def test_the_seed_determines_the_trace() -> None:
    settings = ZipfSettings(experts=16, top_k=3, layers=2, rows=40, streams=3)
    first, again = draw_zipf_trace(settings), draw_zipf_trace(settings)
    assert list(first.topk_ids) == list(again.topk_ids)
    other = draw_zipf_trace(ZipfSettings(experts=16, top_k=3, layers=2, rows=40, streams=3, seed=1))
    assert list(first.topk_ids) != list(other.topk_ids)
    assert sum(first.stream_rows) == 40
    assert all(len(call) == 3 for call in first.list_calls(1))


@pytest.mark.parametrize("skew", [0.0, 1.0, 2.0])
def test_single_experts_are_drawn_with_zipf_weights(skew: float) -> None:
    settings = ZipfSettings(experts=4, top_k=1, layers=1, rows=8000, streams=1, skew=skew, drift=0.0)
    counts = sorted(Counter(draw_zipf_trace(settings).topk_ids).values(), reverse=True)
    weights = [1 / rank**skew for rank in range(1, 5)]
    for count, weight in zip(counts, weights, strict=True):
        assert count / 8000 == pytest.approx(weight / sum(weights), abs=0.02)


def test_drift_changes_which_experts_are_popular() -> None:
    def moved(drift: float) -> bool:
        settings = ZipfSettings(experts=32, top_k=2, layers=1, rows=4000, streams=1, skew=2.0, drift=drift)
        ids = draw_zipf_trace(settings).topk_ids
        return Counter(ids[:1000]).most_common(1)[0][0] != Counter(ids[-1000:]).most_common(1)[0][0]

    assert not moved(0.0)
    assert moved(1.0)


def test_settings_are_read_from_text() -> None:
    assert ZipfSettings.parse("zipf") == ZipfSettings()
    expected = ZipfSettings(experts=64, skew=1.5, seed=7)
    assert ZipfSettings.parse("zipf:experts=64, skew=1.5,seed=7") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zipf:colour=3", "'colour=3' is none of experts"),
        ("zipf:experts=many", "experts is 'many', expected a number"),
        ("zipf:experts=0", "experts is 0"),
        ("zipf:top_k=200", "top_k up to experts"),
        ("zipf:skew=nan", "skew from 0 to 10"),
        ("zipf:rows=1000000000", "expected fewer rows"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        ZipfSettings.parse(text)
