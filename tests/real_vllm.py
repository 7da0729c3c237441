"""Runs code with the installed vLLM in a process of its own, for tests marked `upstream`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def ask_child(code: str, *arguments: str, **environ: str) -> tuple[Any, list[str]]:
    """Return what `code` prints as JSON after ``ANSWER``, and the lines of both outputs."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environ},
        check=False,
    )
    lines = (done.stdout + done.stderr).splitlines()
    answer = next((line for line in lines if line.startswith("ANSWER ")), None)
    assert answer is not None, done.stderr[-3000:]
    return json.loads(answer.removeprefix("ANSWER ")), lines
