"""What is made of engines with an expert cache: their requests, the table, and the probes on a stand-in."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.results import Death
from moedoctor.subjects.base import UnavailableError
from moedoctor.upstream import expert_cache_engine as engines
from moedoctor.upstream import expert_cache_probes as probes
from moedoctor.upstream import expert_cache_shape as shape
from moedoctor.upstream.engine import EngineError, EngineResult
from moedoctor.upstream.engine_log import LogFacts
from moedoctor.upstream.expert_cache_engine import Cell
from moedoctor.upstream.expert_cache_layer import install
from tests.upstream.test_expert_cache_fix import HIDDEN, Layer, call
from tests.upstream.test_expert_cache_fix import E as EXPERTS

STEP = ({"7": -0.1, "8": -3.0},)
SEEN = {"engine": "device", "layers": 2, "hits": 3, "misses": 4}


def result(tokens: tuple[int, ...] = (7, 9), *, probe: Any = None, **given: Any) -> EngineResult:
    return EngineResult("", (tokens,), logprobs=(STEP,), probe=probe or SEEN, **given)


def failed(message: str, *logged: str) -> EngineResult:
    error = EngineError("RuntimeError", message, "load", Death.EXCEPTION)
    return EngineResult("", error=error, log=LogFacts(refused=logged))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    found = {"count": 1}
    for module in (engines, shape):
        monkeypatch.setattr(module, "need_engine", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found["count"])
    return found


def test_every_backend_runs_without_a_cache_and_with_one() -> None:
    chosen = engines.cells()
    assert len(chosen) == len(set(chosen)) == 4 * 2 * 3
    assert all(one.control in chosen for one in chosen)
    control, cached = (engines.request(Cell("FP8 MARLIN", engines.GRAPHS, one), "x") for one in (None, 6))
    assert (control.environ["MOEDOCTOR_FIXES"], cached.environ["MOEDOCTOR_FIXES"]) == ("", "expert_cache")
    assert cached.environ["MOEDOCTOR_EXPERT_CACHE"] == "6"
    assert (cached.arguments, cached.prompts) == (control.arguments, control.prompts)
    assert cached.arguments["moe_backend"] == "marlin"


@pytest.mark.parametrize(
    ("cached", "control", "outcome", "detail"),
    [
        (result(), result(), "same tokens", "same logprobs"),
        (result((7, 8)), result(), "other tokens", "prompt 1, token 2: 8, not 9"),
        (failed("broken"), result(), "crash", "RuntimeError: broken"),
        (result(), failed("broken"), "no control", "RuntimeError: broken"),
    ],
)
def test_what_becomes_of_an_engine(
    cached: EngineResult, control: EngineResult, outcome: str, detail: str
) -> None:
    cell = Cell("BF16 TRITON", engines.EAGER, 2)
    (row,) = engines.table({cell.control: control, cell: cached})
    assert (row["outcome"], row["detail"], row["slots"]) == (outcome, detail, 2)
    assert row["misses"] == (None if outcome == "crash" else 4)


def test_refusals_need_the_reason(gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    said = "MOEDOCTOR_EXPERT_CACHE=4: a: m computes with X; expected --moe-backend triton or marlin"
    few = "MOEDOCTOR_EXPERT_CACHE=1: a: 1 slots hold fewer experts than one token needs (top_k 2)"

    def run(requests: Any, parallel: int) -> list[EngineResult]:
        assert len(requests) == 2 + gpus["count"]
        spread = failed("worker died", "experts are spread over several GPUs MOEDOCTOR_EXPERT_CACHE")
        return [failed(few), failed(f"x\n{said}"), result(), spread][: len(requests)]

    monkeypatch.setattr(engines, "run_engines", run)
    assert [row["refused"] for row in engines.refusals({})] == [True, True, False, None]
    gpus["count"] = 2
    assert [row["refused"] for row in engines.refusals({})] == [True, True, False, True]


def test_memory_is_what_the_profile_says(gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(request: Any) -> EngineResult:
        document = json.loads((Path(request.model) / "config.json").read_text())
        assert document["num_hidden_layers"] == 4
        assert document["head_dim"] == 128
        assert request.arguments["kv_cache_memory_bytes"] is None, "it would take the place of the profile"
        asked.append(request.environ["MOEDOCTOR_EXPERT_CACHE"])
        return result(probe={"kv_cache_bytes": 5, "saved_bytes": 3, "layers": 4, "slots": None})

    monkeypatch.setattr(shape, "run_engine", run)
    assert shape.memory({})[1] == {"slots": 8, "kv_cache_bytes": 5, "saved_bytes": 3, "layers": 4}
    assert asked == ["", "8"]


def test_qwens_tokens_are_held_against_all_experts(
    gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: Any) -> EngineResult:
        assert request.arguments["load_format"] == "dummy"
        assert request.probe_options["vocab"] == 151936
        rows = [
            {"slots": slots, "batch": batch, "tokens": [[slots == 16, 1]] * batch}
            for slots in request.probe_options["slots"]
            for batch in request.probe_options["batches"]
        ]
        return result(probe=rows, seconds={"load": 60.0})

    monkeypatch.setattr(shape, "run_engine", run)
    rows = shape.qwen({})
    equal = {(row["slots"], row["batch"]): row["sequences_as_with_all"] for row in rows}
    assert equal[8, 1] == 1
    assert equal[8, 8] == 8
    assert equal[16, 1] == 0
    assert rows[0]["seconds_to_load"] == 60.0
    monkeypatch.setattr(shape, "run_engine", lambda request: failed("no memory"))
    with pytest.raises(UnavailableError, match="no memory"):
        shape.qwen({})


class Runner:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.captured = model, 0

    def get_model(self) -> torch.nn.Module:
        return self.model

    def capture_model(self) -> None:
        self.captured += 1


class Llm:
    """Generates by passing one token after another through the layers."""

    def __init__(self, model: torch.nn.ModuleList) -> None:
        self.worker = types.SimpleNamespace(
            model_runner=Runner(model), vllm_config=None, available_kv_cache_memory_bytes=11
        )

    def collective_rpc(self, function: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return [function(self.worker, *args)]

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.worker.model_runner.model)]

    def generate(self, prompts: Any, sampling: Any, use_tqdm: bool) -> list[Any]:
        draw = torch.Generator().manual_seed(0)
        for _ in range(sampling[0].max_tokens):
            ids = torch.randint(0, EXPERTS, (1, 2), generator=draw, dtype=torch.int32)  # [1, K]
            for layer in self.worker.model_runner.model:
                call(layer, torch.ones(1, HIDDEN), ids, torch.ones(1, 2))
        tokens = list(range(sampling[0].max_tokens))
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tokens)]) for _ in prompts]


def test_one_engine_decodes_with_caches_of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = torch.nn.ModuleList([Layer(), Layer()])
    for layer in layers:
        install(layer, 3, torch.device("cpu"), captured=False)
    cleared: list[int] = []
    graphs = types.ModuleType("vllm.compilation.cuda_graph")
    wrapper = types.SimpleNamespace(graph_pool=None)
    graphs.CUDAGraphWrapper = types.SimpleNamespace(  # type: ignore[attr-defined]
        clear_all_graphs=lambda: cleared.append(1), _all_instances=[wrapper]
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, len(cleared)))
    config = types.ModuleType("vllm.config")
    config.set_current_vllm_config = lambda one: torch.no_grad()  # type: ignore[attr-defined]
    vllm = types.ModuleType("vllm")
    vllm.SamplingParams = lambda **given: types.SimpleNamespace(**given)  # type: ignore[attr-defined]
    for one in (graphs, config, vllm):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    give = type(probes_experts(layers)[0]).give
    monkeypatch.setattr(
        type(probes_experts(layers)[0]),
        "give",
        lambda self, slots, captured: give(self, slots, captured=False),
    )
    llm = Llm(layers)
    before = probes.caches(llm)
    assert (before["layers"], before["slots"], before["kv_cache_bytes"]) == (2, 3, 11)
    rows = probes.decode_speeds(
        llm, slots=[4, EXPERTS], batches=[1, 2], steps=[5, 3], rounds=2, vocab=512, seconds=60.0
    )
    assert [(row["slots"], row["batch"]) for row in rows] == [(4, 1), (4, 2), (12, 1), (12, 2)]
    assert [row["engine"] for row in rows] == ["host", "host", "resident", "resident"]
    assert 0 < rows[0]["hit_rate"] < 1
    assert rows[2]["hit_rate"] is None
    assert all(len(row["rounds"]) == 2 for row in rows)
    assert rows[0]["expert_bytes"] < rows[2]["expert_bytes"]
    assert wrapper.graph_pool == (0, 2)
    assert len(cleared) == llm.worker.model_runner.captured == 2


def probes_experts(layers: torch.nn.ModuleList) -> list[Any]:
    from moedoctor.upstream.expert_cache_layer import host_experts

    return host_experts(layers)
