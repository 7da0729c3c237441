"""The engine tier of MD012, MD014, MD015, MD017 and MD018 with fake engines."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_stub import died
from fault_cases import run
from safetensors.torch import load_file

from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.faults.quantization import checkpoint_lab
from moedoctor.faults.quantization import kv_scales_missing_lab as lab
from moedoctor.faults.quantization.checkpoint_lab import PROMPTS, compare_engines, stack_projection
from moedoctor.faults.quantization.gate_up_order import GateUpOrder
from moedoctor.faults.quantization.gate_up_order_lab import CHANGES as MD017
from moedoctor.faults.quantization.global_scale_mismatch import GlobalScaleMismatch
from moedoctor.faults.quantization.global_scale_mismatch_lab import CHANGES as MD014
from moedoctor.faults.quantization.input_scale_missing import InputScaleMissing
from moedoctor.faults.quantization.input_scale_missing_lab import CHANGES as MD015
from moedoctor.faults.quantization.kv_scales_missing import KvScalesMissing, judge_triton_garbage
from moedoctor.faults.quantization.scale_layout import ScaleLayout
from moedoctor.faults.quantization.scale_layout_lab import CHANGES as MD018
from moedoctor.reference.checkpoints import Change, Tensors, write_qwen3_moe
from moedoctor.reference.nvfp4 import dequantize
from moedoctor.results import CaseResult, CaseVerdict, ClaimVerdict, Evidence, Tier
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult

COMPARED = (GateUpOrder, ScaleLayout, GlobalScaleMismatch, InputScaleMissing)
STEP = {"1": -0.1, "2": -2.0}


def results(token: int = 1, logprob: Any = -0.1) -> tuple[EngineResult, EngineResult]:
    """The results of the reference, and of an engine with another token or logprob."""

    def result(token: int, steps: Mapping[str, float]) -> EngineResult:
        tokens, logprobs = ((1, token),) * len(PROMPTS), ((STEP, steps),) * len(PROMPTS)
        return EngineResult("x", tokens, logprobs=logprobs, version="0.21.0")

    return result(1, STEP), result(token, {**STEP, "1": logprob})


def compare(answer: tuple[EngineResult, EngineResult]) -> Evidence:
    return compare_engines(MD014, "marlin", repaired=False, run=lambda requests: list(answer))


@pytest.fixture
def _unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no checkpoints, because no engine reads them."""
    monkeypatch.setattr(checkpoint_lab, "write_qwen3_moe", lambda folder, **given: folder)


def verdict(answer: tuple[EngineResult, EngineResult]) -> CaseVerdict:
    return GlobalScaleMismatch().judge_engines(compare(answer)).verdict


RIGHT, FAILED = results(), died("out of memory")


@pytest.mark.usefixtures("_unwritten")
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (RIGHT, CaseVerdict.CLEAN),
        (results(logprob=-0.3), CaseVerdict.CLEAN),
        (results(token=2), CaseVerdict.REPRODUCED),
        (results(logprob=-0.4), CaseVerdict.REPRODUCED),
        (results(logprob=float("nan")), CaseVerdict.REPRODUCED),
        (results(logprob="nan"), CaseVerdict.REPRODUCED),
        ((RIGHT[0], FAILED), CaseVerdict.REPRODUCED),
        ((FAILED, FAILED), CaseVerdict.ERROR),
        ((RIGHT[0], replace(RIGHT[1], logprobs=None)), CaseVerdict.ERROR),
    ],
)
def test_other_answers_are_noticed_and_missing_ones_prove_nothing(answer, expected):
    assert verdict(answer) is expected


@pytest.mark.parametrize(
    ("changes", "ids"), [(MD014, {"MD014"}), (MD015, {"MD015"}), (MD017, set()), (MD018, set())]
)
def test_lint_reports_visible_damage_and_no_repair(changes, ids, monkeypatch):
    small = partial(write_qwen3_moe, hidden=128)
    monkeypatch.setattr(checkpoint_lab, "write_qwen3_moe", small)
    findings: dict[str, set[str]] = {}

    def run(requests: list[EngineRequest]) -> list[EngineResult]:
        for request in requests:
            findings[request.label] = {finding.id for finding in lint(Path(request.model)).findings}
            assert request.arguments["moe_backend"] == "emulation"
        return list(results())

    compare_engines(changes, "emulation", repaired=False, run=run)
    assert findings == {"reference": set(), "tested": ids}
    compare_engines(changes, "emulation", repaired=True, run=run)
    assert findings == {"reference": set(), "tested": set()}


def written(folder: Path, *changes: Change) -> list[Tensors]:
    return [
        load_file(write_qwen3_moe(folder / str(number), scheme="nvfp4", change=change) / "model.safetensors")
        for number, change in enumerate(changes)
    ]


