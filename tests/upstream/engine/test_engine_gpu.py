"""Real engines: what only a GPU with an installed vLLM shows. About two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.faults.offload.parity_engines import compare, own_request
from moedoctor.faults.offload.parity_engines_judge import ParityParameters, judge_model
from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.reference.tiny_tokenizer import write_tokenizer
from moedoctor.results import CaseVerdict
from moedoctor.upstream.engine.engine import run_engines
from moedoctor.upstream.engine.offload_cells import COPIES, ON_GPU, UVA, Cell, request
from moedoctor.upstream.engine.offload_engine import evidence

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


def test_the_first_wrong_layer_of_ones_own_model_is_named(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name in tensors:
            if "layers.2.mlp" in name and name.endswith("down_proj.weight_scale_2"):
                tensors[name] = tensors[name] * 16

    sizes = '{"max_model_len": 64, "kv_cache_memory_bytes": 67108864, "gpu_memory_utilization": 0.05}'
    requests = []
    for name, change, offload in (("right", None, False), ("wrong", spoil, True)):
        folder = write_qwen3_moe(tmp_path / name, scheme="nvfp4", layers=4, change=change)
        write_tokenizer(folder, 512)
        parameters = ParityParameters(
            mode="eager", model=str(folder), prompt="t265 t511 t43 t73 t395", max_tokens=6, arguments=sizes
        )
        requests.append(own_request(parameters, offload=offload, fixes=""))
    seen = compare(*run_engines(requests), parameters)
    assert seen["layers_compared"] == 4
    assert (seen["first_bit"], seen["first_layer"]) == ("model.layers.2", "model.layers.2")
    judged = judge_model(seen)
    assert judged.verdict is CaseVerdict.REPRODUCED
    assert "model.layers.2" in judged.figure
