"""The fix `backend` inside a stub of vLLM: the variable is honored, and vLLM's reasons are logged."""

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_stub import write

from moedoctor.plugin import backend_fix
from moedoctor.plugin.register import list_known_releases, register

ORACLE = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"
Stub = Callable[..., Any]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Return `EngineArgs` of a stub of a release, to which the fix was applied with the variable set."""

    def make(version: str = "0.21.0", backend: str | None = "MARLIN", imported: str = "vllm") -> Any:
        monkeypatch.syspath_prepend(str(write(tmp_path, version)))
        monkeypatch.setenv("MOEDOCTOR_FIXES", "backend")
        if backend is not None:
            monkeypatch.setenv("VLLM_NVFP4_MOE_BACKEND", backend)
        importlib.import_module(imported)
        register()
        return importlib.import_module("vllm.engine.arg_utils").EngineArgs

    return make


def moe_backend(arguments: Any) -> str:
    backend: str = arguments.create_engine_config().kernel_config.moe_backend
    return backend


@pytest.mark.parametrize("version", list_known_releases())
def test_the_variable_is_honoured_in_every_release(stub, caplog, version):
    config = stub(version)(described={"quant_algo": "NVFP4"}).create_engine_config(headless=True)
    assert config.kernel_config.moe_backend == "marlin"
    assert f"active in vLLM {version}: backend (MARLIN for NVFP4 MoE" in caplog.messages[0]
    # The stub has no GPU: only the reasons are missing.
    assert not any("by itself" in line or "could not" in line for line in caplog.messages)


@pytest.mark.parametrize("imported", ["vllm", ORACLE])
def test_hidden_reasons_of_upstream_are_logged(stub: Stub, imported: str) -> None:
    stub(backend=None, imported=imported)
    backend_fix.apply("0.21.0")
    assert (ORACLE in sys.modules) == (imported == ORACLE), "engines import it when a model is built"
    module: Any = importlib.import_module(ORACLE)
    assert isinstance(module.logger, backend_fix.LouderLogger)
    assert not isinstance(module.logger._quiet, backend_fix.LouderLogger)
    module.logger.debug_once("since it does not fit", scope="local")
    module.logger.info_once("Using 'MARLIN'")
    quiet: Any = importlib.import_module("vllm.logger").init_logger("vllm.engine")
    assert not isinstance(quiet, backend_fix.LouderLogger)
    assert module.logger.said == [
        ("info", "since it does not fit", "local"),
        ("info", "Using 'MARLIN'", "local"),
    ]


def test_the_flag_and_other_models_come_first(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    arguments = stub()
    assert moe_backend(arguments(quantization="modelopt_fp4", moe_backend="cutlass")) == "cutlass"
    assert moe_backend(arguments(quantization="fp8")) == "auto"
    assert moe_backend(arguments()) == "auto"
    assert any("gives way to moe_backend=cutlass" in line for line in caplog.messages)
    assert any("is not NVFP4" in line for line in caplog.messages)


@pytest.mark.parametrize(("hidden_act", "cutlass"), [("silu", "would work"), ("relu2", "without a gate")])
def test_if_the_variable_decides_the_reasons_are_those_of_the_tables(
    stub, monkeypatch, caplog, hidden_act, cutlass
):
    arguments = stub("0.18.0")(quantization="modelopt_fp4")
    platform = types.SimpleNamespace(get_device_capability=lambda: (12, 0))
    monkeypatch.setattr(importlib.import_module("vllm.platforms"), "_current_platform", platform)
    arguments.hidden_act, arguments.parallel = hidden_act, types.SimpleNamespace()
    arguments.create_engine_config()
    selected = "by itself vLLM would select FLASHINFER_CUTLASS on compute capability 12.0"
    assert f"moedoctor: {selected}" in caplog.messages
    (line,) = [line for line in caplog.messages if line.startswith("moedoctor: VLLM_CUTLASS: ")]
    assert cutlass in line


@pytest.mark.parametrize(
    ("version", "backend", "words"),
    [
        ("0.21.0", "HUMMING", "0.21.0 has no such NVFP4 MoE backend; it has cutlass"),
        # The engine must know of this backend before its parallel settings are made.
        ("0.33.0", "FLASHINFER_MOE_EP_CUTEDSL", "ask with --moe-backend flashinfer_moe_ep_cutedsl"),
    ],
)
def test_a_name_that_cannot_be_honoured_stops_the_engine_unless_the_fix_is_optional(
    stub, monkeypatch, caplog, capsys, version, backend, words
):
    arguments = stub(version, backend)
    with pytest.raises(SystemExit) as stopped:
        arguments(quantization="modelopt_fp4").create_engine_config()
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "vLLM is stopped: backend is refused: VLLM_NVFP4_MOE_BACKEND=" in line
    assert words in line
    # The variable decides nothing for these, so they start.
    assert moe_backend(arguments(quantization="fp8")) == "auto"
    assert moe_backend(arguments(quantization="modelopt_fp4", moe_backend="marlin")) == "marlin"
    monkeypatch.setenv("MOEDOCTOR_FIXES_OPTIONAL", "1")
    assert moe_backend(arguments(quantization="modelopt_fp4")) == "auto"
    assert any("left out: backend: " in line and words in line for line in caplog.messages)


def test_a_failure_while_honouring_stops_the_engine(stub, monkeypatch, caplog, capsys):
    def broken(config: Any) -> bool:
        raise KeyError("quantization")

    monkeypatch.setattr(backend_fix, "is_nvfp4", broken)
    arguments = stub()(quantization="modelopt_fp4")
    with pytest.raises(SystemExit):
        arguments.create_engine_config()
    (line,) = capsys.readouterr().err.splitlines()
    assert "backend is refused: VLLM_NVFP4_MOE_BACKEND could not be honored: KeyError" in line
    monkeypatch.setenv("MOEDOCTOR_FIXES_OPTIONAL", "1")
    assert moe_backend(arguments) == "auto"
    assert any("could not be honored: KeyError" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("quantization", "described", "nvfp4"),
    [
        ("modelopt_fp4", None, True),
        ("modelopt_mixed", {"layers": {"a": "NVFP4"}}, True),
        ("compressed-tensors", {"format": "nvfp4-pack-quantized"}, True),
        (None, None, False),
        ("fp8", {"quant_method": "fp8"}, False),
        ("mxfp4", {"quant_method": "mxfp4"}, False),
    ],
)
def test_which_models_are_nvfp4(quantization: str | None, described: Any, nvfp4: bool) -> None:
    hf_config = types.SimpleNamespace(quantization_config=described)
    model = types.SimpleNamespace(quantization=quantization, hf_config=hf_config)
    assert backend_fix.is_nvfp4(model) is nvfp4
    assert not backend_fix.is_nvfp4(None)
