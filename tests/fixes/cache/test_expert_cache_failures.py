"""The engine ``device`` of the expert cache when a call fails or another call comes between."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.interpreted import run_check

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


def test_interpreted() -> None:
    run_check(Path(__file__).parent / "interpreted_expert_cache.py")