def test_the_damaged_checkpoint_means_the_same_numbers(tmp_path: Path) -> None:
    tensors = written(tmp_path, MD014.reference, MD014.damaged, MD014.repaired)
    up = [dequantize(stack_projection(checkpoint, "up", 8)) for checkpoint in tensors]
    down = [dequantize(stack_projection(checkpoint, "down", 8)) for checkpoint in tensors]
    assert torch.equal(up[0], up[1])
    assert torch.equal(down[0], down[1])
    # The repair moves a factor of two from one matrix to the other.
    assert torch.equal(up[2], up[0] * 2)
    assert torch.equal(down[2], down[0] / 2)
    scale = "model.layers.1.mlp.experts.3.down_proj.input_scale"
    assert torch.equal(tensors[2][scale], tensors[0][scale] * 2), "what comes in is twice as large, too"


@pytest.mark.parametrize(("changes", "changed"), [(MD017, {"gate", "up"}), (MD018, {"gate", "up", "down"})])
def test_a_layout_is_damaged_in_every_expert_and_wholly_repaired(changes, changed, tmp_path):
    damaged, repaired, right = written(tmp_path, *changes)
    assert right.keys() == damaged.keys() == repaired.keys()
    for name, tensor in right.items():
        assert torch.equal(repaired[name].float(), tensor.float()), name
        projection_of = next((part for part in ("gate", "up", "down") if f".{part}_proj." in name), None)
        if projection_of in changed and name.endswith(".weight_scale"):
            assert not torch.equal(damaged[name].float(), tensor.float()), name


MOVED = {"reference": 0.0, "control": 0.05, "tested": 0.6}
"""The share of the probability that each engine gives to another token."""


def result(label: str, moved: float, **changed: Any) -> EngineResult:
    kind = "auto" if label == "reference" else "fp8_e4m3"
    step = {"1": math.log(1 - moved), "2": math.log(moved) if moved else -math.inf}
    cache = [{"layer": "attn", "dtype": kind, "k_scale": 1.0, "v_scale": 1.0}]
    values = {"logprobs": ((step,),) * 3, "version": "0.21.0", "probe": cache, **changed}
    return EngineResult(label, **values)


def evidence(repaired: bool = False, *, moved: dict[str, float] | None = None, **changed: Any) -> Any:
    moved_by_engine = {**MOVED, **(moved or {})}

    def run(requests: list[EngineRequest]) -> list[EngineResult]:
        labels = [request.label for request in requests]
        return [result(label, moved_by_engine[label], **changed.get(label, {})) for label in labels]

    with pytest.MonkeyPatch.context() as patch:  # no engine reads the checkpoints, so none is written
        patch.setattr(checkpoint_lab, "write_qwen3_moe", lambda folder, **given: folder)
        return lab.compare_engines("marlin", repaired=repaired, run=run)


@pytest.mark.parametrize(
    ("control", "tested", "verdict"),
    [
        (0.0, 0.09, CaseVerdict.CLEAN),
        (0.0, 0.11, CaseVerdict.REPRODUCED),
        (0.2, 0.49, CaseVerdict.CLEAN),
        (0.2, 0.51, CaseVerdict.REPRODUCED),
        (0.36, 0.9, CaseVerdict.ERROR),
    ],
)
def test_the_control_sets_the_threshold(control: float, tested: float, verdict: CaseVerdict) -> None:
    moved = {"control": control, "tested": tested}
    assert KvScalesMissing().judge_engines(evidence(moved=moved)).verdict is verdict


def failed(label: str) -> dict[str, Any]:
    return {label: {"error": died("no memory").error}}


def cached(dtype: str) -> dict[str, Any]:
    return {"probe": [{"layer": "a", "dtype": dtype, "k_scale": 1.0, "v_scale": 1.0}]}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        *((failed(label), f"the {label} engine failed: no memory") for label in MOVED),
        ({"tested": cached("auto")}, "the tested engine has a KV cache of auto"),
        ({"control": cached("auto")}, "the control engine has a KV cache of auto"),
        ({"reference": cached("fp8")}, "the reference engine has a KV cache of fp8"),
        ({"tested": {"probe": []}}, "the tested engine has a KV cache of unknown type"),
        ({"tested": {"logprobs": None}}, "no logprobs came back"),
    ],
)
def test_engines_that_fail_or_differ_otherwise_decide_nothing(changed: dict[str, Any], reason: str) -> None:
    judgement = KvScalesMissing().judge_engines(evidence(**changed))
    assert (judgement.verdict, judgement.reason) == (CaseVerdict.ERROR, reason)


