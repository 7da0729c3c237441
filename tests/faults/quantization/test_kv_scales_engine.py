"""The engine tier of MD012 with engines that are not real: checkpoints, distances, judgement and claim."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.faults.quantization import kv_scales_missing_engine as engine
from moedoctor.faults.quantization.kv_scales_missing import KvScalesMissing
from moedoctor.faults.quantization.kv_scales_missing_claims import CLAIMS
from moedoctor.results import Case, CaseResult, CaseVerdict, ClaimVerdict, Death, Observation, Tier
from moedoctor.upstream.engine.engine import EngineError, EngineRequest, EngineResult

MOVED = {"reference": 0.0, "control": 0.05, "tested": 0.6}
"""Engine -> how much of the probability it gives to another token."""


def result(label: str, moved: float, **changed: Any) -> EngineResult:
    kind = "auto" if label == "reference" else "fp8_e4m3"
    one = {"1": math.log(1 - moved), "2": math.log(moved) if moved else -math.inf}
    cache = [{"layer": "attn", "dtype": kind, "k_scale": 1.0, "v_scale": 1.0}]
    values = {"logprobs": ((one,),) * 3, "version": "0.21.0", "probe": cache, **changed}
    return EngineResult(label, **values)


def evidence(repaired: bool = False, *, moved: dict[str, float] | None = None, **changed: Any) -> Any:
    shares = {**MOVED, **(moved or {})}

    def run(requests: list[EngineRequest]) -> list[EngineResult]:
        return [result(one.label, shares[one.label], **changed.get(one.label, {})) for one in requests]

    return engine.observe("marlin", repaired, run=run).evidence


def test_what_moves_much_further_than_rounding_is_reproduced() -> None:
    judgement = engine.judge(evidence())
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
def test_the_control_says_how_far_is_far(control: float, tested: float, verdict: CaseVerdict) -> None:
    assert engine.judge(evidence(moved={"control": control, "tested": tested})).verdict is verdict


def failed(label: str) -> dict[str, Any]:
    return {label: {"error": EngineError("ValueError", "no memory", "load", Death.EXCEPTION)}}


@pytest.mark.parametrize("label", ["reference", "control", "tested"])
def test_an_engine_that_fails_decides_nothing(label: str) -> None:
    judgement = engine.judge(evidence(**failed(label)))
    assert judgement.verdict is CaseVerdict.ERROR
    assert judgement.reason == f"the {label} engine failed: no memory"


@pytest.mark.parametrize(
    ("label", "probe"),
    [("tested", "auto"), ("control", "auto"), ("reference", "fp8"), ("tested", None)],
)
def test_another_cache_than_was_meant_decides_nothing(label: str, probe: str | None) -> None:
    cache = [] if probe is None else [{"layer": "a", "dtype": probe, "k_scale": 1.0, "v_scale": 1.0}]
    judgement = engine.judge(evidence(**{label: {"probe": cache}}))
    assert judgement.verdict is CaseVerdict.ERROR
    assert "KV cache" in (judgement.reason or "")


def test_answers_without_logprobs_decide_nothing() -> None:
    assert engine.judge(evidence(tested={"logprobs": None})).verdict is CaseVerdict.ERROR


def test_the_distance_of_distributions() -> None:
    half = {"1": math.log(0.5), "2": math.log(0.5)}
    assert engine.total_variation(half, half) == 0
    assert engine.total_variation(half, {"1": 0.0, "2": -math.inf}) == pytest.approx(0.5)
    assert engine.total_variation({"1": 0.0}, {"2": 0.0}) == 1
    assert engine.total_variation(half, {"1": "nan", "2": -1.0}) == 1  # type: ignore[dict-item]


def test_what_the_engines_are_given() -> None:
    """The same function three times; lint finds MD012 in the one without scales alone."""
    found: dict[str, set[str]] = {}
    outputs: dict[str, torch.Tensor] = {}
    scales: dict[str, list[float]] = {}
    repaired = False

    def run(requests: list[EngineRequest]) -> list[EngineResult]:
        for one in requests:
            folder = Path(one.model)
            tensors = load_file(folder / "model.safetensors")
            value, out = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "vo")
            found[one.label] = {finding.id for finding in lint(folder).findings}
            scales[one.label] = [
                float(tensors[name]) for name in tensors if name.endswith(("k_scale", "v_scale"))
            ]
            # Two query heads share a key-value head.
            heads = value.float().unflatten(0, (-1, 64)).repeat_interleave(2, 0).flatten(0, 1)  # [Q, H]
            outputs[one.label] = out.float() @ heads  # [H, H]
            declared = json.loads((folder / "config.json").read_text())["quantization_config"]
            assert ("kv_cache_scheme" in declared) == (one.label != "reference")
            attention = one.arguments["attention_backend"]
            assert attention == "FLASH_ATTN" or (attention == "TRITON_ATTN" and repaired)
            assert one.arguments["max_logprobs"] == one.logprobs == 512
            assert len({tuple(prompt) for prompt in one.prompts}) == 32
        return [result(one.label, MOVED[one.label]) for one in requests]

    engine.observe("emulation", False, run=run)
    assert found == {"reference": set(), "control": set(), "tested": {"MD012"}}
    assert scales == {"reference": [], "control": [1.0, 1.0], "tested": []}
    assert all(torch.equal(one, outputs["reference"]) for one in outputs.values())
    repaired = True
    engine.observe("emulation", True, run=run)
    assert found["tested"] == set()
    k_scale, v_scale = scales["tested"]
    assert 3 < k_scale * 448 < 8, "keys after their norm"
    assert 3 < v_scale * 448 / 65536 < 8, "values"


def test_the_fault_asks_these_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    seen = Observation(evidence(True))

    def observe(moe_backend: str, repaired: bool) -> Observation:
        asked.append((moe_backend, repaired))
        return seen

    monkeypatch.setattr(engine, "observe", observe)
    fault = KvScalesMissing()
    parameters = fault.parameters.model_validate({"moe_backend": "emulation"}).model_dump()
    case = Case(fault.id, "fixed", Tier.ENGINE, parameters)
    assert fault.observe(case, fault.fixed(case)) is seen
    assert asked == [("emulation", True)]
    assert fault.judge(case, seen).verdict is CaseVerdict.REPRODUCED


def claimed(*found: Any) -> ClaimVerdict:
    claim = next(one for one in CLAIMS if one.key == "triton_garbage")
    results = [CaseResult("fixed", Tier.ENGINE, {}, CaseVerdict.CLEAN, one) for one in found]
    return claim.judge(results, (), {"min_ratio": 2.5}).verdict


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
