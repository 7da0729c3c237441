"""The engine tier of MD014, MD015, MD017 and MD018 with engines that are not real."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.faults.quantization import checkpoint_changes
from moedoctor.faults.quantization.checkpoint_changes import CHECKPOINTS
from moedoctor.faults.quantization.checkpoint_engine import PROMPTS, judge, observe
from moedoctor.faults.quantization.gate_up_order import GateUpOrder
from moedoctor.faults.quantization.global_scale_mismatch import GlobalScaleMismatch
from moedoctor.faults.quantization.scale_layout import ScaleLayout
from moedoctor.faults.quantization.tiny_checkpoint import projection
from moedoctor.reference.checkpoints import Change, Tensors, write_qwen3_moe
from moedoctor.reference.nvfp4 import Nvfp4, dequantize
from moedoctor.results import Case, CaseVerdict, Death, Tier
from moedoctor.upstream.engine.engine import EngineError, EngineRequest, EngineResult

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


@pytest.mark.parametrize("id", ["MD014", "MD015"])
def test_the_linter_names_the_damage_and_not_the_repair(id: str, tmp_path: Path) -> None:
    said = []
    for number, change in enumerate(CHECKPOINTS[id]):
        folder = write_qwen3_moe(tmp_path / str(number), scheme="nvfp4", change=change)
        said.append({one.id for one in lint(folder).findings})
    assert said == [set(), {id}, set()]


def written(folder: Path, *changes: Change) -> list[Tensors]:
    return [
        load_file(write_qwen3_moe(folder / str(number), scheme="nvfp4", change=one) / "model.safetensors")
        for number, one in enumerate(changes)
    ]


def test_the_damaged_checkpoint_means_the_same_numbers(tmp_path: Path) -> None:
    tensors = written(tmp_path, *CHECKPOINTS["MD014"])
    up = [dequantize(projection(one, "up", 8)) for one in tensors]
    down = [dequantize(projection(one, "down", 8)) for one in tensors]
    assert torch.equal(up[0], up[1])
    assert torch.equal(down[0], down[1])
    # The repair moves a factor of two from one matrix to the other.
    assert torch.equal(up[2], up[0] * 2)
    assert torch.equal(down[2], down[0] / 2)
    scale = "model.layers.1.mlp.experts.3.down_proj.input_scale"
    assert torch.equal(tensors[2][scale], tensors[0][scale] * 2), "what comes in is twice as large, too"


@pytest.mark.parametrize(("id", "changed"), [("MD017", {"gate", "up"}), ("MD018", {"gate", "up", "down"})])
def test_a_layout_is_damaged_in_every_expert_and_wholly_repaired(
    id: str, changed: set[str], tmp_path: Path
) -> None:
    right, damaged, repaired = written(tmp_path, *CHECKPOINTS[id])
    assert right.keys() == damaged.keys() == repaired.keys()
    for name, tensor in right.items():
        assert torch.equal(repaired[name].float(), tensor.float()), name
        projection_of = next((one for one in ("gate", "up", "down") if f".{one}_proj." in name), None)
        if projection_of in changed and name.endswith(".weight_scale"):
            assert not torch.equal(damaged[name].float(), tensor.float()), name
    assert not {one.id for one in lint(tmp_path / "1").findings}, "no linter can see it"


def test_a_repair_that_forgets_the_scales_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = checkpoint_changes.up_first

    def careless(w13: Nvfp4) -> Nvfp4:
        return replace(whole(w13), block_scales=w13.block_scales)

    monkeypatch.setattr(checkpoint_changes, "up_first", careless)
    right, repaired = written(tmp_path, CHECKPOINTS["MD017"][0], CHECKPOINTS["MD017"][2])
    name = "model.layers.0.mlp.experts.0.gate_proj.weight_scale"
    assert not torch.equal(right[name].float(), repaired[name].float())


@pytest.mark.parametrize("fault", [GateUpOrder(), ScaleLayout()])
def test_a_point_with_a_backend_is_for_engines_alone(fault: GateUpOrder | ScaleLayout) -> None:
    tensors = fault.parameters.model_validate({}).model_dump()
    engines = {**tensors, "moe_backend": "marlin"}
    tiers = {tier for own in fault.tiers.values() for tier in own}
    assert {tier for tier in tiers if fault.has_point(tier, engines)} == {Tier.ENGINE}
    assert {tier for tier in tiers if fault.has_point(tier, tensors)} == tiers - {Tier.ENGINE}
    seen = observe(fault.id, "marlin", False, run=lambda requests: list(results(tokens=2)))
    case = Case(fault.id, "faulty", Tier.ENGINE, engines)
    assert fault.judge(case, seen).verdict is CaseVerdict.REPRODUCED
