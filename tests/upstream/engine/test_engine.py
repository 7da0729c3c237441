"""The protocol with an engine's process: every way in which it can end, and what never outlives it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import engine_stub
import pytest

from moedoctor.results import Death
from moedoctor.upstream.engine.child import describe
from moedoctor.upstream.engine.engine import EngineRequest, run_engine, run_engines
from moedoctor.upstream.engine.log import read_log

PROMPTS = [[1, 2, 3], [7]]


@pytest.fixture(autouse=True)
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(engine_stub.write(tmp_path / "site")))


def test_tokens_and_what_the_log_says() -> None:
    result = run_engine(EngineRequest("ok", PROMPTS, max_tokens=2, logprobs=2, label="mine"))
    assert result.error is None
    assert result.tokens == ((2, 3), (8,))
    assert (result.label, result.version) == ("mine", "0.21.0")
    assert (result.log.moe_backend, result.log.moe_scheme) == ("MARLIN", "NvFp4")
    assert (result.log.offloader, result.log.offloaded) == ("UVAOffloader", "0.25")
    assert result.logprobs is not None
    assert result.logprobs[1] == ({"8": -0.5, "9": "nan"},)  # NaN survives as text, JSON has none
    assert set(result.seconds) == {"load", "generate", "total"}
    assert result.summary()["tokens"] == [[2, 3], [8]]


def test_text_goes_in_and_comes_out() -> None:
    result = run_engine(EngineRequest("ok", ["hello"]))
    assert (result.tokens, result.texts) == (((5,),), ("out",))


@pytest.mark.parametrize(
    ("model", "kind", "stage", "death"),
    [
        ("raise", "RuntimeError", "load", Death.EXCEPTION),
        ("illegal", "RuntimeError", "load", Death.ILLEGAL_MEMORY_ACCESS),
        ("abort", "signal", "process", Death.SIGNAL),
        ("exit", "silent", "process", Death.SILENT),
    ],
)
def test_ways_of_failing(model: str, kind: str, stage: str, death: Death) -> None:
    error = run_engine(EngineRequest(model, PROMPTS)).error
    assert error is not None
    assert (error.kind, error.stage, error.death) == (kind, stage, death)


def test_an_error_keeps_its_origin_and_its_frames() -> None:
    error = run_engine(EngineRequest("raise", PROMPTS)).error
    assert error is not None
    assert error.message == "b_scales is not on GPU\nKeyError: 'origin'"
    assert error.frames[-1].endswith('__init__: raise KeyError("origin")')


def test_a_time_limit_ends_the_engine_and_what_it_started(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    result = run_engine(EngineRequest("spawn", PROMPTS, {"hf_token": str(said)}, seconds=3.0))
    assert result.error is not None
    assert result.error.death is Death.HANG
    assert ended(int(said.read_text()))


def test_nothing_outlives_the_process_that_asked(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    parent = os.fork()
    if parent == 0:  # pragma: no cover - the child
        run_engine(EngineRequest("spawn", PROMPTS, {"hf_token": str(said)}, seconds=30.0))
        os._exit(0)
    deadline = time.monotonic() + 10
    while not (said.exists() and said.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(parent, 9)
    os.waitpid(parent, 0)
    assert ended(int(said.read_text()))


def ended(pid: int) -> bool:
    """Whether the process is gone within a few seconds; a zombie, which nobody here reaps, counts as gone."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_several_run_side_by_side_in_order() -> None:
    started = time.monotonic()
    requests = [EngineRequest("sleep", PROMPTS, seconds=1.5, label=str(index)) for index in range(3)]
    results = run_engines(requests, parallel=3)
    assert [one.label for one in results] == ["0", "1", "2"]
    assert time.monotonic() - started < 4.0


def test_probes_before_and_after() -> None:
    after = EngineRequest("ok", PROMPTS, probe="moedoctor.upstream.engine.child:device_memory_of")
    assert run_engine(after).error is not None  # there is no such function
    with pytest.raises(ValueError, match=r"is no moedoctor\.module:function"):
        EngineRequest("ok", PROMPTS, probe="os:system")
    with pytest.raises(ValueError, match="there is none"):
        EngineRequest("ok", [])
    with pytest.raises(ValueError, match="expected before or after"):
        EngineRequest("ok", PROMPTS, probe_when="never")


def test_the_environment_and_the_caches_are_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from moedoctor.upstream.engine.engine import _environ

    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    made = _environ(EngineRequest("ok", PROMPTS, environ={"HF_HUB_OFFLINE": "0"}), Path("/f"))
    assert (made["VLLM_USE_DEEP_GEMM"], made["HF_HUB_OFFLINE"]) == ("0", "0")
    assert made["VLLM_CACHE_ROOT"] == made["TORCHINDUCTOR_CACHE_DIR"] == "/f/cache"


def test_an_exception_inside_another() -> None:
    def failing() -> Any:
        try:
            raise KeyError("first")
        except KeyError:
            raise RuntimeError("second")  # noqa: B904

    try:
        failing()
    except RuntimeError as error:
        said = describe(error)
    assert said["kind"] == "RuntimeError"
    assert said["message"] == "second\nKeyError: 'first'"


@pytest.mark.parametrize(
    ("line", "backend", "scheme"),
    [
        ("Using 'EMULATION' NvFp4 MoE backend out of potential backends: [...]", "EMULATION", "NvFp4"),
        ("Using TRITON Fp8 MoE backend out of potential backends", "TRITON", "Fp8"),
        ("Using TRITON Unquantized MoE backend out of", "TRITON", "Unquantized"),
        ("Using TRITON backend for Unquantized MoE", "TRITON", "Unquantized"),
        ("Using 'MARLIN' Mxfp4 MoE backend.", "MARLIN", "Mxfp4"),
    ],
)
def test_backends_in_the_log(line: str, backend: str, scheme: str) -> None:
    facts = read_log(f"INFO 11-21 [x.py:1] {line}\n")
    assert (facts.moe_backend, facts.moe_scheme) == (backend, scheme)


def test_what_the_plug_in_says() -> None:
    text = (
        "INFO moedoctor: active in vLLM 0.21.0: offload (traceable copies)\n"
        "INFO moedoctor: offload: 1.5 of 1.6 MiB on the host, fetched around each layer, 2 layers\n"
        "WARNING moedoctor: the fix routing is not applied to vLLM 0.21.0: not needed\n"
    )
    facts = read_log(text)
    assert facts.fixes == "offload (traceable copies)"
    assert facts.offloaded_by_us == "1.5 of 1.6 MiB on the host, fetched around each layer"
    assert facts.refused == ("moedoctor: the fix routing is not applied to vLLM 0.21.0: not needed",)