def test_the_distance_of_distributions() -> None:
    half = {"1": math.log(0.5), "2": math.log(0.5)}
    assert lab.measure_total_variation(half, half) == 0
    assert lab.measure_total_variation(half, {"1": 0.0, "2": -math.inf}) == pytest.approx(0.5)
    assert lab.measure_total_variation({"1": 0.0}, {"2": 0.0}) == 1
    assert lab.measure_total_variation(half, {"1": "nan", "2": -1.0}) == 1  # type: ignore[dict-item]


def test_what_the_engines_are_given() -> None:
    """The same function three times; lint finds MD012 only in the checkpoint without scales."""
    findings: dict[str, set[str]] = {}
    outputs: dict[str, torch.Tensor] = {}
    scales: dict[str, list[float]] = {}
    repaired = False

    def run(requests: list[EngineRequest]) -> list[EngineResult]:
        for request in requests:
            folder = Path(request.model)
            tensors = load_file(folder / "model.safetensors")
            value, out = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "vo")
            findings[request.label] = {finding.id for finding in lint(folder).findings}
            scales[request.label] = [
                float(tensors[name]) for name in tensors if name.endswith(("k_scale", "v_scale"))
            ]
            # Two query heads share a key-value head.
            heads = value.float().unflatten(0, (-1, 64)).repeat_interleave(2, 0).flatten(0, 1)  # [Q, H]
            outputs[request.label] = out.float() @ heads  # [H, H]
            declared = json.loads((folder / "config.json").read_text())["quantization_config"]
            assert ("kv_cache_scheme" in declared) == (request.label != "reference")
            attention = request.arguments["attention_backend"]
            assert attention == "FLASH_ATTN" or (attention == "TRITON_ATTN" and repaired)
            assert request.arguments["max_logprobs"] == request.logprobs == 512
            assert len({tuple(prompt) for prompt in request.prompts}) == 32
        return [result(request.label, MOVED[request.label]) for request in requests]

    lab.compare_engines("emulation", repaired=False, run=run)
    assert findings == {"reference": set(), "control": set(), "tested": {"MD012"}}
    assert scales == {"reference": [], "control": [1.0, 1.0], "tested": []}
    assert all(torch.equal(output, outputs["reference"]) for output in outputs.values())
    repaired = True
    lab.compare_engines("emulation", repaired=True, run=run)
    assert findings["tested"] == set()
    k_scale, v_scale = scales["tested"]
    assert 3 < k_scale * 448 < 8, "keys after their norm"
    assert 3 < v_scale * 448 / 65536 < 8, "values"


@pytest.mark.usefixtures("_unwritten")
@pytest.mark.parametrize(
    ("fault", "figure"),
    [
        *((fault(), "3 of 3 prompts with other tokens") for fault in COMPARED),
        (KvScalesMissing(), "60% of the probability is moved, 5% by an FP8 cache alone"),
    ],
)
def test_a_point_with_a_backend_is_only_for_engines(fault, figure, monkeypatch):
    tensors = fault.parameters.model_validate({}).model_dump()
    engines = {**tensors, "moe_backend": "emulation"}
    tiers = {tier for own in fault.tiers.values() for tier in own}
    assert {tier for tier in tiers if fault.has_point(tier, engines)} == {Tier.ENGINE}
    assert {tier for tier in tiers if fault.has_point(tier, tensors)} == tiers - {Tier.ENGINE}
    asked: list[tuple[str, bool]] = []
    observed = evidence() if fault.id == "MD012" else compare(results(token=2))

    def compare_instead(*given: Any, repaired: bool) -> Evidence:
        asked.append((given[-1], repaired))
        return observed

    for module in (checkpoint_lab, lab):
        monkeypatch.setattr(module, "compare_engines", compare_instead)
    for subject in ("faulty", "fixed"):
        judged = run(fault, subject, Tier.ENGINE, moe_backend="emulation")
        assert judged.verdict is CaseVerdict.REPRODUCED
        assert judged.figure.startswith(figure)
    assert asked == [("emulation", False), ("emulation", True)]


def claimed(*engines: Any) -> ClaimVerdict:
    results = [CaseResult("fixed", Tier.ENGINE, {}, CaseVerdict.CLEAN, engine) for engine in engines]
    return judge_triton_garbage.judge(results, (), {"min_ratio": 2.5}).verdict


def test_the_claim_about_triton() -> None:
    assert "triton_attn" not in evidence(False)
    confirmed, refuted = evidence(True), evidence(True, moved={"tested": 0.08})
    assert confirmed["triton_attn"]["attention_backend"] == "TRITON_ATTN"
    assert claimed(confirmed) is ClaimVerdict.CONFIRMED
    assert claimed(refuted) is ClaimVerdict.REFUTED
    assert claimed(confirmed, refuted) is ClaimVerdict.REFUTED
    assert claimed(evidence(True, **failed("control"))) is ClaimVerdict.UNTESTED
    assert claimed(evidence(False)) is ClaimVerdict.UNTESTED
    assert claimed() is ClaimVerdict.UNTESTED
