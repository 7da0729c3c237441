"""The fix `backend` inside a real vLLM: its own engine configuration and its own selection, without a GPU."""

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
