"""The fix `backend` in a stub and in a real vLLM: the variable is honored, and vLLM's reasons are logged."""

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from vllm_stub import write

from moedoctor.plugin import backend_fix
from moedoctor.plugin.register import list_known_releases, register
from moedoctor.reference.checkpoints import Scheme, write_qwen3_moe
from tests.real_vllm import ask_child

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
def test_the_variable_is_honored_in_every_release(stub, caplog, version):
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
    lines = "since it does not fit", "Using 'MARLIN'"
    assert module.logger.said == [("info", line, "local") for line in lines]


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
def test_a_name_that_cannot_be_honored_stops_the_engine_unless_the_fix_is_optional(
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


def test_a_failure_while_honoring_stops_the_engine(stub, monkeypatch, caplog, capsys):
    monkeypatch.setattr(backend_fix, "is_nvfp4", Mock(side_effect=KeyError("quantization")))
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


CODE = """
import json, sys
from moedoctor.upstream.selection.oracle import Layer, Oracle
oracle = Oracle()
oracle.substitute.use((12, 0))
from moedoctor.plugin.register import register
register()
from vllm.engine.arg_utils import EngineArgs
arguments = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=256)
config = arguments.create_engine_config()
asked = oracle.ask((12, 0), Layer("nvfp4", "silu", moe_backend=config.kernel_config.moe_backend))
automatic = oracle.ask((12, 0), Layer("nvfp4", "silu"))
print("\\nANSWER " + json.dumps([config.kernel_config.moe_backend, asked.chosen, automatic.chosen]))
"""


def configured(folder: Path, scheme: Scheme = "nvfp4", **environ: str) -> tuple[str, str, str, list[str]]:
    """Return (moe_backend, its selection, the selection without it, the lines of the log)."""
    answer, lines = ask_child(CODE, str(write_qwen3_moe(folder, scheme=scheme)), **environ)
    return (*answer, lines)


@pytest.mark.upstream
def test_the_variable_is_honored_and_the_reasons_are_logged(tmp_path: Path) -> None:
    environ = {"MOEDOCTOR_FIXES": "backend", "VLLM_NVFP4_MOE_BACKEND": "MARLIN"}
    moe_backend, asked, automatic, lines = configured(tmp_path, **environ)
    assert (moe_backend, asked) == ("marlin", "MARLIN")
    assert automatic != "MARLIN"
    reasons = [line for line in lines if "FLASHINFER_TRTLLM" in line and "does not support" in line]
    assert reasons, "what vLLM itself says where it selects automatically"
    assert all("DEBUG" not in line for line in reasons)
    assert any("by itself vLLM would select FLASHINFER_CUTLASS" in line for line in lines)
    assert any("FLASHINFER_TRTLLM: has no kernel for compute capability 12.0" in line for line in lines)


@pytest.mark.upstream
def test_nothing_changes_without_the_fix(tmp_path: Path) -> None:
    moe_backend, _, automatic, lines = configured(tmp_path, VLLM_NVFP4_MOE_BACKEND="MARLIN")
    assert (moe_backend, automatic != "MARLIN") == ("auto", True)
    assert not any("kernel does not support" in line for line in lines)
    assert any("VLLM_NVFP4_MOE_BACKEND" in line and "Unknown" in line for line in lines)


@pytest.mark.upstream
def test_other_models_are_left_alone(tmp_path: Path) -> None:
    moe_backend, *_ = configured(tmp_path, "bf16", MOEDOCTOR_FIXES="backend", VLLM_NVFP4_MOE_BACKEND="MARLIN")
    assert moe_backend == "auto"
