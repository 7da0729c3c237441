"""The speed of the expert cache, measured end to end by Triton's interpreter in the place of a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


@pytest.mark.parametrize("check", ["one", "eight", "wrong"])
def test_interpreted(check: str) -> None:
    script = Path(__file__).parent / "interpreted_speed.py"
    path = os.pathsep.join([str(script.parent.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), check],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
