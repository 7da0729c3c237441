"""MD005: tracing the control, the fix and a release's own code; rounding."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_cases import judge, run
from vllm_stub import write_files

from moedoctor.faults.offload import untraceable_offload_lab
from moedoctor.faults.offload.untraceable_offload import UntraceableOffload
from moedoctor.results import CaseResult, CaseVerdict, ScenarioVerdict, Tier, UnavailableError
from moedoctor.runner.judge import decide
from moedoctor.upstream.releases.release_source import ReleaseSource, SourceError

SMALL = {"layers": 3, "experts": 2, "hidden": 16, "intermediate": 16}


@pytest.mark.slow
def test_forward_by_state_dict_is_traced_or_not_by_this_torch_and_ours_always() -> None:
    fault = UntraceableOffload()
    control, fix = (run(fault, name, **SMALL) for name in ("faulty", "fixed"))
    assert (fix.verdict, fix.evidence["graphs"]) == (CaseVerdict.CLEAN, 1)
    assert fix.evidence.get("allowed_distance") == 0, "nothing is compiled, so nothing may be rounded"
    if control.verdict is CaseVerdict.CLEAN:
        assert "seen with torch 2.10.0 to 2.12.1 and 2.14.0 to 2.15.0" in str(fault.absent([control, fix]))
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
    text = changed.get("source") or RELEASE.format(**given)
    write_files(tmp_path, {untraceable_offload_lab.FILE: text})
    source = ReleaseSource(tmp_path)
    return run(UntraceableOffload(), "vllm@0.21.0", Tier.LIBRARY, source, **SMALL)


@pytest.mark.parametrize(
    ("changed", "verdict", "figure"),
    [
        ({"skip": 'p.device.type == "cpu"'}, CaseVerdict.CLEAN, "torch "),
        ({"state": "(list(module.named_parameters()), breakpoint())[0]"}, CaseVerdict.REPRODUCED, "torch "),
        ({"value": "value * 2"}, CaseVerdict.REPRODUCED, "compiles, and gives other numbers"),
    ],
    ids=["from a GPU only", "a broken graph", "other numbers"],
)
def test_a_release_is_judged_by_its_own_code(tmp_path, changed, verdict, figure):
    case = run_release(tmp_path, **changed)
    assert case.verdict is verdict
    assert case.figure.startswith(figure)


def test_releases_that_cannot_be_judged(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="offloads none of the experts' weights"):
        run_release(tmp_path / "none", skip="True")
    with pytest.raises(SourceError, match="no function UVAOffloader"):
        run_release(tmp_path / "other", source="class UVAOffloader: ...\n")
    with pytest.raises(UnavailableError, match="vllm is not installed here"):
        run(UntraceableOffload(), "installed", Tier.LIBRARY, **SMALL)


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
    assert judge(UntraceableOffload(), {**TRACED, **evidence}).verdict is verdict


def test_a_nan_in_a_later_pass_is_not_a_small_difference() -> None:
    expected, measure = torch.ones(2, 2), untraceable_offload_lab.measure_distance
    assert measure([expected, expected + 0.5], expected) == 1.0
    assert math.isnan(measure([expected + 0.5, expected * torch.nan], expected))


@pytest.mark.parametrize("number", [None, 2])
@pytest.mark.slow
def test_wrong_weights_in_one_compiled_layer_are_more_than_rounding(number: int | None) -> None:
    """The layer `number` has the weights of the next one, or no layer has."""

    def exchange(stack: torch.nn.Sequential) -> Any:
        if number is not None:
            stack[number].experts.load_state_dict(stack[(number + 1) % 3].experts.state_dict())
        return untraceable_offload_lab.fixed(stack)

    parameters = UntraceableOffload().parameters(compiler="aot_eager", **SMALL)
    evidence = untraceable_offload_lab.observe(parameters, "cpu", exchange)
    assert 0 < evidence["allowed_distance"] < evidence["wrong_weights_distance"]
    assert judge(UntraceableOffload(), evidence).verdict is (
        CaseVerdict.CLEAN if number is None else CaseVerdict.REPRODUCED
    )


def test_only_a_torch_that_traced_every_control_makes_the_failure_absent() -> None:
    fault = UntraceableOffload()
    refused = {"torch": "2.13.0", "error": "setattr", "telling_line": "setattr", "graphs": 0}

    def case(subject: str, evidence: dict[str, Any]) -> CaseResult:
        return CaseResult(subject, Tier.MODEL, {}, CaseVerdict.CLEAN, evidence)

    assert fault.absent([case("faulty", TRACED), case("fixed", refused)]) is not None
    assert fault.absent([case("faulty", TRACED), case("faulty", refused)]) is None
    assert fault.absent([case("fixed", TRACED)]) is None
    late = replace(case("faulty", {}), verdict=CaseVerdict.SKIPPED)
    verdict, _ = decide(fault, [case("faulty", TRACED), late], {"faulty": CaseVerdict.REPRODUCED})
    assert verdict is ScenarioVerdict.ABSENT, "of the cases that ran"
    assert fault.conclude([case("faulty", refused)]) == {"torch": "2.13.0", "dynamo": "setattr"}
