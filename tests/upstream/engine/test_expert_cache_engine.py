"""Engines with an expert cache: requests, the table, and the probes on a fake engine."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_stub import answered, died

from moedoctor.kernels.cache import EVERY_ROW
from moedoctor.results import Death, UnavailableError
from moedoctor.upstream.engine import engine as engine_module
from moedoctor.upstream.engine import expert_cache as engines
from moedoctor.upstream.engine import expert_cache_padding as padding
from moedoctor.upstream.engine import expert_cache_probes as probes
from moedoctor.upstream.engine import expert_cache_shapes as shapes
from moedoctor.upstream.engine import expert_cache_stream as streaming
from moedoctor.upstream.engine.engine import EngineError, EngineRequest, EngineResult, LogFacts
from moedoctor.upstream.engine.experiment import pair
from moedoctor.upstream.plugin import expert_cache_fix
from moedoctor.upstream.plugin.expert_cache_layer import HostExperts, IdLog, host_experts, install
from moedoctor.upstream.plugin.expert_cache_options import CacheOptions, read_options
from tests.upstream.plugin.test_expert_cache_fix import HIDDEN, INTERMEDIATE, Layer, call
from tests.upstream.plugin.test_expert_cache_fix import E as EXPERTS

VOCAB, LAYERS = 256, 3

SEEN = {"engine": "device", "layers": 2, "hits": 3, "misses": 4}
FOLDERS: Any = dict.fromkeys(("bf16", "nvfp4", "fp8"), "x")


def result(tokens: tuple[int, ...] = (7, 9), *, probe: Any = None, **options: Any) -> EngineResult:
    return answered(tokens, probe=probe or SEEN, **options)


def failed(message: str, *logged: str) -> EngineResult:
    return died(message, log=LogFacts(refused=logged))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the function that runs one engine."""
    monkeypatch.setattr(engine_module, "need_engine", lambda: None)

    def set_engine(function: Callable[[EngineRequest], EngineResult]) -> None:
        monkeypatch.setattr(engine_module, "run_engine", function)

    return set_engine


def test_every_backend_runs_without_a_cache_and_with_one() -> None:
    trials = engines.trials(FOLDERS)
    labels = [trial.request.label for trial in trials]
    assert len(trials) == len(set(labels)) == 5 * 2 * 3 + 5 + 2 * 2
    hits_first = [trial for trial in trials if trial.columns["sequences"] == 1 and trial.control is not None]
    assert [len(trial.request.prompts) for trial in hits_first] == [1, 1]
    assert all("one sequence, no cache" in str(trial.control) for trial in hits_first)
    controls = {trial.control for trial in trials} - {None}
    assert controls == {trial.request.label for trial in trials if trial.columns["slots"] is None}
    planted = [trial.columns["backend"] for trial in trials if trial.columns["planted"]]
    assert set(planted) == set(engines.BACKENDS)
    whole, broken, control = (
        engines.trial("FP8 MARLIN", engines.GRAPHS, slots, "x", planted=fault).request
        for slots, fault in ((6, False), (6, True), (None, False))
    )
    assert (whole.probe, whole.probe_when) == (f"{engines.PROBES}caches", "after")
    assert (broken.probe, broken.probe_when) == (f"{engines.PROBES}caches_with_a_fault", "before")
    assert (broken.arguments, broken.environ) == (whole.arguments, whole.environ)
    assert (control.environ["MOEDOCTOR_FIXES"], whole.environ["MOEDOCTOR_FIXES"]) == ("", "expert_cache")
    assert whole.environ["MOEDOCTOR_EXPERT_CACHE"] == "6"
    assert (whole.arguments, whole.prompts) == (control.arguments, control.prompts)
    assert whole.arguments["moe_backend"] == "marlin"


@pytest.mark.parametrize(
    ("cached", "control", "outcome", "detail"),
    [
        (result(), result(), "same tokens", "same logprobs"),
        (result((7, 8)), result(), "other tokens", "prompt 1, token 2: 8, not 9"),
        (failed("broken"), result(), "crash", "RuntimeError: broken"),
        (result(), failed("broken"), "no control", "RuntimeError: broken"),
        (failed("broken"), failed("both"), "no control", "RuntimeError: both"),
    ],
)
def test_outcomes(cached: EngineResult, control: EngineResult, outcome: str, detail: str) -> None:
    trials = [engines.trial("BF16 TRITON", engines.EAGER, slots, "x") for slots in (None, 2)]
    row = engines.row(pair(trials, [control, cached])[1])
    assert (row["outcome"], row["detail"], row["slots"]) == (outcome, detail, 2)
    assert row["misses"] == (None if cached.error else 4)
    assert (row["asked"], row["planted"]) == ("TRITON", False)


