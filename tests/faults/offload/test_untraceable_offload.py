"""MD005: tracing the control, the fix and a release's own code; rounding; the claims on speed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.bench import offload as bench
from moedoctor.faults.offload.untraceable_offload import UntraceableOffload
from moedoctor.faults.offload.untraceable_offload_lab import (
    FILE,
    claimed_on_gpu,
    distance,
    fixed,
    observe,
)
from moedoctor.fixes.offloader import Offload, offload
from moedoctor.interfaces import Measurement
from moedoctor.results import Case, CaseResult, CaseVerdict, ClaimVerdict, Observation, Tier, UnavailableError
from moedoctor.scenario.targets import load_targets
from moedoctor.upstream.releases.release_source import ReleaseSource, SourceError
from tests.faults.offload.cases import run_case

ROOT = Path(__file__).parents[3]
SMALL = {"layers": 3, "experts": 2, "hidden": 16, "intermediate": 16}


def test_forward_by_state_dict_is_traced_or_not_by_this_torch_and_ours_always() -> None:
    fault = UntraceableOffload()
    control, fix = (run_case(fault, name, **SMALL) for name in ("faulty", "fixed"))
    assert (fix.verdict, fix.evidence["graphs"]) == (CaseVerdict.CLEAN, 1)
    if control.verdict is CaseVerdict.CLEAN:
        assert "the failure was seen with torch 2.10.0 to 2.12.1 and 2.14.0 to 2.15.0" in (
            fault.absent([control, fix]) or ""
        )
    else:
        assert "setattr" in control.evidence["error"]
        assert fault.absent([control, fix]) is None


RELEASE = """
class UVAOffloader(BaseOffloader):
    def _maybe_offload_to_cpu(self, module: nn.Module, prefix: str = "") -> nn.Module:
        device = next(module.parameters()).device
        if device == torch.device("cpu"):
            return module
        for name, p in module.named_parameters():
            if {skip} or not any(f".{{part}}." in f".{{name}}." for part in self.cpu_offload_params):
                continue
            self.cpu_offload_bytes += p.nbytes
        original = module.forward

        def forward(*args, **kwargs):
            module.forward = original
            state = {{key: {value} for key, value in {state}}}
            output = functional_call(module, state, args=args, kwargs=kwargs, tie_weights=False)
            module.forward = forward
            return output

        module.forward = forward
        return module
