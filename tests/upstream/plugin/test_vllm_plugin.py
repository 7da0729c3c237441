"""The plug-in inside a stub of vLLM: inactive by default, applied once, and never in the way."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_stub import FILES, forget, write

from moedoctor.upstream.plugin import backend_fix
from moedoctor.upstream.plugin import register as vllm_plugin
from moedoctor.upstream.plugin.register import FixError, expect, known_releases, replace_once

VARIABLE = "VLLM_NVFP4_MOE_BACKEND"
ORACLE = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(vllm_plugin.VARIABLE, raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    vllm_plugin._register.cache_clear()
    forget()
    yield
    vllm_plugin._register.cache_clear()
    forget()


def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str = "0.21.0", **replaced: str) -> Any:
    """`EngineArgs` of a stub of this release, which `import vllm` now finds."""
    monkeypatch.syspath_prepend(str(write(tmp_path, version, **replaced)))
    return importlib.import_module("vllm.engine.arg_utils").EngineArgs


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "vllm.moedoctor"]


def test_nothing_happens_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub(tmp_path, monkeypatch)
    original = arguments.create_engine_config
    monkeypatch.setenv(VARIABLE, "MARLIN")
    for value in (None, "", " , "):
        if value is not None:
            monkeypatch.setenv(vllm_plugin.VARIABLE, value)
        vllm_plugin.register()
    assert arguments.create_engine_config is original
    assert messages(caplog) == []


@pytest.mark.parametrize("version", known_releases())
@pytest.mark.parametrize("described", [{"quant_algo": "NVFP4"}, {"format": "nvfp4-pack-quantized"}])
def test_the_variable_is_honoured_in_every_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, described: dict[str, str]
) -> None:
    arguments = stub(tmp_path, monkeypatch, version)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    monkeypatch.setenv(VARIABLE, "MARLIN")
    vllm_plugin.register()
    config = arguments(described=described).create_engine_config(headless=True)
    assert config.kernel_config.moe_backend == "marlin"


def test_it_is_applied_once_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub(tmp_path, monkeypatch)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "all")
    monkeypatch.setenv(VARIABLE, "MARLIN")
    with caplog.at_level(logging.INFO, "vllm.moedoctor"):
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
def test_reasons_are_logged_where_upstream_hides_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    stub(tmp_path, monkeypatch)
    if before:
        importlib.import_module(ORACLE)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    vllm_plugin.register()
    vllm_plugin._register.cache_clear()
    vllm_plugin.register()
    assert (ORACLE in sys.modules) is before, "engines import it where a model is built"
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


def test_the_flag_and_other_models_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub(tmp_path, monkeypatch)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    monkeypatch.setenv(VARIABLE, "MARLIN")
    with caplog.at_level(logging.INFO, "vllm.moedoctor"):
        vllm_plugin.register()
        flagged = arguments(quantization="modelopt_fp4", moe_backend="cutlass").create_engine_config()
        other = arguments(quantization="fp8").create_engine_config()
        none = arguments().create_engine_config()
        mine = arguments(quantization="modelopt_fp4").create_engine_config()
    chosen = [config.kernel_config.moe_backend for config in (flagged, other, none, mine)]
    assert chosen == ["cutlass", "auto", "auto", "marlin"]
    assert any("gives way to moe_backend=cutlass" in line for line in messages(caplog))
    assert any("is not NVFP4" in line for line in messages(caplog))


@pytest.mark.parametrize(
    ("hidden_act", "selected", "without"),
    [("silu", "FLASHINFER_CUTLASS", "would work"), ("relu2", "FLASHINFER_CUTLASS", "without a gate")],
)
def test_where_the_variable_decides_the_reasons_are_those_of_the_tables(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hidden_act: str,
    selected: str,
    without: str,
) -> None:
    arguments = stub(tmp_path, monkeypatch, "0.18.0")
    platform = types.SimpleNamespace(get_device_capability=lambda: (12, 0))
    monkeypatch.setattr(importlib.import_module("vllm.platforms"), "_current_platform", platform)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    monkeypatch.setenv(VARIABLE, "MARLIN")
    with caplog.at_level(logging.INFO, "vllm.moedoctor"):
        vllm_plugin.register()
        made = arguments(quantization="modelopt_fp4")
        made.hidden_act, made.parallel = hidden_act, types.SimpleNamespace()
        made.create_engine_config()
    lines = messages(caplog)
    assert f"moedoctor: by itself vLLM would select {selected} on compute capability 12.0" in lines
    (cutlass,) = [line for line in lines if line.startswith("moedoctor: VLLM_CUTLASS: ")]
    assert without in cutlass


def test_a_gpu_that_cannot_be_told_costs_the_reasons_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub(tmp_path, monkeypatch)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    monkeypatch.setenv(VARIABLE, "MARLIN")
    with caplog.at_level(logging.INFO, "vllm.moedoctor"):
        vllm_plugin.register()
        config = arguments(quantization="modelopt_fp4").create_engine_config()
    assert config.kernel_config.moe_backend == "marlin"
    assert not any("by itself" in line or "could not" in line for line in messages(caplog))


def test_a_value_that_the_release_does_not_have_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub(tmp_path, monkeypatch)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    monkeypatch.setenv(VARIABLE, "HUMMING")
    vllm_plugin.register()
    config = arguments(quantization="modelopt_fp4").create_engine_config()
    assert config.kernel_config.moe_backend == "auto"
    assert any("0.21.0 has no such NVFP4 MoE backend; it has cutlass" in line for line in messages(caplog))


def test_backends_that_the_engine_must_know_of_earlier_are_left_to_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub(tmp_path, monkeypatch, "0.33.0")
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    monkeypatch.setenv(VARIABLE, "FLASHINFER_MOE_EP_CUTEDSL")
    vllm_plugin.register()
    config = arguments(quantization="modelopt_fp4").create_engine_config()
    assert config.kernel_config.moe_backend == "auto"
    assert any("ask with --moe-backend flashinfer_moe_ep_cutedsl" in line for line in messages(caplog))


def test_a_release_that_is_not_known_is_left_alone_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub(tmp_path, monkeypatch, "0.99.0")
    original = arguments.create_engine_config
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    for _ in range(3):
        vllm_plugin.register()
    assert arguments.create_engine_config is original
    (line,) = messages(caplog)
    assert line == (
        "moedoctor: vLLM 0.99.0 is none of the releases that the fixes know (0.17.1 to 0.33.0); "
        "nothing is changed"
    )


@pytest.mark.parametrize(
    ("replaced", "reason"),
    [
        (FILES["vllm/engine/arg_utils.py"].replace("headless=False", "quiet=False"), "takes no headless"),
        (
            FILES["vllm/engine/arg_utils.py"].replace("= self.moe_backend\n", "= str(self.moe_backend)\n"),
            "does not hold",
        ),
        ("class EngineArgs:\n    pass\n", "there is no EngineArgs.create_engine_config"),
        ("raise RuntimeError('broken')\n", "RuntimeError: broken"),
    ],
)
def test_a_vllm_that_is_not_what_its_version_says_is_left_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    replaced: str,
    reason: str,
) -> None:
    monkeypatch.syspath_prepend(str(write(tmp_path, "0.21.0", arg_utils=replaced)))
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    vllm_plugin.register()
    (warning,) = messages(caplog)
    assert reason in warning
    assert "the fix backend is not applied to vLLM 0.21.0" in warning
    module: Any = importlib.import_module(ORACLE)
    assert not isinstance(module.logger, backend_fix.LouderLogger)


def test_unknown_names_of_fixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub(tmp_path, monkeypatch)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backends,backend,BACKEND, nonsense")
    with caplog.at_level(logging.INFO, "vllm.moedoctor"):
        vllm_plugin.register()
    lines = messages(caplog)
    assert "names no fix called backends; expected backend" in lines[0]
    assert "nonsense" in lines[1]
    assert len(lines) == 3


def test_it_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")

    def broken() -> str:
        raise RuntimeError("no metadata")

    monkeypatch.setattr(vllm_plugin, "installed_version", broken)
    vllm_plugin.register()
    assert messages(caplog) == ["moedoctor: no fix is active: RuntimeError: no metadata"]


def test_a_failure_while_honouring_leaves_the_configuration_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = stub(tmp_path, monkeypatch)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "backend")
    monkeypatch.setenv(VARIABLE, "MARLIN")
    vllm_plugin.register()

    def broken(config: Any) -> bool:
        raise KeyError("quantization")

    monkeypatch.setattr(backend_fix, "is_nvfp4", broken)
    assert arguments(quantization="modelopt_fp4").create_engine_config().kernel_config.moe_backend == "auto"
    assert any("could not be honoured: KeyError" in line for line in messages(caplog))


def test_what_counts_as_nvfp4() -> None:
    def model(quantization: str | None, described: Any) -> Any:
        return types.SimpleNamespace(
            quantization=quantization, hf_config=types.SimpleNamespace(quantization_config=described)
        )

    yes = [
        ("modelopt_fp4", None),
        ("modelopt_mixed", {"layers": {"a": "NVFP4"}}),
        ("compressed-tensors", {"format": "nvfp4-pack-quantized"}),
    ]
    no = [(None, None), ("fp8", {"quant_method": "fp8"}), ("mxfp4", {"quant_method": "mxfp4"})]
    assert all(backend_fix.is_nvfp4(model(*described)) for described in yes)
    assert not any(backend_fix.is_nvfp4(model(*described)) for described in no)
    assert not backend_fix.is_nvfp4(None)


def test_replacing_and_expecting() -> None:
    owner = types.SimpleNamespace(function=known_releases)
    assert replace_once(owner, "function", lambda original: lambda: ("changed", *original()))
    changed = owner.function
    assert changed()[0] == "changed"
    assert not replace_once(owner, "function", lambda original: None)
    assert owner.function is changed
    assert (
        expect(owner, "function", (), ("backend_tables",)) is changed
    )  # what was changed by us is still known
    with pytest.raises(FixError, match="there is no"):
        expect(owner, "nothing", (), ())
    with pytest.raises(FixError, match="cannot be read"):
        expect(types.SimpleNamespace(built_in=len), "built_in", (), ("x",))
