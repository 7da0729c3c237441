"""Damaged and hostile checkpoints are refused in one line; nothing outside the folder is opened."""

import contextlib
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints_of_tests import INDEX, modelopt
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.checkpoint import safetensors_header
from moedoctor.diagnose.checkpoint.findings import CHECKS
from moedoctor.diagnose.checkpoint.json_fix import correct
from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.diagnose.checkpoint.name_patterns import Patterns
from moedoctor.diagnose.checkpoint.safetensors_header import CheckpointError, read_header
from moedoctor.processes.files import write


def header(value: object, length: int | None = None, data: bytes = b"\0" * 8) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def u8(start: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


def entry(dtype: object = "F32", shape: object = (2,), place: object = (0, 8)) -> dict[str, object]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": place}}


HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "length 2^63": (header({}, 1 << 63), "claims 9223372036854775808"),
    "length past the end": (header({}, 10_000), "claims 10000"),
    "no JSON": (header(b"{]"), "not JSON"),
    "not UTF-8": (header(b'{"\xff\xfe": 1}'), "not JSON"),
    "a list": (header([1]), "list"),
    "deep": (header(b"[" * 100_000), "not JSON"),
    "an endless number": (header(b'{"t": ' + b"9" * 10_000 + b"}"), "not JSON"),
    "nested lists": (header(b'{"t": {"dtype": "U8", "shape": [' + b"[]," * 10_000 + b"[]]}}"), "shape"),
    "metadata that are no text": (header({"__metadata__": {"a": 1}}), "expected a string"),
    "half a character for a name": (header(b'{"\\ud800": {}}'), "not JSON"),
    "a key of an entry twice": (header(b'{"t": {"shape": [1], "shape": [2]}}'), "twice"),
    "the same name twice": (
        header(f'{{"t": {json.dumps(u8(0, 8))}, "t": {json.dumps(u8(0, 8))}}}'.encode()),
        "names t twice",
    ),
    "no object": (header({"t": 3}), "not an object"),
    "unknown dtype": (header(entry(dtype="F4_X")), "dtype"),
    "negative shape": (header(entry(shape=[-2])), "shape"),
    "shape of booleans": (header(entry(shape=[True])), "shape"),
    "many dimensions": (header(entry(shape=[1] * 9)), "shape"),
    "offsets backwards": (header(entry(place=[8, 0])), "data_offsets"),
    "offsets outside": (header(entry(place=[4, 12])), "4 bytes before tensor t"),
    "part of a byte": (header(entry("F4", [3], [0, 2])), "expected whole bytes"),
    "bytes behind the last tensor": (header(entry(), data=b"\0" * 64), "56 bytes after its last tensor t"),
    "a hole": (header({"a": u8(0, 2), "b": u8(5, 8)}), "3 bytes before tensor b"),
    "an empty tensor within another": (header({"a": u8(0, 8), "b": u8(4, 4)}), "a and b overlap"),
    "data and no tensor": (header({}), "8 bytes and no tensor"),
    "three offsets": (header(entry(place=[0, 4, 8])), "data_offsets"),
    "size of another shape": (header(entry(shape=[3])), "expected 12"),
    "a product that overflows": (header(entry(shape=[1 << 40, 1 << 40])), "bytes"),
    "overlap": (header({"a": u8(0, 8), "b": u8(7, 15)}, data=b"\0" * 15), "overlap"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_an_invalid_header_is_refused(name: str, tmp_path: Path) -> None:
    data, expected = HEADERS[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        read_header(path)
    message = str(error.value)
    assert expected in message
    assert message.startswith("model.safetensors: ")
    assert "\n" not in message
    assert len(message) < 400


def test_a_header_of_too_many_values_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "_MOST_VALUES", 100)
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(b'{"t": [' + b"[]," * 100))
    with pytest.raises(CheckpointError, match="holds more than 100 values"):
        read_header(path)


def test_a_valid_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    metadata = {"format": "pt", "training": "[[{}]]" * 10_000}
    path.write_bytes(header({"__metadata__": metadata, "empty": u8(8, 8), **entry()}))
    info = read_header(path)["t"]
    assert (info.shape, info.size, info.elements) == ((2,), 8, 2)
    assert info.start == path.stat().st_size - 8
    path.write_bytes(header(json.dumps({"__metadata__": None, **entry()}, indent=4).encode() + b" \n"))
    assert list(read_header(path)) == ["t"]


SIZES = st.integers(0, 3)
ENTRIES = st.lists(
    st.tuples(st.sampled_from(["U8", "F4", "BF16"]), SIZES, st.integers(-1, 1), st.integers(-1, 1)),
    max_size=4,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ENTRIES, st.integers(-1, 1), st.randoms(use_true_random=False))
def test_an_accepted_header_can_be_loaded(tmp_path, entries, more, pick):
    """Against the safetensors library itself: places that meet, overlap, leave holes or end early."""
    safe_open = pytest.importorskip("safetensors").safe_open
    at, tensors = 0, {}
    for number, (dtype, count, gap, longer) in enumerate(entries):
        start = max(0, at + gap * (pick.random() < 0.2))
        size = count * {"U8": 8, "F4": 4, "BF16": 16}[dtype] // 8
        at = max(start, start + size + longer * (pick.random() < 0.2))
        tensors[f"t{number}"] = {"dtype": dtype, "shape": [count], "data_offsets": [start, at]}
    names = list(tensors)
    pick.shuffle(names)
    path = tmp_path / "model.safetensors"
    data = b"\0" * max(0, at + more * (pick.random() < 0.2))
    path.write_bytes(header({name: tensors[name] for name in names}, data=data))
    try:
        ours: set[str] | None = set(read_header(path))
    except CheckpointError:
        ours = None
    try:
        with safe_open(path, "numpy") as file:
            theirs: set[str] | None = set(file.keys())
    except Exception:
        theirs = None
    assert ours == theirs


def call_in_time(call: Callable[..., Any], path: Path) -> Any:
    """Return the result of a call, or its error, that takes less than 5 s of the processor."""
    started = time.process_time()
    try:
        result = call(path)
    except CheckpointError as error:
        result = str(error)
    assert time.process_time() - started < 5
    return result


def test_many_names_and_one_twice_take_no_longer_than_their_text(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    empty = json.dumps(u8(0, 0))
    names = ", ".join(f'"t{number}": {empty}' for number in [*range(30_000), 29_999])
    path.write_bytes(header(f"{{{names}}}".encode(), data=b""))
    assert "t29999 twice" in call_in_time(read_header, path)
    keys = ", ".join(f'"{number}":0' for number in [*range(200), 199])
    path.write_bytes(header(f'{{"t": {{{keys}}}}}'.encode(), data=b""))
    assert "names 199 twice" in call_in_time(read_header, path)


def test_an_index_that_names_many_tensors_too_many_takes_no_longer_than_its_text(tmp_path: Path) -> None:
    made = modelopt(3)
    ghosts = {f"model.ghost.{number}.weight": "model-00001-of-00003.safetensors" for number in range(20_000)}
    made.change_index = lambda index: index["weight_map"].update(ghosts)
    folder = made.write(tmp_path)
    (finding,) = call_in_time(lint, folder).findings
    assert (finding.check, finding.count) == ("index_disagrees", 20_000)
    lines = (folder / INDEX).read_text().splitlines()
    assert "model.ghost.0.weight" in lines[finding.line - 1]


def test_an_index_that_names_many_tensors_twice_takes_no_longer_than_its_text(tmp_path: Path) -> None:
    folder = modelopt(3).write(tmp_path)
    text = (folder / INDEX).read_text()
    line = '"model.ghost.{}.weight": "model-00001-of-00003.safetensors",\n'
    lines = "".join(line.format(number // 2) for number in range(30_000))
    (folder / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{\n{lines}'))
    counts = {finding.check: finding.count for finding in call_in_time(lint, folder).findings}
    assert counts["tensor_duplicated"] == 15_000


def test_long_lists_of_excluded_modules_that_differ_take_no_longer_than_their_text(tmp_path: Path) -> None:
    made = modelopt()
    made.config["quantization_config"]["quant_method"] = "awq"  # excluded modules are not checked
    made.config["quantization_config"]["ignore"] = [f"a{number}" for number in range(20_000)]
    made.hf_quant["quantization"]["exclude_modules"] = [f"b{number}" for number in range(20_000)]
    assert call_in_time(lint, made.write(tmp_path)).tensors == len(made.tensors)


KEYS = st.sampled_from(["dtype", "shape", "data_offsets", "x"])
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)
HEADER_BYTES = st.builds(header, st.binary(max_size=400), st.none() | st.integers(0, 400))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HEADER_BYTES | VALUES.map(lambda value: header({"t": value})))
def test_no_header_raises_anything_else(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError):
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


def config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


JSON_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "config is a list": (config("[]"), "config.json:1: is a list"),
    "config is no JSON": (config('{\n"a": 1,\n}'), "config.json:3:"),
    "config is deep": (config("[" * 200_000), "config.json: cannot be read as JSON"),
    "config of too many lists": (config('{"a": [' + "[]," * 1_000_001 + "[]]}"), "more than 1000000 lists"),
    "index without a map": (lambda folder: (folder / INDEX).write_text("{}"), "has no weight_map"),
    "index with an empty map": (
        lambda folder: (folder / INDEX).write_text('{"weight_map": {}}'),
        "has no weight_map",
    ),
    "shards without an index": (lambda folder: (folder / INDEX).unlink(), "2 shards and no"),
    "no shards": (
        lambda folder: [file.unlink() for file in (*folder.glob("*.safetensors"), folder / INDEX)],
        "no safetensors file",
    ),
}


@pytest.mark.parametrize("name", JSON_FILES)
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    damage, expected = JSON_FILES[name]
    folder = modelopt(2).write(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        lint(folder)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


KEYS_OF_CONFIG = [
    "quantization_config", "quantization", "text_config", "quant_method", "quant_algo", "config_groups", "g",
    "weights", "input_activations", "num_bits", "type", "dynamic", "group_size", "block_structure", "ignore",
    "exclude_modules", "modules_to_not_convert", "ignored_layers", "kv_cache_scheme", "kv_cache_quant_algo",
    "quantized_layers", "weight_block_size", "activation_scheme", "format", "num_experts", "n_routed_experts",
    "num_attention_heads"
]  # fmt: skip
WORDS = [
    "modelopt", "compressed-tensors", "fp8", "modelopt_fp4", "NVFP4", "FP8", "MIXED_PRECISION", "float",
    "int", "static", "lm_head", "re:.*mlp.gate$", "re:(a+)+", "*", "", "\ud800", "é"
]  # fmt: skip
CONFIG_VALUES = st.recursive(
    st.sampled_from(WORDS)
    | st.sampled_from([None, True, False, 0, 1, 4, 8, 16, -1, 1 << 70, 0.5, float("nan"), float("inf")]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS_OF_CONFIG), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return modelopt().write(tmp_path_factory.mktemp("clean"))


WEIGHTS = ("quantization_config", "config_groups", "group_0", "weights")
PLACES = [
    (),
    ("num_experts",),
    ("num_attention_heads",),
    ("text_config",),
    ("quantization_config",),
    *(("quantization_config", key) for key in KEYS_OF_CONFIG),
    *(
        ("quantization_config", "config_groups", "group_0", part, key)
        for part in ("weights", "input_activations")
        for key in ("num_bits", "type", "dynamic", "group_size", "block_structure")
    ),
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(PLACES),
    st.sampled_from([None, "modelopt", "compressed-tensors", "fp8"]),
    CONFIG_VALUES,
    st.none() | CONFIG_VALUES,
)
@example((*WEIGHTS, "num_bits"), "compressed-tensors", [4], None)
@example((*WEIGHTS, "type"), "compressed-tensors", {}, None)
@example(("quantization_config",), None, [], "x")
@example(("quantization_config",), None, {"quant_method": 3}, 3)
@example((), "compressed-tensors", None, {"config_groups": {"g": 3}})
@example(("quantization_config",), None, {"quant_method": "fp8", "weight_block_size": [0, "x"]}, [])
@example((), "modelopt", None, {"quant_algo": "MIXED_PRECISION", "quantized_layers": []})
def test_no_value_of_a_config_raises_anything_else(clean, tmp_path, place, method, value, hf_quant):
    """With any value anywhere in the two JSON files, lint gives a report or an error of one line."""
    made = modelopt()
    made.config["quantization_config"]["quant_method"] = method
    owner: Any = made.config
    for key in place[:-1]:
        owner = owner.setdefault(key, {})
    if place:
        owner[place[-1]] = value
    elif isinstance(value, dict):
        owner.update(value)
    made.hf_quant = {"quantization": hf_quant}
    (clean / "config.json").write_text(json.dumps(made.config))
    (clean / "hf_quant_config.json").write_text(json.dumps(made.hf_quant))
    with contextlib.suppress(CheckpointError):
        for name, text in correct(lint(clean), CHECKS).items():
            write(tmp_path / name, text)
            json.loads((tmp_path / name).read_text(encoding="utf-8"))


def test_a_huge_expert_number_is_no_crash(tmp_path: Path) -> None:
    made = modelopt()
    made.config["num_experts"] = 1 << 31
    name = "model.layers.0.mlp.experts.999999999.up_proj.weight"
    made.tensors[name] = made.tensors["model.layers.0.mlp.experts.0.up_proj.weight"]
    assert {finding.check for finding in lint(made.write(tmp_path)).findings} >= {"expert_missing"}


def test_a_pattern_with_exponential_time_is_not_run() -> None:
    started = time.process_time()
    patterns = Patterns(["re:(a+)+$", "re:(.*a){20}", "*a" * 40 + "b"], substrings=False)
    assert patterns.not_read == ["re:(a+)+$", "re:(.*a){20}"]
    assert not patterns.match("a" * 200)
    alternatives = "re:" + "(a|b)" * 9 + "x" * 100_000  # 50 MB if it were translated
    many = [f"a{number}*" for number in range(10_002)]
    assert Patterns([alternatives, *many], substrings=False).not_read == [alternatives, *many[10_000:]]
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
