"""The engine tier of MD012, MD014 and MD015 with engines that are not real: checkpoints and judgement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moedoctor.diagnose.lint import lint
from moedoctor.faults.checkpoint_engine import CHECKPOINTS, PROMPTS, judge, observe
from moedoctor.faults.global_scale_mismatch import GlobalScaleMismatch
from moedoctor.faults.tiny_checkpoint import projection
from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.reference.nvfp4 import dequantize
from moedoctor.results import Case, CaseVerdict, Death, Tier
from moedoctor.upstream.engine import EngineError, EngineRequest, EngineResult

STEP = {"1": -0.1, "2": -2.0}


def results(
    tokens: int = 1, logprob: Any = -0.1, error: str | None = None
) -> tuple[EngineResult, EngineResult]:
    def result(label: str, token: int, steps: Mapping[str, float]) -> EngineResult:
        return EngineResult(
            label,
            tuple((1, token) for _ in PROMPTS),
            logprobs=tuple((STEP, steps) for _ in PROMPTS),
            version="0.21.0",
        )

    second = result("tested", tokens, {**STEP, "1": logprob})
    if error is not None:
        failed = EngineError("ValueError", error, "load", Death.EXCEPTION)
        second = EngineResult("tested", error=failed, version="0.21.0")
    return result("reference", 1, STEP), second


def verdict(answer: tuple[EngineResult, EngineResult]) -> CaseVerdict:
    return judge(observe("MD014", "marlin", False, run=lambda requests: list(answer)).evidence).verdict


def test_the_same_answers_are_clean() -> None:
    assert verdict(results()) is CaseVerdict.CLEAN
    assert verdict(results(logprob=-0.3)) is CaseVerdict.CLEAN


@pytest.mark.parametrize(
    "changed",
    [{"tokens": 2}, {"logprob": -0.4}, {"logprob": float("nan")}, {"logprob": "nan"}, {"error": "no scale"}],
)
def test_other_answers_are_noticed(changed: dict[str, Any]) -> None:
    assert verdict(results(**changed)) is CaseVerdict.REPRODUCED


def test_a_reference_that_fails_proves_nothing() -> None:
    _, failed = results(error="out of memory")
    assert verdict((failed, failed)) is CaseVerdict.ERROR


def test_answers_without_logprobs_prove_nothing() -> None:
    first, second = results()
    assert verdict((first, replace(second, logprobs=None))) is CaseVerdict.ERROR


def test_what_the_engines_are_given() -> None:
    seen: list[EngineRequest] = []
    found: dict[str, tuple[str, ...]] = {}

    def run(requests: list[EngineRequest]) -> list[EngineResult]:
        seen.extend(requests)
        for one in requests:
            found[one.label] = tuple(dict.fromkeys(finding.id for finding in lint(Path(one.model)).findings))
        return list(results())

    fault = GlobalScaleMismatch()
    parameters = fault.parameters.model_validate({"moe_backend": "emulation"}).model_dump()
    case = Case("MD014", "faulty", Tier.ENGINE, parameters)
    assert fault.has_point(Tier.ENGINE, parameters)
    assert not fault.has_point(Tier.MODEL, parameters)
    observe(case.scenario, "emulation", fault.faulty(case), run=run)
    assert found == {"reference": (), "tested": ("MD014",)}
    assert all(one.arguments["moe_backend"] == "emulation" for one in seen)
    observe(case.scenario, "emulation", fault.fixed(case), run=run)
    assert found == {"reference": (), "tested": ()}


@pytest.mark.parametrize("id", CHECKPOINTS)
def test_the_linter_names_the_damage_and_not_the_repair(id: str, tmp_path: Path) -> None:
    said = []
    for number, change in enumerate(CHECKPOINTS[id]):
        folder = write_qwen3_moe(tmp_path / str(number), scheme="nvfp4", change=change)
        said.append({one.id for one in lint(folder).findings})
    assert said == [set(), {id}, set()]


def test_the_damaged_checkpoint_means_the_same_numbers(tmp_path: Path) -> None:
    tensors = [
        load_file(
            write_qwen3_moe(tmp_path / str(number), scheme="nvfp4", change=change) / "model.safetensors"
        )
        for number, change in enumerate(CHECKPOINTS["MD014"])
    ]
    up = [dequantize(projection(one, "up", 8)) for one in tensors]
    down = [dequantize(projection(one, "down", 8)) for one in tensors]
    assert torch.equal(up[0], up[1])
    assert torch.equal(down[0], down[1])
    # The repair moves a factor of two from one matrix to the other.
    assert torch.equal(up[2], up[0] * 2)
    assert torch.equal(down[2], down[0] / 2)
    scale = "model.layers.1.mlp.experts.3.down_proj.input_scale"
    assert torch.equal(tensors[2][scale], tensors[0][scale] * 2), "what comes in is twice as large, too"
