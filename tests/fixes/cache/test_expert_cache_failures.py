"""The engine ``device`` of the expert cache where a call breaks off or another one comes between."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.interpreted import run_check

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


@pytest.mark.parametrize("check", ["broken", "broken_twice", "policies", "between"])
def test_interpreted(check: str) -> None:
    run_check(Path(__file__).parent / "interpreted_expert_cache.py", check)
