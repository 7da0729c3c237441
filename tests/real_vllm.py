"""Runs code with the installed vLLM in a process of its own, for tests marked `upstream`."""

import importlib.metadata
import json
import os
import sys
from typing import Any

import pytest

from moedoctor.plugin.extensions import Extension, Need
from tests.processes_seen import run

WITHOUT_GPU = """
import types
import torch
from moedoctor.upstream.selection.substitute import install
install().use((9, 0))
from vllm import triton_utils
# Without a GPU vLLM has a stand-in for Triton, in which a configuration is a function.
triton_utils.triton.Config = lambda *given, **named: types.SimpleNamespace(num_stages=1)
from vllm.engine.arg_utils import EngineArgs  # runs the plug-in
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state

parallel_state._TP = types.SimpleNamespace(world_size=1, rank_in_group=0)
"""
"""The beginning of code that makes layers of vLLM on the CPU, as for a GPU of compute capability 9.0."""


def ask_child(code: str, *arguments: str, **environ: str) -> tuple[Any, list[str]]:
    """Return what `code` prints as JSON after ``ANSWER``, and the lines of both outputs."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", **environ}
    done = run([sys.executable, "-c", code, *arguments], env=environ, timeout=1200)
    lines = (done.stdout + done.stderr).splitlines()
    answer = next((line for line in lines if line.startswith("ANSWER ")), None)
    assert answer is not None, done.stderr[-3000:]
    return json.loads(answer.removeprefix("ANSWER ")), lines


def read_release() -> str:
    """Return the installed release."""
    return importlib.metadata.version("vllm").partition("+")[0]


def skip_unless_made_for(extension: Extension) -> None:
    """Skip the test if a fix or a trace is not made for the installed release."""
    need, reason = extension.need(read_release())
    if need is not Need.MADE_FOR:
        pytest.skip(f"{reason}; {read_release()} is installed")
