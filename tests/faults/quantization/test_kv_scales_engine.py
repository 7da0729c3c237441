"""The engine tier of MD012 with fake engines: checkpoints, distances, judgement and claim."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.faults.quantization import checkpoint_lab
from moedoctor.faults.quantization import kv_scales_missing_lab as lab
from moedoctor.faults.quantization.kv_scales_missing import KvScalesMissing, judge_triton_garbage
from moedoctor.results import Case, CaseResult, CaseVerdict, ClaimVerdict, Death, Observation, Tier
from moedoctor.upstream.engine.engine import EngineError, EngineRequest, EngineResult

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
        return [
            result(request.label, moved_by_engine[request.label], **changed.get(request.label, {}))
            for request in requests
        ]

    with pytest.MonkeyPatch.context() as patch:  # no engine reads the checkpoints, so none is written
        patch.setattr(checkpoint_lab, "write_qwen3_moe", lambda folder, **given: folder)
        return lab.compare_engines("marlin", repaired=repaired, run=run)


def test_a_change_much_larger_than_rounding_is_reproduced() -> None:
    judgement = KvScalesMissing().judge_engines(evidence())
    assert judgement.verdict is CaseVerdict.REPRODUCED
    assert judgement.figure.startswith("60% of the probability is moved, 5% by an FP8 cache alone")


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
    return {label: {"error": EngineError("ValueError", "no memory", "load", Death.EXCEPTION)}}


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


def test_the_fault_asks_these_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    observation = Observation(evidence(True))

    def compare_engines(moe_backend: str, *, repaired: bool) -> Observation:
        asked.append((moe_backend, repaired))
        return observation

    monkeypatch.setattr(lab, "compare_engines", compare_engines)
    fault = KvScalesMissing()
    parameters = fault.parameters.model_validate({"moe_backend": "emulation"}).model_dump()
    case = Case(fault.id, "fixed", Tier.ENGINE, parameters)
    assert fault.observe(case, None) is observation
    assert asked == [("emulation", True)]
    assert fault.judge(case, observation).verdict is CaseVerdict.REPRODUCED


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
