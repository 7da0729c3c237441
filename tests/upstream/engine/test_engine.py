"""The protocol with an engine's process: its answer, and each way it can end."""

import argparse
import inspect
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import engine_stub
import pytest

from moedoctor.processes.ask import Ended
from moedoctor.results import Death
from moedoctor.upstream.engine import child, engine
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult, read_log, run_engine, run_engines

PROMPTS = [[1, 2, 3], [7]]


@pytest.fixture(autouse=True)
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(engine_stub.write(tmp_path / "site")))


def test_tokens_and_facts_in_the_log() -> None:
    result = run_engine(EngineRequest("ok", PROMPTS, max_tokens=2, logprobs=2, label="mine"))
    assert (result.error, result.tokens) == (None, ((2, 3), (8,)))
    assert (result.label, result.version, result.fixes) == ("mine", "0.21.0", None)
    log = result.log
    assert (log.moe_backend, log.offloader, log.offloaded) == ("MARLIN", "UVAOffloader", "0.25")
    assert result.logprobs[1] == ({"8": -0.5, "9": "nan"},)  # NaN survives as text, JSON has none
    assert set(result.seconds) == {"import", "load", "generate", "total"}


def test_text_goes_in_and_comes_out() -> None:
    result = run_engine(EngineRequest("fixed", ["hello"]))
    assert (result.tokens, result.texts) == (((5,),), ("out",))
    assert result.fixes == "offload (copies); nan (watched)", "the plug-in reports what is active in a file"


def test_a_message_does_not_hold_the_folder_that_vllm_is_installed_in() -> None:
    ended = Ended((), 0, "", 1.0, 2.0)
    message = 'File "/tmp/a/site-packages/vllm/model.py", line 3\n/opt/x/humming/csrc/launcher.h:3, error'
    answer = {"error": {"kind": "E", "message": message, "stage": "load"}}
    error = engine._read_error(answer, ended)
    assert error.message == 'File "vllm/model.py", line 3\nhumming/csrc/launcher.h:3, error'


@pytest.mark.parametrize(
    ("model", "kind", "stage", "death"),
    [("raise", "RuntimeError", "load", Death.EXCEPTION), ("abort", "signal", "process", Death.SIGNAL)],
)
def test_ways_of_failing(model: str, kind: str, stage: str, death: Death) -> None:
    error = run_engine(EngineRequest(model, PROMPTS)).error
    assert (error.kind, error.stage, error.death) == (kind, stage, death)
    if model == "raise":
        assert error.message == "b_scales is not on GPU\nKeyError: 'origin'"
        assert error.frames[-1].endswith('__init__: raise KeyError("origin")')
        assert error.summarize() == "load: RuntimeError: b_scales is not on GPU"


def measure(then: str) -> EngineResult:
    """Run an engine whose probe yields two rows and then does something."""
    probe = {"probe": engine_stub.MEASURE, "probe_options": {"then": then}}
    return run_engine(EngineRequest("ok", PROMPTS, **probe, seconds=8))


TWO_ROWS = [{"row": 1}, {"row": 2}]


@pytest.mark.parametrize(
    ("then", "kind", "stage", "message"),
    [
        pytest.param(
            "sleep",
            "hang",
            "process",
            r"no answer within 8 s: import took \d s, load \d s, generate \d s; "
            r"probe had run for [1-8] s and had 2 rows",
            marks=pytest.mark.slow,
        ),
        ("raise", "RuntimeError", "probe", "no memory is left"),
        ("exit", "silent", "process", "ended with exit status 7 and no answer"),
    ],
)
def test_an_engine_that_fails_in_its_probe_keeps_what_it_measured(then, kind, stage, message):
    result = measure(then)
    assert (result.error.kind, result.error.stage) == (kind, stage)
    assert re.fullmatch(message, result.error.message)
    assert (result.probe, result.tokens) == (TWO_ROWS, ((2, 3, 4), (8,)))
    assert {"import", "load", "generate"} <= set(result.seconds)


@pytest.mark.slow
def test_killed_engines_ran_side_by_side_and_name_their_stage_and_what_was_logged() -> None:
    started = time.monotonic()
    requests = [EngineRequest("sleep", PROMPTS, seconds=3, label=str(index)) for index in range(3)]
    results = run_engines(requests, parallel=3)
    assert time.monotonic() - started < 8.0
    assert [result.label for result in results] == ["0", "1", "2"]
    for result in results:
        assert result.error.death is Death.HANG
        stages = r"import took \d s; load had run for [1-3] s \(weights 12 s, compile 80 s\)"
        summary = result.error.summarize()
        assert re.fullmatch(f"process: hang: no answer within 3 s: {stages}", summary)
        assert (result.probe, result.seconds["weights"]) == (None, 12.3)


