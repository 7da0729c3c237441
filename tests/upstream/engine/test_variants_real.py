"""Flags of variants as the installed vLLM's own parser reads them."""

import importlib
import shlex
from typing import Any

import pytest
from packaging.version import Version

from evidence.promises import load_promises
from moedoctor.bench.engines import Variant
from moedoctor.upstream.engine import child

pytestmark = pytest.mark.upstream

VARIANTS = dict.fromkeys(
    words[place + 1]
    for words in (shlex.split(promise.command) for promise in load_promises())
    for place, word in enumerate(words)
    if word == "--variant"
)


@pytest.fixture(scope="module")
def arguments() -> Any:
    version = importlib.import_module("vllm").__version__
    if Version(version) < Version("0.21.0"):
        pytest.skip(f"engines are made for vLLM 0.21.0 and later, not {version}")
    platforms: Any = importlib.import_module("vllm.platforms")
    # Without a GPU the parser's defaults cannot be made.
    platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()
    return importlib.import_module("vllm.engine.arg_utils").EngineArgs


@pytest.mark.parametrize("text", VARIANTS)
def test_every_flag_of_a_promise_is_one_of_the_release(arguments: Any, text: str) -> None:
    given = child._read_flags(Variant.parse(text).flags)
    arguments(model="x", **given)
    if "--moe-backend" in text:
        backend = given["moe_backend"]
        assert backend in text
    if "--cpu-offload-params" in text:
        assert list(given["cpu_offload_params"]) == ["experts"]
    if "cudagraph_capture_sizes" in text:
        assert given["compilation_config"].cudagraph_capture_sizes[0] == 1


def test_only_what_is_given_counts_and_an_unknown_flag_is_named(arguments: Any) -> None:
    assert child._read_flags(["--gpu-memory-utilization", "0.5"]) == {"gpu_memory_utilization": 0.5}
    with pytest.raises(ValueError, match="vLLM's parser refuses --no-such-flag"):
        child._read_flags(["--no-such-flag"])
