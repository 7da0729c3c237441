"""Damaged and hostile checkpoints are refused in one line; nothing outside the folder is opened."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints_of_tests import INDEX, modelopt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.lint import lint
from moedoctor.diagnose.name_patterns import Patterns
from moedoctor.diagnose.safetensors_header import CheckpointError, read_header


def header(value: object, length: int | None = None, data: bytes = b"\0" * 64) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype: object = "F32", shape: object = (2,), place: object = (0, 8)) -> dict[str, object]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": place}}


HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"\0" * 7, "7 bytes"),
    "length 2^63": (header({}, 1 << 63), "claims 9223372036854775808"),
    "length past the end": (header({}, 10_000), "claims 10000"),
    "truncated header": (header(one())[:20], "claims"),
    "no JSON": (header(b"{]"), "no JSON"),
    "not UTF-8": (header(b'{"\xff\xfe": 1}'), "no JSON"),
    "a list": (header([1]), "list"),
    "deep": (header(b"[" * 100_000), "no JSON"),
    "an endless number": (header(b'{"t": ' + b"9" * 10_000 + b"}"), "no JSON"),
    "the same name twice": (header(b'{"t": {"a": 1}, "t": {"a": 2}}'), "twice"),
    "no object": (header({"t": 3}), "no object"),
    "unknown dtype": (header(one(dtype="F4_X")), "dtype"),
    "dtype of another type": (header(one(dtype=[1])), "dtype"),
    "negative shape": (header(one(shape=[-2])), "shape"),
    "shape of floats": (header(one(shape=[2.0])), "shape"),
    "shape of booleans": (header(one(shape=[True])), "shape"),
    "many dimensions": (header(one(shape=[1] * 9)), "shape"),
    "offsets backwards": (header(one(place=[8, 0])), "data_offsets"),
    "offsets outside": (header(one(place=[60, 68])), "data_offsets"),
    "huge offsets": (header(one(place=[0, 1 << 70])), "data_offsets"),
    "three offsets": (header(one(place=[0, 4, 8])), "data_offsets"),
    "size of another shape": (header(one(shape=[3])), "expected 12"),
    "a product that overflows": (header(one(shape=[1 << 40, 1 << 40])), "bytes"),
    "overlap": (
        header(
            {
                "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
                "b": {"dtype": "U8", "shape": [8], "data_offsets": [7, 15]},
            }
        ),
        "overlap",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_cannot_be_believed(name: str, tmp_path: Path) -> None:
    data, said = HEADERS[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        read_header(path)
    message = str(error.value)
    assert said in message
    assert message.startswith("model.safetensors: ")
    assert "\n" not in message
    assert len(message) < 400


def test_a_good_header_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({"__metadata__": {"format": "pt"}, **one()}))
    info = read_header(path)["t"]
    assert (info.shape, info.size, info.elements) == ((2,), 8, 2)
    assert info.start == path.stat().st_size - 64


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400), st.integers(0, 400))
def test_no_bytes_raise_anything_else(tmp_path: Path, data: bytes, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + data)
    with contextlib.suppress(CheckpointError):
        read_header(path)


KEYS = st.sampled_from(["dtype", "shape", "data_offsets", "x"])
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(VALUES)
def test_no_json_raises_anything_else(tmp_path: Path, value: object) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({"t": value}))
    with pytest.raises(CheckpointError):
        read_header(path)


SECRET = "outside.safetensors"


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/../../outside.safetensors",
        "..",
        "",
        "x\n.safetensors",
        "\\\\host\\x.safetensors",
        "model.bin",
        3,
        None,
        ["model.safetensors"],
        "a" * 300 + ".safetensors",
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(shard: object, tmp_path: Path) -> None:
    folder = modelopt(2).write(tmp_path / "checkpoint")
    (tmp_path / SECRET).write_bytes(b"secret")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["x"] = shard
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"expected the plain name of a \.safetensors file") as error:
        lint(folder)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


JSON_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "config is a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "config.json:1: is a list",
    ),
    "config is no JSON": (
        lambda folder: (folder / "config.json").write_text('{\n"a": 1,\n}'),
        "config.json:3:",
    ),
    "config is deep": (
        lambda folder: (folder / "config.json").write_text("[" * 200_000),
        "config.json: is no JSON",
    ),
    "index without a map": (lambda folder: (folder / INDEX).write_text("{}"), "has no weight_map"),
    "index with an empty map": (
        lambda folder: (folder / INDEX).write_text('{"weight_map": {}}'),
        "has no weight_map",
    ),
    "shards without an index": (lambda folder: (folder / INDEX).unlink(), "2 shards and no"),
    "no shards": (
        lambda folder: [one.unlink() for one in (*folder.glob("*.safetensors"), folder / INDEX)],
        "no safetensors file",
    ),
    "a folder for a shard": (
        lambda folder: (
            (folder / "model-00001-of-00002.safetensors").unlink(),
            (folder / "model-00001-of-00002.safetensors").mkdir(),
        ),
        "no regular file",
    ),
    "a truncated shard": (
        lambda folder: os.truncate(folder / "model-00001-of-00002.safetensors", 20_000),
        "expected a range within",
    ),
}


@pytest.mark.parametrize("name", JSON_FILES)
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    damage, said = JSON_FILES[name]
    folder = modelopt(2).write(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        lint(folder)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = modelopt(2).write(tmp_path)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="no regular file"):
        lint(folder)


@pytest.mark.parametrize(
    "value",
    [3, [], "x", {"quant_method": 3}, {"quant_method": "modelopt", "ignore": 7, "config_groups": []},
     {"quant_method": "modelopt", "quant_algo": ["NVFP4"], "kv_cache_scheme": 3, "ignore": [None, 3, {}]},
     {"quant_method": "compressed-tensors", "config_groups": {"g": 3}},
     {"quant_method": "fp8", "weight_block_size": [0, "x"]},
     {"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": []}}],
)  # fmt: skip
def test_any_quantization_config_is_survived(value: object, tmp_path: Path) -> None:
    made = modelopt()
    made.config["quantization_config"] = value
    made.hf_quant = {"quantization": value}
    lint(made.write(tmp_path))


def test_an_expert_number_without_end_is_survived(tmp_path: Path) -> None:
    made = modelopt()
    made.config["num_experts"] = 1 << 31
    name = "model.layers.0.mlp.experts.999999999.up_proj.weight"
    made.tensors[name] = made.tensors["model.layers.0.mlp.experts.0.up_proj.weight"]
    assert {one.check for one in lint(made.write(tmp_path)).findings} >= {"expert_missing"}


def test_a_pattern_that_would_take_for_ever_is_not_run() -> None:
    started = time.process_time()
    patterns = Patterns(["re:(a+)+$", "re:(.*a){20}", "*a" * 40 + "b"], substrings=False)
    assert patterns.not_read == ["re:(a+)+$", "re:(.*a){20}"]
    assert not patterns.match("a" * 200)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("pattern", "module", "named"),
    [
        ("re:.*self_attn.*", "model.layers.3.self_attn.q_proj", True),
        ("re:.*mlp.gate$", "model.layers.3.mlp.gate", True),
        ("re:.*mlp.gate$", "model.layers.3.mlp.gate_proj", False),
        (r"re:^model\.layers\.(0|11)\..*", "model.layers.11.mlp.up_proj", True),
        (r"re:^model\.layers\.(0|11)\..*", "model.layers.1.mlp.up_proj", False),
        (r"re:.*layers\.\d+\.mlp", "model.layers.12.mlp.up_proj", True),
        ("model.layers.*.self_attn*", "model.layers.3.self_attn.q_proj", True),
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head_2", False),
        ("model.vision", "model.vision.blocks.0.q_proj", True),
    ],
)
def test_patterns_mean_what_their_writers_mean(pattern: str, module: str, named: bool) -> None:
    patterns = Patterns([pattern], substrings=False)
    assert patterns.not_read == []
    assert patterns.match(module) is named


def test_a_plain_name_of_modelopt_is_a_substring() -> None:
    assert Patterns(["layers.1"], substrings=True).match("model.layers.11.mlp")
    assert not Patterns(["layers.1"], substrings=False).match("model.layers.11.mlp")
