"""The plug-in inside a stub of vLLM: inactive by default, applied once, and never raises."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_stub import FILES, forget, write

from moedoctor.upstream.plugin import backend_fix
from moedoctor.upstream.plugin import register as vllm_plugin
from moedoctor.upstream.plugin.register import FixError, expect, known_releases, replace_once

VARIABLE = "VLLM_NVFP4_MOE_BACKEND"
ORACLE = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"
ARGUMENTS = FILES["vllm/engine/arg_utils.py"]
Stub = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.delenv(vllm_plugin.VARIABLE, raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    vllm_plugin._register.cache_clear()
    forget()
    with caplog.at_level(logging.INFO, "vllm.moedoctor"):
        yield
    vllm_plugin._register.cache_clear()
    forget()


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Return `EngineArgs` of a stub of a release, which `import vllm` now finds, with the variables set."""

    def make(version: str = "0.21.0", fixes: str | None = "backend", backend: str | None = "MARLIN") -> Any:
        monkeypatch.syspath_prepend(str(write(tmp_path, version)))
        for name, value in ((vllm_plugin.VARIABLE, fixes), (VARIABLE, backend)):
            if value is not None:
                monkeypatch.setenv(name, value)
        return importlib.import_module("vllm.engine.arg_utils").EngineArgs

    return make


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "vllm.moedoctor"]


def moe_backend(arguments: Any) -> str:
    backend: str = arguments.create_engine_config().kernel_config.moe_backend
    return backend


@pytest.mark.parametrize("value", [None, "", " , "])
def test_the_plug_in_is_inactive_by_default(
    stub: Stub, caplog: pytest.LogCaptureFixture, value: str | None
) -> None:
    arguments = stub(fixes=value)
    original = arguments.create_engine_config
    vllm_plugin.register()
    assert arguments.create_engine_config is original
    assert messages(caplog) == []


@pytest.mark.parametrize("version", known_releases())
def test_the_variable_is_honoured_in_every_release(stub: Stub, version: str) -> None:
    arguments = stub(version)
    vllm_plugin.register()
    config = arguments(described={"quant_algo": "NVFP4"}).create_engine_config(headless=True)
    assert config.kernel_config.moe_backend == "marlin"


