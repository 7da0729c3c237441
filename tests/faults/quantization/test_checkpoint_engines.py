"""The engine tier of MD014, MD015, MD017 and MD018 with fake engines."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.faults.quantization import checkpoint_lab
from moedoctor.faults.quantization.checkpoint_lab import PROMPTS, Changes, compare_engines, stack_projection
from moedoctor.faults.quantization.gate_up_order import GateUpOrder
from moedoctor.faults.quantization.gate_up_order_lab import CHANGES as MD017
from moedoctor.faults.quantization.global_scale_mismatch import GlobalScaleMismatch
from moedoctor.faults.quantization.global_scale_mismatch_lab import CHANGES as MD014
from moedoctor.faults.quantization.input_scale_missing import InputScaleMissing
from moedoctor.faults.quantization.input_scale_missing_lab import CHANGES as MD015
from moedoctor.faults.quantization.scale_layout import ScaleLayout
from moedoctor.faults.quantization.scale_layout_lab import CHANGES as MD018
from moedoctor.reference.checkpoints import Change, Tensors, write_qwen3_moe
from moedoctor.reference.nvfp4 import dequantize
from moedoctor.results import Case, CaseVerdict, Death, Evidence, Tier
from moedoctor.upstream.engine.engine import EngineError, EngineRequest, EngineResult

STEP = {"1": -0.1, "2": -2.0}


def results(
    tokens: int = 1, logprob: Any = -0.1, error: str | None = None
) -> tuple[EngineResult, EngineResult]:
    def result(label: str, token: int, steps: Mapping[str, float]) -> EngineResult:
        tokens, logprobs = ((1, token),) * len(PROMPTS), ((STEP, steps),) * len(PROMPTS)
        return EngineResult(label, tokens, logprobs=logprobs, version="0.21.0")

    second = result("tested", tokens, {**STEP, "1": logprob})
    if error is not None:
        failed = EngineError("ValueError", error, "load", Death.EXCEPTION)
        second = EngineResult("tested", error=failed, version="0.21.0")
    return result("reference", 1, STEP), second


def compare(answer: tuple[EngineResult, EngineResult], changes: Changes = MD014) -> Evidence:
    return compare_engines(changes, "marlin", repaired=False, run=lambda requests: list(answer))


@pytest.fixture
def _unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no checkpoints, because no engine reads them."""
    monkeypatch.setattr(checkpoint_lab, "write_qwen3_moe", lambda folder, **given: folder)


def verdict(answer: tuple[EngineResult, EngineResult]) -> CaseVerdict:
    return GlobalScaleMismatch().judge_engines(compare(answer)).verdict


RIGHT, FAILED = results(), results(error="out of memory")[1]


@pytest.mark.usefixtures("_unwritten")
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (RIGHT, CaseVerdict.CLEAN),
        (results(logprob=-0.3), CaseVerdict.CLEAN),
        (results(tokens=2), CaseVerdict.REPRODUCED),
        (results(logprob=-0.4), CaseVerdict.REPRODUCED),
        (results(logprob=float("nan")), CaseVerdict.REPRODUCED),
        (results(logprob="nan"), CaseVerdict.REPRODUCED),
        (results(error="no scale"), CaseVerdict.REPRODUCED),
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
    tensors = written(tmp_path, *MD014)
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
    right, damaged, repaired = written(tmp_path, *changes)
    assert right.keys() == damaged.keys() == repaired.keys()
    for name, tensor in right.items():
        assert torch.equal(repaired[name].float(), tensor.float()), name
        projection_of = next((part for part in ("gate", "up", "down") if f".{part}_proj." in name), None)
        if projection_of in changed and name.endswith(".weight_scale"):
            assert not torch.equal(damaged[name].float(), tensor.float()), name


@pytest.mark.usefixtures("_unwritten")
@pytest.mark.parametrize("fault", [GateUpOrder(), ScaleLayout(), GlobalScaleMismatch(), InputScaleMissing()])
def test_a_point_with_a_backend_is_only_for_engines(fault, monkeypatch):
    tensors = fault.parameters.model_validate({}).model_dump()
    engines = {**tensors, "moe_backend": "emulation"}
    tiers = {tier for own in fault.tiers.values() for tier in own}
    assert {tier for tier in tiers if fault.has_point(tier, engines)} == {Tier.ENGINE}
    assert {tier for tier in tiers if fault.has_point(tier, tensors)} == tiers - {Tier.ENGINE}
    asked: list[tuple[str, bool]] = []

    def compare_instead(changes: Changes, moe_backend: str, *, repaired: bool) -> Evidence:
        asked.append((moe_backend, repaired))
        return compare(results(tokens=2), changes)

    monkeypatch.setattr(checkpoint_lab, "compare_engines", compare_instead)
    case, fixed = (Case(fault.id, subject, Tier.ENGINE, engines) for subject in ("faulty", "fixed"))
    assert fault.judge(case, fault.observe(case, None)).verdict is CaseVerdict.REPRODUCED
    fault.observe(fixed, None)
    assert asked == [("emulation", False), ("emulation", True)]
