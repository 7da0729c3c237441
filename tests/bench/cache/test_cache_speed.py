"""The speed of the expert cache, measured end to end by Triton's interpreter in the place of a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.interpreted import run_check

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


@pytest.mark.parametrize("check", ["one", "eight", "wrong"])
def test_interpreted(check: str) -> None:
    run_check(Path(__file__).parent / "interpreted_speed.py", check)
