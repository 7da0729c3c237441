"""The report at exit, in processes that really end: started, forked and spawned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreted import ROOT
from tests.upstream.plugin.nan_stub import write_stub


@pytest.mark.parametrize(
    ("how", "printing"), [("run", 0), ("fork", 1), ("fork again", 1), ("spawn", 1), ("inherit", 0)]
)
def test_the_process_that_ran_prints_once(tmp_path: Path, how: str, printing: int) -> None:
    write_stub(tmp_path)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "exiting_trace.py"), str(tmp_path), how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    started = [line.split()[1] for line in done.stdout.splitlines()]
    assert len(started) == (1 if how == "run" else 2)
    assert done.stderr.count("NaN trace of process") == 1, done.stderr
    assert f"NaN trace of process {started[printing]}\n" in done.stderr
    assert "first in padding: NaN at layers.0.attn, step 1" in done.stderr
    assert "repeated ids (0, 1, 0)" in done.stderr