def test_the_plug_in_is_applied_and_logged_once(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    arguments = stub(fixes="all")
    vllm_plugin.register()
    once = arguments.create_engine_config
    vllm_plugin.register()
    vllm_plugin._register.cache_clear()  # as if another process had loaded it again
    vllm_plugin.register()
    assert arguments.create_engine_config is once
    active = [line for line in messages(caplog) if "active in vLLM 0.21.0" in line]
    assert len(active) == 2  # one a `process`
    assert "backend (MARLIN for NVFP4 MoE" in active[0]


@pytest.mark.parametrize("before", [True, False])
def test_hidden_reasons_of_upstream_are_logged(stub: Stub, before: bool) -> None:
    stub(backend=None)
    if before:
        importlib.import_module(ORACLE)
    vllm_plugin.register()
    vllm_plugin._register.cache_clear()
    vllm_plugin.register()
    assert (ORACLE in sys.modules) is before, "engines import it when a model is built"
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
    vllm_plugin.register()
    assert moe_backend(arguments(quantization="modelopt_fp4", moe_backend="cutlass")) == "cutlass"
    assert moe_backend(arguments(quantization="fp8")) == "auto"
    assert moe_backend(arguments()) == "auto"
    assert moe_backend(arguments(quantization="modelopt_fp4")) == "marlin"
    assert any("gives way to moe_backend=cutlass" in line for line in messages(caplog))
    assert any("is not NVFP4" in line for line in messages(caplog))


@pytest.mark.parametrize(("hidden_act", "cutlass"), [("silu", "would work"), ("relu2", "without a gate")])
def test_if_the_variable_decides_the_reasons_are_those_of_the_tables(
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hidden_act: str,
    cutlass: str,
) -> None:
    arguments = stub("0.18.0")(quantization="modelopt_fp4")
    platform = types.SimpleNamespace(get_device_capability=lambda: (12, 0))
    monkeypatch.setattr(importlib.import_module("vllm.platforms"), "_current_platform", platform)
    vllm_plugin.register()
    arguments.hidden_act, arguments.parallel = hidden_act, types.SimpleNamespace()
    arguments.create_engine_config()
    lines = messages(caplog)
    selected = "by itself vLLM would select FLASHINFER_CUTLASS on compute capability 12.0"
    assert f"moedoctor: {selected}" in lines
    (line,) = [line for line in lines if line.startswith("moedoctor: VLLM_CUTLASS: ")]
    assert cutlass in line


def test_without_a_known_gpu_only_the_reasons_are_missing(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub()
    vllm_plugin.register()
    assert moe_backend(arguments(quantization="modelopt_fp4")) == "marlin"
    assert not any("by itself" in line or "could not" in line for line in messages(caplog))


@pytest.mark.parametrize(
    ("version", "backend", "warning"),
    [
        ("0.21.0", "HUMMING", "0.21.0 has no such NVFP4 MoE backend; it has cutlass"),
        # The engine must know of this backend before its parallel settings are made.
        ("0.33.0", "FLASHINFER_MOE_EP_CUTEDSL", "ask with --moe-backend flashinfer_moe_ep_cutedsl"),
    ],
)
def test_a_value_without_effect_gives_a_warning(
    stub: Stub, caplog: pytest.LogCaptureFixture, version: str, backend: str, warning: str
) -> None:
    arguments = stub(version, backend=backend)
    vllm_plugin.register()
    assert moe_backend(arguments(quantization="modelopt_fp4")) == "auto"
    assert any(warning in line for line in messages(caplog))


def test_an_unknown_release_is_left_unchanged_with_a_warning(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub("0.99.0")
    original = arguments.create_engine_config
    for _ in range(3):
        vllm_plugin.register()
    assert arguments.create_engine_config is original
    assert messages(caplog) == [
        "moedoctor: vLLM 0.99.0 is none of the releases that the fixes know (0.17.1 to 0.33.0); "
        "nothing is changed"
    ]


@pytest.mark.parametrize(
    ("arg_utils", "reason"),
    [
        (ARGUMENTS.replace("headless=False", "quiet=False"), "takes no headless"),
        (ARGUMENTS.replace("= self.moe_backend\n", "= str(self.moe_backend)\n"), "does not hold"),
        ("class EngineArgs:\n    pass\n", "there is no EngineArgs.create_engine_config"),
        ("raise RuntimeError('broken')\n", "RuntimeError: broken"),
    ],
)
def test_a_vllm_that_does_not_match_its_version_is_left_unchanged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arg_utils: str,
    reason: str,
) -> None:
    monkeypatch.syspath_prepend(str(write(tmp_path, "0.21.0", arg_utils=arg_utils)))
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    vllm_plugin.register()
    (warning,) = messages(caplog)
    assert reason in warning
    assert "the fix backend is not applied to vLLM 0.21.0" in warning
    module: Any = importlib.import_module(ORACLE)
    assert not isinstance(module.logger, backend_fix.LouderLogger)


def test_unknown_names_of_fixes(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    stub(fixes="backends,backend,BACKEND, nonsense", backend=None)
    vllm_plugin.register()
    first, second, active = messages(caplog)
    assert "names no fix called backends; expected backend" in first
    assert "nonsense" in second
    assert "active in" in active


def test_it_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")

    def broken() -> str:
        raise RuntimeError("no metadata")

    monkeypatch.setattr(vllm_plugin, "installed_version", broken)
    vllm_plugin.register()
    assert messages(caplog) == ["moedoctor: no fix is active: RuntimeError: no metadata"]


def test_a_failure_while_honouring_leaves_the_configuration_as_it_is(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub()
    vllm_plugin.register()

    def broken(config: Any) -> bool:
        raise KeyError("quantization")

    monkeypatch.setattr(backend_fix, "is_nvfp4", broken)
    assert moe_backend(arguments(quantization="modelopt_fp4")) == "auto"
    assert any("could not be honoured: KeyError" in line for line in messages(caplog))


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


def test_replacing_and_expecting() -> None:
    owner = types.SimpleNamespace(function=known_releases)
    assert replace_once(owner, "function", lambda original: lambda: ("changed", *original()))
    changed = owner.function
    assert changed()[0] == "changed"
    assert not replace_once(owner, "function", lambda original: None)
    assert owner.function is changed
    assert expect(owner, "function", (), ("backend_tables",)) is changed, "our own change is seen through"
    with pytest.raises(FixError, match="there is no"):
        expect(owner, "nothing", (), ())
    with pytest.raises(FixError, match="cannot be read"):
        expect(types.SimpleNamespace(built_in=len), "built_in", (), ("x",))
