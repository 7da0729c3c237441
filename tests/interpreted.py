"""Runs scripts of kernel checks in Triton's interpreter, in a process of their own."""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes_seen import run

ROOT = Path(__file__).resolve().parent.parent

has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="needs Triton: pip install triton")


def run_check(script: str | Path, *arguments: str) -> None:
    """Run one script of ``tests/``; fail with the end of its errors."""
    run_checks((str(script), *arguments))


def run_checks(*checks: Sequence[str]) -> None:
    """Run scripts of ``tests/``, each with its arguments; fail with the end of their errors.

    They share one process, because most of them take less time than the imports of torch and Triton.
    """
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    scripts = json.dumps([[str(ROOT / "tests" / script), *arguments] for script, *arguments in checks])
    python = [sys.executable, "-W", "ignore::RuntimeWarning", str(ROOT / "tests" / "interpret.py")]
    done = run([*python, scripts], env=os.environ | {"PYTHONPATH": path}, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
