"""Runs scripts of kernel checks in Triton's interpreter, each in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


def run_check(script: str | Path, *arguments: str) -> str:
    """Run `script` of ``tests/`` and return its output; fail with the end of its errors."""
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore::RuntimeWarning",
            str(ROOT / "tests" / "interpret.py"),
            str(ROOT / "tests" / script),
            *arguments,
        ],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
