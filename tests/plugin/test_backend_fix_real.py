"""The fix `backend` inside a real vLLM: its own engine configuration and its own selection, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moedoctor.reference.checkpoints import Scheme, write_qwen3_moe
from tests.real_vllm import ask_child

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
ENGINE = """
import sys
from vllm import LLM
LLM(
    model=sys.argv[1],
    skip_tokenizer_init=True,
    enforce_eager=True,
    max_model_len=256,
    gpu_memory_utilization=0.05,
)
"""


def configured(folder: Path, scheme: Scheme = "nvfp4", **environ: str) -> tuple[str, str, str, list[str]]:
    """Return (moe_backend, its selection, the selection without it, the lines of the log)."""
    (moe_backend, asked, automatic), lines = ask_child(
        CODE, str(write_qwen3_moe(folder, scheme=scheme)), **environ
    )
    return moe_backend, asked, automatic, lines


@pytest.mark.upstream
def test_the_variable_is_honoured_and_the_reasons_are_logged(tmp_path: Path) -> None:
    moe_backend, asked, automatic, lines = configured(
        tmp_path, MOEDOCTOR_FIXES="backend", VLLM_NVFP4_MOE_BACKEND="MARLIN"
    )
    assert (moe_backend, asked) == ("marlin", "MARLIN")
    assert automatic != "MARLIN"
    reasons = [line for line in lines if "FLASHINFER_TRTLLM" in line and "does not support" in line]
    assert reasons, "what vLLM itself says where it selects automatically"
    assert all("DEBUG" not in line for line in reasons)
    assert any(
        "by itself vLLM would select FLASHINFER_CUTLASS on compute capability 12.0" in line for line in lines
    )
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


@pytest.mark.gpu
@pytest.mark.upstream
@pytest.mark.parametrize(("asked_for", "selected"), [("EMULATION", "EMULATION"), (None, "(MARLIN|HUMMING)")])
def test_a_real_engine_takes_what_the_variable_names(
    tmp_path: Path, asked_for: str | None, selected: str
) -> None:
    """On a GPU without FP4 arithmetic MARLIN or HUMMING comes first; EMULATION exists from 0.20.0 on."""
    write_qwen3_moe(tmp_path, scheme="nvfp4")
    asked = {"VLLM_NVFP4_MOE_BACKEND": asked_for} if asked_for else {}
    without = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", ENGINE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "MOEDOCTOR_FIXES": "backend", **without, **asked},
        check=False,
    )
    log = ended.stdout + ended.stderr
    assert ended.returncode == 0, log[-6000:]
    assert re.search(f"Using '{selected}' NvFp4 MoE backend", log), log[-3000:]
    # The reasons: vLLM's own, at DEBUG otherwise, or those of the tables where the variable decides.
    assert ("has no kernel for compute capability" if asked_for else "kernel does not support") in log