"""


def run_release(tmp_path: Path, **changed: str) -> CaseResult:
    given = {"skip": "False", "value": "value", "state": "module.named_parameters()", **changed}
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    file.write_text(changed.get("source") or RELEASE.format(**given), encoding="utf-8")
    source = ReleaseSource(tmp_path)
    return run_case(UntraceableOffload(), "vllm@0.21.0", Tier.LIBRARY, source, **SMALL)


@pytest.mark.parametrize(
    ("changed", "verdict", "figure"),
    [
        ({}, CaseVerdict.CLEAN, "torch "),
        ({"skip": 'p.device.type == "cpu"'}, CaseVerdict.CLEAN, "torch "),
        (
            {"state": "(list(module.named_parameters()), breakpoint())[0]"},
            CaseVerdict.REPRODUCED,
            "torch ",
        ),
        ({"value": "value * 2"}, CaseVerdict.REPRODUCED, "compiles, and gives other numbers"),
    ],
    ids=["traced", "from a GPU only", "a broken graph", "other numbers"],
)
def test_a_release_is_judged_by_its_own_code(
    tmp_path: Path, changed: dict[str, str], verdict: CaseVerdict, figure: str
) -> None:
    case = run_release(tmp_path, **changed)
    assert case.verdict is verdict
    assert case.figure.startswith(figure)


def test_releases_that_cannot_be_judged(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="offloads none of the experts' weights"):
        run_release(tmp_path / "none", skip="True")
    with pytest.raises(SourceError, match="no function UVAOffloader"):
        run_release(tmp_path / "other", source="class UVAOffloader: ...\n")
    with pytest.raises(UnavailableError, match="vllm is not installed here"):
        run_case(UntraceableOffload(), "installed", Tier.LIBRARY, **SMALL)


@pytest.mark.parametrize("number", [0, 1])
def test_parameters_say_gpu_only_in_the_loop_over_them(number: int) -> None:
    layer = torch.nn.Linear(2, 2)
    cpu = torch.device("cpu")
    true = [layer.weight, layer.bias]
    with claimed_on_gpu(layer):
        assert next(layer.parameters()).device == cpu
        for parameter in (parameter for _, parameter in layer.named_parameters()):
            assert parameter.device.type == "cuda"
            parameter.data = torch.ones_like(parameter.data)
            if parameter is true[number]:
                break
        else:
            pytest.fail("the loop gives the true parameters")
    assert [parameter.min() == 1 for parameter in true] == [True, number == 1]
    assert all(type(parameter) is torch.nn.Parameter and parameter.device == cpu for parameter in true)
    assert {"parameters", "named_parameters"}.isdisjoint(vars(layer)), "the forward sees the module's own"


TRACED = {"torch": "2.13.0", "error": None, "telling_line": None, "graphs": 1, "same_bits": True}
OTHERS = {"same_bits": False, "distance": 0.3, "wrong_weights_distance": 0.2, "allowed_distance": 0.02}


@pytest.mark.parametrize(
    ("evidence", "verdict"),
    [
        (OTHERS, CaseVerdict.REPRODUCED),
        ({**OTHERS, "distance": 0.01}, CaseVerdict.CLEAN),
        ({**OTHERS, "distance": 0.01, "allowed_distance": 0.0}, CaseVerdict.REPRODUCED),
        ({**OTHERS, "distance": float("nan")}, CaseVerdict.REPRODUCED),
        ({**OTHERS, "distance": "nan"}, CaseVerdict.REPRODUCED),  # as a report holds it
    ],
)
def test_rounding_by_the_compiler_is_not_a_failure(evidence: Any, verdict: CaseVerdict) -> None:
    case = Case("MD005", "fixed", Tier.MODEL, {})
    assert UntraceableOffload().judge(case, Observation({**TRACED, **evidence})).verdict is verdict


def test_a_nan_in_a_later_pass_is_not_a_small_difference() -> None:
    expected = torch.ones(2, 2)
    assert distance([expected, expected + 0.5], expected) == 1.0
    assert math.isnan(distance([expected + 0.5, expected * torch.nan], expected))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_wrong_weights_in_one_compiled_layer_are_more_than_rounding(number: int) -> None:
    parameters = UntraceableOffload().parameters(compiler="aot_eager", layers=3)

    def exchange(stack: torch.nn.Sequential) -> Any:
        stack[number].experts.load_state_dict(stack[(number + 1) % 3].experts.state_dict())
        return fixed(stack)

    for apply, verdict in ((fixed, CaseVerdict.CLEAN), (exchange, CaseVerdict.REPRODUCED)):
        observation = observe(parameters, "cpu", apply)
        assert 0 < observation.evidence["allowed_distance"] < observation.evidence["wrong_weights_distance"]
        case = Case("MD005", "fixed", Tier.MODEL, {})
        assert UntraceableOffload().judge(case, observation).verdict is verdict
    if number == 0:
        eager = observe(parameters.model_copy(update={"compiler": "eager"}), "cpu", fixed)
        assert eager.evidence["allowed_distance"] == 0


def test_only_a_torch_that_traced_every_control_makes_the_failure_absent() -> None:
    fault = UntraceableOffload()
    refused = {"torch": "2.13.0", "error": "setattr", "telling_line": "setattr", "graphs": 0}

    def case(subject: str, evidence: dict[str, Any]) -> CaseResult:
        return CaseResult(subject, Tier.MODEL, {}, CaseVerdict.CLEAN, evidence)

    assert fault.absent([case("faulty", TRACED), case("fixed", refused)]) is not None
    assert fault.absent([case("faulty", TRACED), case("faulty", refused)]) is None
    assert fault.absent([case("fixed", TRACED)]) is None
    assert fault.conclude([case("faulty", refused)]) == {"torch": "2.13.0", "dynamo": "setattr"}


def judge_speed(key: str, limit: float, times: Mapping[str, float], wrong: str = "") -> Any:
    """Judge these milliseconds a pass; the first way is the baseline, `wrong` gave a wrong result."""
    first = next(iter(times))

    def spread(value: float) -> dict[str, float]:
        return {"median": value, "p20": value, "p80": value, "samples": 5}

    rows = [
        {
            "way": way,
            "ms": spread(value),
            "gb_per_s": 5000 / value,
            "over_ours": None if way == first else spread(value / times[first]),
        }
        for way, value in times.items()
        if way != wrong
    ]
    figures = {
        "right": {way: way != wrong for way in times},
        "whose": dict.fromkeys(times, "vLLM 0.21.0"),
        "rows": rows,
        "pinned_gb_per_s": {"median": 55.0},
    }
    (test,) = (test for test in UntraceableOffload.claims if test.key == key)
    (name,) = test.thresholds
    return test.judge([], [Measurement("", Observation(figures))], {name: limit})


CONFIRMED, REFUTED, UNTESTED = ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED, ClaimVerdict.UNTESTED
CALLS = {"ours": 100.0, "functional_call": 150.0, "functional_call_pinned": 110.0}


@pytest.mark.parametrize(
    ("key", "limit", "times", "wrong", "verdict"),
    [
        ("bandwidth", 0.9, {"ours": 100.0}, "", CONFIRMED),
        ("bandwidth", 0.92, {"ours": 100.0}, "", REFUTED),
        ("against_functional_call", 1.5, CALLS, "", CONFIRMED),
        ("against_functional_call", 1.6, CALLS, "", REFUTED),
        ("against_uva", 1.0, {"ours": 100.0, "uva": 100.0}, "", CONFIRMED),
        ("against_prefetch", 0.99, {"ours": 100.0, "prefetch": 98.0}, "", REFUTED),
        ("against_prefetch", 1.0, {"ours": 1.0, "prefetch": 2.0}, "prefetch", UNTESTED),
        ("against_prefetch", 1.0, {"ours": 1.0, "prefetch": 2.0}, "ours", REFUTED),
        ("one_token", 1.0, {"ours": 100.0, "uva": 10.0}, "", CONFIRMED),
        ("one_token", 1.0, {"ours": 100.0, "uva": 110.0}, "", REFUTED),
        ("resident", 0.01, {"resident": 100.0, "ours_budget_0": 100.9}, "", CONFIRMED),
        ("resident", 0.01, {"resident": 100.0, "ours_budget_0": 101.1}, "", REFUTED),
        ("resident", 0.01, {"resident": 100.0, "ours_budget_0": 98.0}, "", REFUTED),
    ],
)
def test_speed_is_judged_by_the_figures(
    key: str, limit: float, times: Mapping[str, float], wrong: str, verdict: ClaimVerdict
) -> None:
    assert judge_speed(key, limit, times, wrong).verdict is verdict


def test_pinned_against_pageable_decides_and_unpinned_against_unpinned_is_given() -> None:
    times = {"ours": 100.0, "ours_unpinned": 400.0, "functional_call": 500.0, "functional_call_pinned": 110.0}
    judgement = judge_speed("against_functional_call", 1.5, times)
    assert judgement.verdict is CONFIRMED
    assert judgement.reason == (
        "ours from pinned memory is 5.00 times as fast as it is from pageable memory, 1.10 times as fast"
        " as it is from pinned memory; both from pageable memory: 1.25 times as fast"
    )
    wrong = judge_speed("against_functional_call", 1.5, times, "ours_unpinned")
    assert (wrong.verdict, wrong.reason) == (REFUTED, "wrong result, not timed: ours_unpinned")


def test_every_claim_is_measured_under_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(
        bench, "compare", lambda names, device, **how: asked.update({names: how["tokens"]}) or {}
    )
    monkeypatch.setattr(bench, "pinned_bandwidth", lambda *given: bench.Spread.of([55.0]))
    for test in UntraceableOffload.claims:
        assert test.measure is not None
        (unit,) = test.units(())
        figures = test.measure(unit, "cpu", {}).evidence
        assert ("pinned_gb_per_s" in figures) is (test.key == "bandwidth")
    assert asked[("ours", "ours_unpinned", "functional_call", "functional_call_pinned")] == bench.TOKENS
    assert asked[("ours", "uva")] == 1, "the claim on one token comes after that on UVA"
    assert len(asked) == 5


@pytest.mark.parametrize(("name", "pinned"), [("ours", True), ("ours_unpinned", False)])
@torch.no_grad()
def test_both_are_the_offloader_and_give_the_bits_of_the_stack(
    name: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def recorded(*given: Any, **options: Any) -> Offload:
        asked.append(options["pin"])
        return offload(*given, **options)

    monkeypatch.setattr(bench, "offload", recorded)
    shape = bench.StackShape(layers=3, experts=4, hidden=128, intermediate=64, top_k=2, dtype=torch.float32)
    x = torch.randn(8, shape.hidden, generator=torch.Generator().manual_seed(1))  # [T, H]
    runner = bench.make_runner(name, shape, "cpu")
    assert asked == [pinned]
    assert runner.keep.report().host_bytes == shape.layers * shape.layer_bytes
    expected = bench.make_runner("resident", shape, "cpu").stack(x)  # [T, H]
    assert all(torch.equal(runner.stack(x), expected) for _ in range(2))


@pytest.mark.parametrize("file", ["untraceable_offload.yaml", "engine/offload_speed.yaml"])
def test_the_claim_says_what_is_pinned_and_promises_nothing_about_wsl(file: str) -> None:
    (scenario,) = load_targets((str(ROOT / "scenarios" / file),))
    (text,) = (claim.text for claim in scenario.claims if claim.key == "against_functional_call")
    assert "with pinned memory" in text
    assert "from pageable memory" in text
    assert not any("WSL" in claim.text for claim in scenario.claims)


def test_the_guide_holds_the_reports_figures() -> None:
    report = ROOT / "reports" / "nvidia-h200" / "offload_speed.json"
    (scenario,) = json.loads(report.read_text(encoding="utf-8"))["scenarios"]
    guide = " ".join((ROOT / "docs" / "wsl.md").read_text(encoding="utf-8").split())

    def over_ours(text: str) -> dict[str, float]:
        (claim,) = (claim for claim in scenario["claims"] if text in claim["text"])
        rows = claim["evidence"]["rows"]
        return {row["way"]: row["over_ours"]["median"] for row in rows if row["over_ours"]}

    assert "not measured" not in guide
    times = over_ours("without UVA that copies from pageable")
    pageable, pinned = times["functional_call"], times["functional_call_pinned"]
    unpinned = pageable / times["ours_unpinned"]
    for sentence in (
        f"the fix with pinned memory is {pageable:.1f} times as fast as copies from pageable memory",
        f"as on WSL without pinning, it is {unpinned:.2f} times as fast: no gain",
        f"With pinned memory on both sides it is {pinned:.2f} times as fast",
        f"takes {over_ours('For one token')['uva']:.3f} of its time",
    ):
        assert sentence in guide