def test_wrong_requests_are_refused() -> None:
    missing = EngineRequest("ok", PROMPTS, probe="moedoctor.upstream.engine.child:no_such_function")
    assert run_engine(missing).error is not None
    with pytest.raises(ValueError, match=r"expected moedoctor\.module:function"):
        EngineRequest("ok", PROMPTS, probe="os:system")
    with pytest.raises(ValueError, match="expected at least one"):
        EngineRequest("ok", [])
    with pytest.raises(ValueError, match="expected before or after"):
        EngineRequest("ok", PROMPTS, probe_when="never")


def test_the_request_sets_the_environment_and_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_module(module: str, request: Any, *, environ: Any, caches: Any, seconds: float) -> Ended:
        assert module == "moedoctor.upstream.engine.child"
        assert (environ["VLLM_USE_DEEP_GEMM"], environ["HF_HUB_OFFLINE"]) == ("0", "0")
        assert {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"} < set(caches)
        return Ended((), 0, "", seconds, seconds)

    monkeypatch.setattr(engine, "run_module", run_module)
    run_engine(EngineRequest("ok", PROMPTS, environ={"HF_HUB_OFFLINE": "0"}))


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        ("Using 'EMULATION' NvFp4 MoE backend out of potential backends: [...]", "EMULATION"),
        ("Using TRITON Fp8 MoE backend out of potential backends", "TRITON"),
        ("Using TRITON backend for Unquantized MoE", "TRITON"),
        ("Using 'MARLIN' Mxfp4 MoE backend.", "MARLIN"),
    ],
)
def test_backends_in_the_log(line: str, backend: str) -> None:
    assert read_log(f"INFO 11-21 [x.py:1] {line}\n").moe_backend == backend


def test_the_plug_in_in_the_log() -> None:
    facts = read_log(
        "INFO moedoctor: offload: 1.5 of 1.6 MiB on the host, fetched around each layer, 2 layers\n"
        "WARNING moedoctor: the fix routing is not applied to vLLM 0.21.0: no topk\n"
        "WARNING moedoctor: expert_cache: cpu=auto computes nothing: no gcc\n"
        "WARNING moedoctor: expert_cache: cpu computes nothing of layer 0 in CUDA graphs\n"
        "WARNING moedoctor: expert_cache: cpu=auto computes nothing: another model of this process\n"
        "INFO moedoctor: expert_cache: cpu=auto: 14 CPU workers on cores 18 to 31: 1 tokens: share 0\n"
    )
    assert facts.offloaded_by_us == "1.5 of 1.6 MiB on the host, fetched around each layer"
    assert facts.refused == (
        "moedoctor: the fix routing is not applied to vLLM 0.21.0: no topk",
        "moedoctor: expert_cache: cpu=auto computes nothing: no gcc",
        "moedoctor: expert_cache: cpu computes nothing of layer 0 in CUDA graphs",
    )


def test_flags_are_read_by_vllms_parser_and_replace_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is given counts: a default of the parser must not replace an argument of ours."""

    class EngineArgs:
        @staticmethod
        def add_cli_args(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--model", default="a model")
            parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
            parser.add_argument("--enforce-eager", action="store_true")

    for name, module in {
        "vllm.utils.argparse_utils": types.SimpleNamespace(FlexibleArgumentParser=argparse.ArgumentParser),
        "vllm.engine.arg_utils": types.SimpleNamespace(EngineArgs=EngineArgs),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert child._read_flags([]) == {}
    assert child._read_flags(["--enforce-eager"]) == {"enforce_eager": True}
    given = child._read_flags(["--gpu-memory-utilization", "0.92", "--model", "another"])
    assert given == {"gpu_memory_utilization": 0.92, "model": "another"}
    with pytest.raises(ValueError, match="vLLM's parser refuses --nonsense: "):
        child._read_flags(["--nonsense"])


@pytest.mark.parametrize("is_there", [True, False])
def test_the_peak_of_loading_is_what_goes_when_weights_are_loaded(is_there, monkeypatch):
    """An error of vLLM passes, and its loader is as before."""
    cuda = types.SimpleNamespace(
        is_available=lambda: is_there, max_memory_allocated=lambda: 50, memory_allocated=lambda: 20
    )
    loader = type("BaseModelLoader", (), {"load_model": lambda self, name: name.upper()})
    original = loader.load_model
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    name = "vllm.model_executor.model_loader.base_loader"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(BaseModelLoader=loader))
    response: dict[str, Any] = {}

    def load_twice() -> None:
        assert list(inspect.signature(loader.load_model).parameters) == ["self", "name"], "fixes look at it"
        loader().load_model(loader().load_model(name="tiny") == "TINY")

    with pytest.raises(AttributeError), child._watch_loading(response):
        load_twice()
    assert response == ({"load_peak": 30} if is_there else {})
    assert loader.load_model is original
