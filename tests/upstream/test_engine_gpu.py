"""Real engines: what only a GPU with an installed vLLM shows. About two minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moedoctor.faults.offload_engine import COPIES, ON_GPU, UVA, Cell, evidence, request
from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.upstream.engine import run_engines

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]


def run(folder: Path, *cells: Cell) -> dict[str, str]:
    """Outcome of each cell."""
    requests = [request(one, str(folder)) for one in cells]
    rows = evidence(cells, run_engines(requests, parallel=6))["table"]
    return {f"{row['mode']}, {row['experts']}": row["outcome"] for row in rows}


@pytest.mark.parametrize(("fixes", "outcome"), [("", "crash 2"), ("offload", "same tokens")])
def test_marlin_without_uva(tmp_path: Path, fixes: str, outcome: str) -> None:
    folder = write_qwen3_moe(tmp_path / "model", scheme="nvfp4")
    places = (ON_GPU, UVA, COPIES)
    seen = run(folder, *(Cell("NVFP4 MARLIN", "eager", place, fixes) for place in places))
    assert seen == {
        f"eager, {ON_GPU}": "control",
        f"eager, {UVA}": "same tokens",
        f"eager, {COPIES}": outcome,
    }
