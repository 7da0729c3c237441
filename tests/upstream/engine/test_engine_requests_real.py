"""Our engines' requests to the real vLLM: arguments, variables, backends, flags, and lines of its log."""

import dataclasses
import importlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from packaging.version import Version

from evidence.promises import load_promises
from moedoctor.bench import engines
from moedoctor.upstream.engine import child, nan_padding, offload_table
from moedoctor.upstream.engine.engine import ARGUMENTS, ENVIRON, EngineRequest, has_backend, read_log

pytestmark = pytest.mark.upstream


@pytest.fixture(scope="module")
def vllm() -> Any:
    """The installed vLLM, from the first release that engines are made for."""
    module = importlib.import_module("vllm")
    if Version(module.__version__) < Version("0.21.0"):
        pytest.skip(f"engines are made for vLLM 0.21.0 and later, not {module.__version__}")
    return module


def requests(folder: Path) -> Iterator[EngineRequest]:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100}))
    folders: Any = dict.fromkeys(("bf16", "nvfp4", "fp8"), str(folder))
    for mode in (offload_table.EAGER, offload_table.COMPILED):
        places = (*offload_table.PLACES, offload_table.WEIGHTS)
        backends = tuple(offload_table.BACKENDS)
        for trial in offload_table.list_trials(backends, mode, places, "offload", folders):
            yield trial.request
    for trial in nan_padding.rank_trials(str(folder), "DEP=2", nan_padding.CONFIGS["DEP=2"]):
        yield trial.request
    variant = engines.Variant.parse("offload=MOEDOCTOR_FIXES=offload")
    yield engines.make_request(engines.Plan(folder, [variant]), variant)


def test_every_argument_and_variable_is_one_of_the_release(vllm: Any, tmp_path: Path) -> None:
    fields = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
    variables = importlib.import_module("vllm.envs").environment_variables
    for request in requests(tmp_path):
        assert {*ARGUMENTS, *request.arguments} - {"skip_tokenizer_init"} <= fields
        named = {name for name in {**ENVIRON, **request.environ} if name.startswith("VLLM_")}
        assert named <= variables.keys()


def test_every_backend_is_one_that_the_release_takes(vllm: Any, tmp_path: Path) -> None:
    known = get_args(importlib.import_module("vllm.config.kernel").MoEBackend)
    for scheme, backend in offload_table.BACKENDS.values():
        assert backend in known
        oracle = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.nvfp4")
        if scheme == "nvfp4":
            there = hasattr(oracle.NvFp4MoeBackend, backend.upper())
            assert has_backend(scheme, backend) is there


def test_the_lines_that_are_read_from_the_log_are_in_the_sources(vllm: Any) -> None:
    package = Path(vllm.__file__).parent
    texts = {
        "model_executor/offloader/base.py": "Offloader set to %s",
        "model_executor/offloader/uva.py": "Total CPU offloaded parameters: %s",
        "model_executor/layers/fused_moe/oracle/nvfp4.py": "Using '{backend.value}' NvFp4 MoE backend out",
        "model_executor/layers/fused_moe/oracle/unquantized.py": "{backend.value} Unquantized MoE backend",
    }
    for file, text in texts.items():
        assert text in (package / file).read_text(encoding="utf-8"), file
    log = "\n".join(text.replace("{backend.value}", "X").replace("%s", "3.5") for text in texts.values())
    facts = read_log(log.replace("set to 3.5", "set to UVAOffloader"))
    assert (facts.moe_backend, facts.offloader, facts.offloaded) == ("X", "UVAOffloader", "3.5")


def test_the_model_of_an_engine_in_this_process_can_be_asked_for(vllm: Any) -> None:
    assert hasattr(vllm.LLM, "apply_model")
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    assert hasattr(runner, "_model_forward"), "decode_speed times the steps of the V1 runner"


VARIANTS = dict.fromkeys(
    words[place + 1]
    for words in (shlex.split(promise.command) for promise in load_promises())
    for place, word in enumerate(words)
    if word == "--variant"
)


@pytest.fixture(scope="module")
def arguments(vllm: Any) -> Any:
    platforms: Any = importlib.import_module("vllm.platforms")
    # Without a GPU the parser's defaults cannot be made.
    platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()
    return importlib.import_module("vllm.engine.arg_utils").EngineArgs


@pytest.mark.parametrize("text", VARIANTS)
def test_every_flag_of_a_promise_is_one_of_the_release(arguments: Any, text: str) -> None:
    given = child._read_flags(engines.Variant.parse(text).flags)
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
