"""MD008 on one's own model: two engines compared, without any engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from moedoctor.faults.offload_garbage import OffloadGarbage
from moedoctor.faults.offload_parity import ParityParameters, between_backends, first_parting, judge_model
from moedoctor.faults.offload_parity_engine import compare, fit_together, own_request
from moedoctor.plan import Options, plan_cases
from moedoctor.results import CaseResult, CaseVerdict, Death, Tier
from moedoctor.targets import load_targets
from moedoctor.upstream.engine import EngineError, EngineResult


def died(message: str) -> EngineResult:
    return EngineResult("x", error=EngineError("RuntimeError", message, "load", Death.EXCEPTION))


def probe(*norms: float, digest: str = "") -> dict[str, Any]:
    outputs = [
        {
            "layer": f"layers.{index}",
            "tokens": 4,
            "digest": digest or str(norm),
            "finite": math.isfinite(norm),
            "projection": [norm, 1.0],
        }
        for index, norm in enumerate(norms)
    ]
    return {"layers": len(outputs), "outputs": outputs}


def test_the_first_layer_that_parts() -> None:
    found = first_parting(probe(1.0, 2.0, 3.0), probe(1.0, 2.001, 9.0))
    assert (found["first_bit"], found["first_layer"], found["layers_compared"]) == ("layers.1", "layers.2", 3)
    assert first_parting(probe(1.0), probe(1.0)) == {
        "layers_compared": 1,
        "first_bit": None,
        "first_layer": None,
    }
    broken = first_parting(probe(1.0, 2.0), probe(1.0, math.nan))
    assert (broken["first_layer"], broken["relative_difference"]) == ("layers.1", "not finite")
    assert first_parting(None, probe(1.0))["layers_compared"] == 0


MINE = ParityParameters(mode="eager", model="/models/mine", expected="Paris", moe_backend="marlin")


def test_on_wsls_branch_both_engines_have_its_variables() -> None:
    copies = MINE.model_copy(update={"access": "copies"})
    for offload in (False, True):
        made = own_request(copies, offload=offload, fixes="").environ
        assert made["VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"] == "1"
        assert made["VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"] == "1"
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA" not in own_request(MINE, offload=True, fixes="").environ


def test_backends_are_compared_without_offload() -> None:
    def case(backend: str, text: str, norms: Sequence[float], **more: Any) -> CaseResult:
        parameters = MINE.model_copy(update={"moe_backend": backend, **more})
        control = said(text, [1], norms)
        evidence = compare(control, control, parameters)
        given = parameters.model_dump()
        return CaseResult("installed", Tier.ENGINE, given, CaseVerdict.CLEAN, dict(evidence))

    first = case("marlin", "Paris", (1.0, 2.0, 3.0))
    same, other = case("triton", "Paris", (1.0, 2.0, 3.0)), case("emulation", "Rome", (1.0, 9.0, 3.0))
    copied = case("cutlass", "Oslo", (5.0, 5.0, 5.0), access="copies")
    fixed = case("humming", "Oslo", (5.0, 5.0, 5.0), fixes="offload")
    asked = case("humming", "Oslo", (5.0, 5.0, 5.0), prompt="another")
    (rows,) = between_backends([first, copied, fixed, asked, same, other]).values()
    seen = [(row["backend"], row["beside"], row["same_answer"], row["first_layer"]) for row in rows]
    assert seen == [("triton", "marlin", True, None), ("emulation", "marlin", False, "layers.1")]
    assert between_backends([first]) == {}


def said(text: str, tokens: Sequence[int], norms: Sequence[float] = (1.0, 2.0)) -> EngineResult:
    return EngineResult("x", (tuple(tokens),), (text,), probe=probe(*norms))


@pytest.mark.parametrize(
    ("control", "other", "verdict", "figure"),
    [
        (said("Paris", [1]), said("Paris", [1]), CaseVerdict.CLEAN, "the same tokens"),
        (
            said("Paris", [1]),
            said("word", [2], (1.0, 9.0)),
            CaseVerdict.REPRODUCED,
            "other tokens; .*layers.1",
        ),
        (said("Paris", [1]), said("Paris!", [2]), CaseVerdict.CLEAN, "other tokens after a while"),
        (said("Paris", [1]), said("no", [2]), CaseVerdict.REPRODUCED, "parts: not seen"),
        (died("CUDA out of memory"), said("Paris", [1]), CaseVerdict.CLEAN, "no run without offload"),
        (died("CUDA out of memory"), said("no", [1]), CaseVerdict.REPRODUCED, "not 'Paris' in the answer"),
        (said("Rome", [1]), said("Rome", [1]), CaseVerdict.ERROR, "the control is wrong"),
        (said("Paris", [1]), died("b_scales is not on GPU"), CaseVerdict.REPRODUCED, "with offload: Runtime"),
    ],
)
def test_ones_own_model(
    control: EngineResult, other: EngineResult, verdict: CaseVerdict, figure: str
) -> None:
    import re

    judged = judge_model(compare(control, other, MINE))
    assert judged.verdict is verdict
    assert re.search(figure, judged.figure)


def test_without_a_control_and_an_expectation_nothing_is_judged() -> None:
    parameters = ParityParameters(mode="eager", model="/m")
    judged = judge_model(compare(died("CUDA out of memory"), said("x", [1]), parameters))
    assert judged.verdict is CaseVerdict.ERROR


def test_the_engine_of_ones_own_model_keeps_nothing_of_the_tiny_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moedoctor.upstream.engine import _document

    parameters = MINE.model_copy(update={"cpu_offload_gb": 5.0, "arguments": '{"max_model_len": 512}'})
    arguments = _document(own_request(parameters, offload=True, fixes="offload"))["arguments"]
    assert "kv_cache_memory_bytes" not in arguments
    assert "attention_backend" not in arguments
    assert (arguments["max_model_len"], arguments["cpu_offload_gb"], arguments["moe_backend"]) == (
        512,
        5.0,
        "marlin",
    )
    assert arguments["skip_tokenizer_init"] is False
    assert "cpu_offload_gb" not in _document(own_request(parameters, offload=False, fixes=""))["arguments"]
    assert arguments["model"] == "/models/mine"
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    beside = own_request(parameters.model_copy(update={"model": "mine"}), offload=False, fixes="")
    assert beside.model == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("arguments", "together"),
    [
        ('{"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 1}', True),
        ('{"gpu_memory_utilization": 0.4}', False),
        ('{"gpu_memory_utilization": 0.6, "kv_cache_memory_bytes": 1}', False),
        ("{}", False),
    ],
)
def test_two_engines_run_together_only_where_both_fit(arguments: str, together: bool) -> None:
    assert fit_together(ParityParameters(mode="eager", model="/m", arguments=arguments)) is together


@pytest.mark.parametrize("arguments", ["[1]", "{", "max_model_len=4"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    with pytest.raises(ValidationError, match="must be a JSON object"):
        ParityParameters(arguments=arguments)


def test_the_scenarios_for_ones_own_model_ask_for_engines_and_a_control(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    guide = (root / "docs" / "wsl.md").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(guide.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    for file, engines in ((root / "scenarios/engine/own_model.yaml", 3), (tmp_path / "mine.yaml", 8)):
        (scenario,) = load_targets((str(file),))
        cases = [one.case for one in plan_cases(scenario, OffloadGarbage(), Options(), {})]
        counts = Counter((one.subject, one.tier.value) for one in cases)
        assert counts == {("faulty", "model"): 1, ("fixed", "model"): 1, ("installed", "engine"): engines}
        asked = [one.parameters for one in cases if one.tier is Tier.ENGINE]
        assert all(one["mode"] == "eager" and one["model"] for one in asked)
        assert {"marlin"} < {one["moe_backend"] for one in asked}
        assert {(one["access"], one["fixes"]) for one in asked} >= {("auto", "none"), ("copies", "offload")}