def test_refusals_need_the_reason(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = (
        "MOEDOCTOR_EXPERT_CACHE=4: a: m computes with X; expected --moe-backend triton, marlin or humming"
    )
    few = "MOEDOCTOR_EXPERT_CACHE=1: a: 1 slots hold fewer experts than one token needs (top_k 2)"

    def engine(request: EngineRequest) -> EngineResult:
        if request.environ["MOEDOCTOR_EXPERT_CACHE"] == "1":
            return failed(few)
        if request.arguments["moe_backend"] == "emulation":
            return failed(f"x\n{unsupported}")
        if "tensor_parallel_size" in request.arguments:
            return failed("worker died", "experts are spread over several GPUs MOEDOCTOR_EXPERT_CACHE")
        return result()  # starts, although weights are offloaded

    run(engine)
    for gpus, refused in ((1, [True, True, False, None]), (2, [True, True, False, True])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert [row["refused"] for row in engines.refusals({})] == refused


def test_each_runner_decodes_in_a_graph_of_its_size_and_in_a_larger_one(run: Any) -> None:
    def answer(request: EngineRequest) -> EngineResult:
        runner = {"0": "V1", "1": "V2"}[request.environ["VLLM_USE_V2_MODEL_RUNNER"]]
        sizes = request.arguments["compilation_config"]["cudagraph_capture_sizes"]
        assert 3 not in sizes if ", 4" in request.label else 3 in sizes
        before = request.probe_when == "before"
        assert before == (request.probe or "").endswith("counting_padding")
        return result(probe={**SEEN, "misses": 4 + before, "runner_in_use": runner})

    run(answer)
    rows = padding.padding({})
    assert [(row["runner"], row["graph"], row["lookups"]) for row in rows] == [
        ("V1", "3", 7),
        ("V1", "4", 7),
        ("V1", "4, padding counts", 8),
        ("V2", "3", 7),
        ("V2", "4", 7),
        ("V2", "4, padding counts", 8),
    ]
    assert all(row["outcome"] == "same tokens" for row in rows)
    run(lambda request: failed("died"))
    with pytest.raises(UnavailableError, match="died"):
        padding.padding({})


def test_an_engine_that_forgets_padding_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "asked_for", lambda llm: llm)
    rows = expert_cache_fix.RealRows()
    monkeypatch.setattr(expert_cache_fix, "real_rows", rows)
    counted = rows.on("cpu")
    rows.begin(2, 4)
    assert counted.tolist() == [2]
    assert padding.counting_padding("engine")() == "engine"
    rows.begin(2, 4)
    assert counted.tolist() == [EVERY_ROW]


def test_prompts_stream_beside_an_engine_without_a_cache() -> None:
    trials = {trial.request.label: trial for trial in streaming.trials(FOLDERS)}
    assert len(trials) == 4 * 3 + 4 * 3 + 5
    for trial in trials.values():
        columns, request = trial.columns, trial.request
        assert request.environ["VLLM_USE_V2_MODEL_RUNNER"] == {"V1": "0", "V2": "1"}[columns["runner"]]
        assert request.environ["MOEDOCTOR_EXPERT_CACHE"] == (columns["cache"] or "")
        assert str(request.probe).endswith("streaming_wrong_experts") == columns["planted"]
        if trial.control is not None:
            control = trials[trial.control]
            assert control.columns["cache"] is None
            assert (control.request.prompts, control.request.max_tokens) == (
                request.prompts,
                request.max_tokens,
            )
    places = {
        (trial.columns["backend"], trial.columns["runner"], trial.columns["mode"])
        for trial in trials.values()
    }
    assert {place for place in places if place[0] == "BF16 TRITON"} == {
        ("BF16 TRITON", runner, mode) for runner in ("V1", "V2") for mode in (engines.EAGER, engines.GRAPHS)
    }
    assert {trial.columns["backend"] for trial in trials.values() if trial.columns["planted"]} == set(
        engines.BACKENDS
    )
    assert {trial.columns["backend"] for trial in streaming.trials(FOLDERS, "0.21.0")} == {
        name for name in engines.BACKENDS if name != "NVFP4 HUMMING"
    }


def test_a_row_of_a_streaming_engine_says_what_the_caches_were_asked_for(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = {**SEEN, "stream_bytes": 64, "runner_in_use": "V2"}
    lead = tuple(({"7": -0.1, "9": -1.0},) for _ in range(2))
    run(lambda request: replace(result(probe=probe), tokens=((7,), (7,)), logprobs=lead))
    monkeypatch.setattr(streaming.importlib.metadata, "version", lambda name: "0.33.0")
    monkeypatch.setattr(streaming, "checkpoints", lambda *schemes, layers: contextlib.nullcontext(FOLDERS))
    rows = streaming.tokens({})
    assert len(rows) == 2 * 4 + 2 * 4 + 5
    assert {row["lookups"] for row in rows} == {7}
    assert {(row["outcome"], row["clear_prompts"], row["same_logprobs"]) for row in rows} == {
        ("same tokens", 2, 2)
    }
    run(lambda request: failed("died") if "no cache" not in str(request.label) else result(probe=probe))
    assert {row["detail"] for row in streaming.tokens({})} == {"RuntimeError: died"}


def test_a_fault_in_the_stream_leaves_the_slots_right(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [types.SimpleNamespace(stream=("stream", number, 8)) for number in range(3)]
    monkeypatch.setattr(streaming, "model_of", lambda llm: llm)
    monkeypatch.setattr(streaming, "host_experts", lambda model: layers)
    monkeypatch.setattr(streaming, "asked_for", lambda llm: llm)
    assert streaming.streaming_wrong_experts("engine")() == "engine"
    assert [layer.stream for layer in layers] == [("stream", number, 8) for number in (0, 1, 1)]


def test_memory_is_what_the_profile_finds(run: Any) -> None:
    asked = []

    def engine(request: EngineRequest) -> EngineResult:
        document = json.loads((Path(request.model) / "config.json").read_text())
        assert (document["num_hidden_layers"], document["head_dim"]) == (4, 128)
        assert request.arguments["kv_cache_memory_bytes"] is None, "it would replace the profile"
        asked.append(request.environ["MOEDOCTOR_EXPERT_CACHE"])
        return result(probe={**found, "slots": None})

    found = {"kv_cache_bytes": 5, "saved_bytes": 3, "unreleased_bytes": 2, "layers": 4}
    run(engine)
    assert engines.memory({})[1] == {"slots": 8, **found}
    assert asked == ["", "8"]


def speeds(request: EngineRequest) -> list[dict[str, Any]]:
    """What the probe would give; the tokens depend on 16 slots."""
    rows = []
    for text in request.probe_options["caches"]:
        slots = int(text.partition(":")[0])
        for batch in request.probe_options["batches"]:
            rate = 10.0 * (1.5 if text == str(slots) else 1.0)
            rows.append(
                {
                    "cache": text,
                    "slots": slots,
                    "batch": batch,
                    "tokens": [[slots == 16, 1]] * batch,
                    "tokens_per_second": rate,
                    "gpu_tokens_per_second": rate * (2 if text == str(slots) else 1),
                }
            )
    return rows


def test_qwens_tokens_are_compared_with_all_experts(run: Any) -> None:
    def engine(request: EngineRequest) -> EngineResult:
        assert request.arguments["load_format"] == "dummy"
        assert request.probe_options["vocab"] == 151936
        assert request.environ["MOEDOCTOR_EXPERT_CACHE"] == "8:packed=0"
        return result(probe=speeds(request), seconds={"load": 60.0})

    run(engine)
    rows = engines.qwen({})
    equal = {(row["slots"], row["batch"]): row["sequences_as_with_all"] for row in rows}
    assert (equal[8, 1], equal[8, 8], equal[16, 1]) == (1, 8, 0)
    assert rows[0]["seconds_to_load"] == 60.0
    run(lambda request: failed("no memory"))
    with pytest.raises(UnavailableError, match="no memory"):
        engines.qwen({})


def test_new_defaults_are_compared_with_the_old_ones_in_one_engine(run: Any) -> None:
    run(lambda request: result(probe=speeds(request), seconds={"load": 60.0}))
    rows = {(row["cache"], row["batch"]): row for row in engines.gain({})}
    assert {slots for slots, _ in rows} == set(engines.GAIN_CACHES)
    assert "times_before" not in rows["16:policy=lfru,packed=0,stream=0,overlap=0,fill=0", 1]
    assert (rows["64", 8]["times_before"], rows["64", 8]["sequences_as_before"]) == (1.5, 8)
    assert (rows["64", 8]["gpu_times_before"], rows["64", 8]["sequences"]) == (3.0, 8)
    assert all("tokens" not in row for row in rows.values())


def test_an_engine_that_is_cut_keeps_the_settings_that_it_measured(run: Any) -> None:
    hang = EngineError("hang", "no answer within 420 s: probe had run", "process", Death.HANG)
    kept = 0

    def engine(request: EngineRequest) -> EngineResult:
        return answered(probe=speeds(request)[:kept], seconds={"load": 60.0}, error=hang)

    run(engine)
    for measure in (engines.gain, engines.qwen):
        kept = 0
        with pytest.raises(UnavailableError, match="process: hang: no answer within 420 s: probe had run"):
            measure({})
        kept = 8
        first, *others = measure({})
        assert len(others) == 7
        assert first["cut"] == "process: hang: no answer within 420 s: probe had run"
        assert first["seconds_to_load"] == 60.0
        assert not any("cut" in row for row in others)
    kept = 2
    assert [row.get("cut") is not None for row in engines.nvfp4("nvfp4")] == [True, False]


def test_what_decides_is_measured_first() -> None:
    first = [read_options(text) for text in engines.GAIN_CACHES[:6]]
    assert {(options.slots, options.packed) for options in first} == {
        (slots, packed) for slots in (16, 32, 64) for packed in (False, True)
    }
    tried = [read_options(text) for text in engines.GAIN_CACHES[6:]]
    assert all(
        replace(options, overlap="backend", fill=True) == CacheOptions(options.slots) for options in tried
    )
    assert all(options != CacheOptions(options.slots) for options in tried)
    every = [read_options(text).packed for text in engines.GAIN_CACHES]
    assert every == sorted(every), "packed experts stay packed"


def test_nvfp4_and_bf16_are_engines_of_their_own(run: Any) -> None:
    asked = []

    def engine(request: EngineRequest) -> EngineResult:
        config = json.loads((Path(request.model) / "config.json").read_text(encoding="utf-8"))
        asked.append((request.arguments["moe_backend"], "quantization_config" in config))
        return result(probe=speeds(request))

    run(engine)
    rows = [*engines.nvfp4("nvfp4"), *engines.nvfp4("bf16")]
    assert asked == [("marlin", True), ("triton", False)]
    assert [row["scheme"] for row in rows] == ["nvfp4"] * 4 + ["bf16"] * 4


class Runner:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.captured = model, 0

    def get_model(self) -> torch.nn.Module:
        return self.model

    def capture_model(self) -> None:
        self.captured += 1


class Model(torch.nn.Module):
    """A MoE model without attention and with vLLM's dummy weights, all within 0.001."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB)
        self.gates = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, EXPERTS, bias=False) for _ in range(LAYERS))
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(LAYERS + 1))
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        for parameter in self.parameters():
            parameter.data.uniform_(-1e-3, 1e-3, generator=torch.Generator().manual_seed(1234))
        for layer in self.layers:
            layer.w13_weight_scale.data.fill_(1.0)
            layer.w2_bias.data.zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] of `tokens` [B]."""
        state = self.embed_tokens(tokens)  # [B, H]
        for gate, norm, layer in zip(self.gates, self.norms, self.layers, strict=False):
            x = norm(state)  # [B, H]
            topk_weights, ids = gate(x).softmax(-1).topk(2)  # [B, K] each
            state = state + call(layer, x, ids.int(), topk_weights / topk_weights.sum(-1, keepdim=True))
        logits: torch.Tensor = self.lm_head(self.norms[-1](state))
        return logits


class Llm:
    """Draws each token from the one before, as an engine's worker in this process does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.worker = types.SimpleNamespace(
            model_runner=Runner(model), vllm_config=None, available_kv_cache_memory_bytes=11
        )
        self.batches: set[int] = set()

    def collective_rpc(self, function: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return [function(self.worker, *args)]

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.worker.model_runner.model)]

    @torch.no_grad()
    def generate(self, prompts: Any, sampling: Any, use_tqdm: bool) -> list[Any]:
        self.batches.add(len(prompts))
        draws = [torch.Generator().manual_seed(options.seed) for options in sampling]
        tokens = [[prompt["prompt_token_ids"][0] % VOCAB] for prompt in prompts]
        for _ in range(sampling[0].max_tokens):
            logits = self.worker.model_runner.model(torch.tensor([ids[-1] for ids in tokens]))  # [B, V]
            for mine, row, draw, options in zip(tokens, logits, draws, sampling, strict=True):
                penalty = getattr(options, "repetition_penalty", 1.0)
                drawn = row[mine]
                row[mine] = torch.where(drawn > 0, drawn / penalty, drawn * penalty)
                mine.append(int(torch.multinomial(row.softmax(-1), 1, generator=draw)))
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids[1:])]) for ids in tokens]


VLLM = types.SimpleNamespace(cleared=[], unlocked=[], wrapper=types.SimpleNamespace(graph_pool=None))


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Llm:
    """An engine with 3 slots a layer, and the parts of vLLM that the probes touch."""
    model = Model()
    for layer in model.layers:
        install(layer, CacheOptions(3), torch.device("cpu"), captured=False)
    VLLM.cleared.clear()
    VLLM.unlocked.clear()
    graphs = types.ModuleType("vllm.compilation.cuda_graph")
    graphs.CUDAGraphWrapper = types.SimpleNamespace(  # type: ignore[attr-defined]
        clear_all_graphs=lambda: VLLM.cleared.append(1), _all_instances=[VLLM.wrapper]
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, len(VLLM.cleared)))
    config = types.ModuleType("vllm.config")
    config.set_current_vllm_config = lambda config: torch.no_grad()  # type: ignore[attr-defined]
    vllm = types.ModuleType("vllm")
    vllm.SamplingParams = lambda **given: types.SimpleNamespace(**given)  # type: ignore[attr-defined]
    workspace = types.ModuleType("vllm.v1.worker.workspace")
    workspace.unlock_workspace = lambda: VLLM.unlocked.append(1)  # type: ignore[attr-defined]
    for module in (graphs, config, vllm, workspace):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    give = HostExperts.give
    monkeypatch.setattr(
        HostExperts, "give", lambda self, options, captured: give(self, options, captured=False)
    )
    return Llm(model)


def decoded(llm: Llm, slots: list[int], **options: Any) -> list[dict[str, Any]]:
    *_, rows = decoding(llm, slots, **options)
    return rows


def decoding(llm: Llm, slots: list[int], **options: Any) -> Iterator[list[dict[str, Any]]]:
    caches = [f"{count}:packed=0" for count in slots]
    return probes.decode_speeds(
        llm, caches=caches, batches=[1, 2], steps=[12, 6], texts=[3, 1], vocab=VOCAB, seconds=60.0, **options
    )


def test_rows_come_after_each_cache_and_each_first_reply(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_first_reply", lambda *given: {"first_reply_tokens_per_second": 5.0})
    so_far = [
        [(row["slots"], row["batch"], "first_reply_tokens_per_second" in row) for row in rows]
        for rows in decoding(llm, [3, EXPERTS], prompt=4, optimum=False)
    ]
    first = [(3, 1, False), (3, 2, False)]
    replied = [(3, 1, True), (3, 2, False)]
    assert so_far == [first, replied, [*replied, (EXPERTS, 1, False), (EXPERTS, 2, False)]]


def test_one_engine_decodes_with_caches_of_every_size(llm: Llm) -> None:
    before = probes.caches(llm)
    assert (before["layers"], before["slots"], before["kv_cache_bytes"]) == (LAYERS, 3, 11)
    sizes = [2, 3, 4, EXPERTS]
    rows = {(row["slots"], row["batch"]): row for row in decoded(llm, sizes)}
    assert list(rows) == [(slots, batch) for slots in sizes for batch in (1, 2)]
    assert llm.batches == {1, 2}, "graphs of other sizes were not captured"
    held, resident = rows[4, 1], rows[EXPERTS, 1]
    assert (held["engine"], resident["engine"]) == ("host", "resident")
    assert 0 < held["hit_rate"] < 1
    assert resident["hit_rate"] is None
    assert held["expert_bytes"] < resident["expert_bytes"]
    assert VLLM.wrapper.graph_pool == (0, 5), "one for each size, and one for the recorded run"
    assert len(VLLM.cleared) == len(VLLM.unlocked) == llm.worker.model_runner.captured == 5
    for row in rows.values():
        assert row["tokens"] == rows[EXPERTS, row["batch"]]["tokens"]
        assert (len(row["rounds"]), row["gpu_rounds"]) == (2, None)
        assert (row["texts"], len(row["tokens"])) == ((3, 3) if row["batch"] == 1 else (1, 2))
        assert row["control_changes_tokens"]
        assert row["rounds_agree"]
    # The best possible hit rate is above every measured one, or not known.
    known = {key: row for key, row in rows.items() if row["optimum_hit_rate"] is not None}
    assert {(2, 1), (3, 1), (4, 1), (4, 2)} <= set(known)
    assert all(row["hit_rate"] <= row["optimum_hit_rate"] < 1 for row in known.values())
    assert rows[2, 2]["optimum_note"].endswith("a call that does not fit goes in groups")
    assert resident["optimum_note"].endswith("every expert is resident")


def test_speeds_by_the_gpu_are_of_the_replays_of_one_reply(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is a replay of 2 ms; replays of other replies would be too many."""
    events: list[int] = []
    generate = llm.generate

    def replayed(prompts: Any, sampling: Any, use_tqdm: bool) -> list[Any]:
        events.extend([2] * sampling[0].max_tokens)
        return generate(prompts, sampling, use_tqdm)

    monkeypatch.setattr(llm, "generate", replayed)
    monkeypatch.setattr(probes, "graph_events", lambda: contextlib.nullcontext(events))
    monkeypatch.setattr("moedoctor.upstream.engine.decode_speed.milliseconds", list)
    single, several = decoded(llm, [4], prompt=4, optimum=False)
    assert (single["gpu_rounds"], several["gpu_rounds"]) == ([500.0, 500.0], [1000.0, 1000.0])
    assert (single["gpu_tokens_per_second"], single["gpu_replies"]) == (500.0, [500.0, 500.0])


def test_planted_wrong_experts_are_restored(llm: Llm) -> None:
    (layer,) = host_experts(llm.worker.model_runner.model)[-1:]
    layer.give(CacheOptions(EXPERTS), captured=False)
    host = {name: tensor.clone() for name, tensor in layer.store.tensors.items()}
    later = probes.caches_with_a_fault(llm)
    for name, tensor in layer.store.tensors.items():
        assert torch.equal(tensor, host[name].roll(1, 0))
        assert torch.equal(layer.cache.weights[name], tensor)
    assert later()["layers"] == LAYERS
    layer.roll(-1)
    assert all(torch.equal(tensor, host[name]) for name, tensor in layer.store.tensors.items())


def test_with_dummy_weights_tokens_do_not_depend_on_experts(
    llm: Llm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "draw_weights", lambda model: None)
    rows = decoded(llm, [4])
    assert not any(row["control_changes_tokens"] for row in rows)
    assert all(row["rounds_agree"] for row in rows)


def test_every_weight_is_drawn_and_no_two_layers_are_alike(llm: Llm) -> None:
    model = llm.worker.model_runner.model
    probes.draw_weights(model)
    layers = host_experts(model)
    for name, inputs, gain in (("w1", HIDDEN, 1.0), ("w2", INTERMEDIATE, 3.0)):
        drawn = [layer.store.tensors[name] for layer in layers]
        assert all(float(w.std()) == pytest.approx(gain / inputs**0.5, rel=0.1) for w in drawn)
        assert not torch.equal(drawn[0], drawn[1])
    assert float(model.embed_tokens.weight.detach().std()) == pytest.approx(1.0, rel=0.1)
    assert torch.equal(model.norms[0].weight, torch.ones(HIDDEN))
    assert float(model.lm_head.bias.detach().abs().max()) == 0
    assert not torch.equal(model.gates[0].weight, model.gates[1].weight)


def decode(ids: list[list[int]], start: list[int], lookups: int, token: int = 7) -> probes._Run:
    return probes._Run({"hit_rate": 0.1}, [[token]], [start], (0, 0), lookups, [ids])


def test_the_optimum_starts_from_what_is_resident() -> None:
    calls = [[0, 1], [1, -1], [2, 2], [0, 1]]
    recorded = decode(calls, [], 0)
    # 0, 1 and 1 hit; 2 replaces 0 or 1, so one of the last two calls hits.
    assert probes._optimum(decode([], [0, 1], 6), recorded, 2, 4)["optimum_hit_rate"] == 4 / 6
    assert probes._optimum(decode([], [], 6), recorded, 2, 4)["optimum_hit_rate"] == 2 / 6
    for other in (decode([], [], 5), decode([], [], 6, token=8)):
        found = probes._optimum(other, recorded, 2, 4)
        assert found["optimum_hit_rate"] is None
        assert "other experts were asked for" in found["optimum_note"]


def test_a_log_keeps_ids_until_there_is_no_room() -> None:
    log = IdLog(2, 4, torch.device("cpu"))
    log.note(torch.tensor([[3, 1]]))
    log.note(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32))
    log.note(torch.zeros(3, 2, dtype=torch.int32))  # too wide
    assert log.calls() == [[3, 1, -1, -1], [0, 1, 2, 3]]
    log.note(torch.tensor([[5, 6]]))
    assert log.calls() == []
    log.clear()
    log.note(torch.tensor([[5, 6]]))
    assert log.calls() == [[5, 6, -1, -1]]


def test_the_published_models_are_rows_whether_they_run_or_not(run: Any) -> None:
    configs = {}

    def engine(request: EngineRequest) -> EngineResult:
        assert request.environ["MOEDOCTOR_EXPERT_CACHE"] == "8:stream=0"
        compilation = request.arguments["compilation_config"]
        assert (compilation["mode"], compilation["cudagraph_mode"]) == (0, "FULL_DECODE_ONLY")
        configs[request.label] = json.loads(Path(request.model, "config.json").read_text(encoding="utf-8"))
        if request.label == "gemma-4-26b-a4b, nvfp4":
            return failed("704 is not a multiple of 128")
        probe = {"gigabytes": 7.0, "tokens_per_second": 20.0, "engine": "device"}
        return result(probe=probe, seconds={"load": 60.0})

    run(engine)
    table = [row for scheme in ("bf16", "nvfp4") for row in (*shapes.nemotron(scheme), *shapes.gemma(scheme))]
    rows = {(row["model"], row["scheme"]): row for row in table}
    assert len(rows) == len(configs) == 4
    assert all(row["seconds"] == {"load": 60.0} for row in table if "error" not in row)
    assert rows["gemma-4-26b-a4b", "nvfp4"]["error"].endswith("704 is not a multiple of 128")
    assert rows["gemma-4-26b-a4b", "bf16"]["published_tokens_per_second"] == 14.8
    assert configs["nemotron-cascade-2-30b-a3b, bf16"]["architectures"] == ["NemotronHForCausalLM"]
    quantized = {label for label, config in configs.items() if "quantization_config" in config}
    assert quantized == {label for label in configs if label.endswith("nvfp4")}


@pytest.mark.parametrize("tied", [False, True])
def test_any_model_routes_at_random(llm: Llm, tied: bool) -> None:
    """Also one whose last layer is its embedding: its last token has the highest logit."""
    model = llm.worker.model_runner.model
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    experts = [
        {name: tensor.clone() for name, tensor in layer.store.tensors.items()}
        for layer in host_experts(model)
    ]
    row = probes.random_routing(llm, steps=6, texts=2, vocab=VOCAB, kv_cache=0)
    assert (row["layers"], row["engine"]) == (LAYERS, "host")
    assert row["distinct_tokens"] == row["drawn_tokens"] == 8
    assert 0 < row["hit_rate"] < 1
    assert float(model.embed_tokens.weight.detach().std()) == pytest.approx(1.0, rel=0.1)
    for layer, before in zip(host_experts(model), experts, strict=True):
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.store.tensors.items())
