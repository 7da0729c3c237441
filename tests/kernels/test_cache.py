"""The expert cache's kernels in Triton's interpreter, against the engine ``host`` and the reference."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.interpreted import run_check

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param("stateful many_ids packed packed_exponents mapped early", marks=pytest.mark.slow),
        pytest.param("forward grouped overlapping", marks=pytest.mark.slow),
        "wrong_ids",
        "padding",
        pytest.param("one_expert_or_slot", marks=pytest.mark.slow),
    ],
)
def test_interpreted(checks: str) -> None:
    run_check(Path(__file__).parent / "interpreted_cache.py", *checks.split())
