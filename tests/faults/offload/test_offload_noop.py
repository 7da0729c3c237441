"""MD013: the mark that outlives its memory, in our restatement and in functions shaped like two releases'."""

from __future__ import annotations

from pathlib import Path

import pytest

from moedoctor.faults.offload.offload_noop import OffloadNoop
from moedoctor.faults.offload.offload_noop_engine import evidence
from moedoctor.faults.offload.offload_noop_lab import Reload, observe, rebinding, remembering, upstream
from moedoctor.results import Case, CaseVerdict, Death, Observation, Tier
from moedoctor.upstream.engine.engine import EngineError, EngineResult
from moedoctor.upstream.engine.log import LogFacts
from moedoctor.upstream.plugin.offload_fix import forgetting
from moedoctor.upstream.releases.release_source import ReleaseSource

CASE = Case("MD013", "faulty", Tier.MODEL, {"cause": "repacked"})
CONTEXT = """
from contextlib import contextmanager


@contextmanager
def device_loading_context(module, target_device):
    mine = [name for name, p in module.named_parameters() if getattr(p, "_vllm_is_uva_offloaded", False)]
    yield module
    for name, p in module.named_parameters():
        if name in mine and not getattr(p, "_vllm_is_uva_offloaded", False):
            p.data = get_accelerator_view_from_cpu_tensor(p.data.to(device="cpu"))
            p._vllm_is_uva_offloaded = True
"""
NEW_OBJECT = """
def replace_parameter(layer, name, new):
    setattr(layer, name, torch.nn.Parameter(new, requires_grad=False))
"""
SAME_OBJECT = """
def replace_parameter(layer, name, new):
    old = getattr(layer, name)
    if old.shape == new.shape and old.dtype == new.dtype:
        old.data.copy_(new)
    else:
        old.data = new
"""


def release(tmp_path: Path, replace: str) -> ReleaseSource:
    for file, text in (("utils.py", replace), ("model_loader/utils.py", CONTEXT)):
        path = tmp_path / "vllm/model_executor" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return ReleaseSource(tmp_path)


def verdict(seen: Observation) -> CaseVerdict:
    return OffloadNoop().judge(CASE, seen).verdict


def test_control_and_fix() -> None:
    fault = OffloadNoop()
    assert verdict(fault.observe(CASE, fault.faulty(CASE))) is CaseVerdict.REPRODUCED
    fixed = fault.observe(CASE, fault.fixed(CASE))
    assert verdict(fixed) is CaseVerdict.CLEAN
    assert fixed.evidence["device_bytes"] == 0


def test_a_release_that_registers_a_new_parameter_is_clean(tmp_path: Path) -> None:
    assert verdict(observe(release(tmp_path, NEW_OBJECT))) is CaseVerdict.CLEAN


def test_a_release_that_keeps_the_parameter_leaves_what_changed_on_the_gpu(tmp_path: Path) -> None:
    source = release(tmp_path, SAME_OBJECT)
    seen = observe(source)
    assert verdict(seen) is CaseVerdict.REPRODUCED
    assert [(one["parameter"], one["marked"], one["memory"]) for one in seen.evidence["weights"]] == [
        ("w13_weight", True, "device"),
        ("w2_weight", True, "host"),
    ]
    assert seen.evidence["host_bytes_with_plug_in"] == seen.evidence["asked_bytes"]
    theirs = upstream(source)
    assert verdict(observe(Reload(theirs.replace, forgetting(theirs.context)))) is CaseVerdict.CLEAN


def test_weights_that_are_left_alone_are_not_copied_again() -> None:
    """The mark of what nobody touched stays, so the fix costs nothing there."""
    made: list[int] = []

    def idle(view: object) -> object:
        return lambda layer, name, new: made.append(1)

    seen = observe(Reload(idle, forgetting(remembering)))  # type: ignore[arg-type]
    assert made == [1, 1]
    assert verdict(seen) is CaseVerdict.CLEAN


def test_the_points_and_their_tiers() -> None:
    fault = OffloadNoop()
    assert fault.has_point(Tier.MODEL, {"cause": "repacked"})
    assert fault.has_point(Tier.ENGINE, {"cause": "v2_runner"})
    assert not fault.has_point(Tier.ENGINE, {"cause": "repacked"})
    assert not fault.has_point(Tier.LIBRARY, {"cause": "v2_runner"})


def test_the_plan_holds_each_point_at_its_own_tiers(tmp_path: Path) -> None:
    from moedoctor.runner.plan import Options, plan
    from moedoctor.scenario.targets import builtin_file, load_scenario

    scenario = load_scenario(builtin_file("offload_noop"))
    options = Options(sources={"vllm@0.33.0": "vllm.whl", "vllm@0.32.0": "moe_C.so"})
    planned = plan([scenario], options, {})[0].cases
    points = {(one.case.subject, one.case.tier.value, one.case.parameters["cause"]) for one in planned}
    assert points == {
        *((subject, "model", "repacked") for subject in ("faulty", "fixed")),
        *((subject, "engine", "v2_runner") for subject in ("faulty", "fixed")),
        ("installed", "library", "repacked"),
        *((f"vllm@{release}", "library", "repacked") for release in ("0.33.0", "0.32.0")),
    }
    skipped = {(one.case.subject, one.case.tier.value): one.skip for one in planned}
    assert skipped["vllm@0.33.0", "library"] is None
    assert "in a wheel, not in a shared object" in str(skipped["vllm@0.32.0", "library"])
    assert "vllm is not installed here" in str(skipped["fixed", "engine"])


def engine(place: str) -> EngineResult:
    parameters = [
        {"name": "layers.0.experts.w13_weight", "bytes": 64, "place": place, "marked": place != "device"},
        {"name": "layers.0.experts.w13_weight_scale", "bytes": 8, "place": "device", "marked": False},
    ]
    return EngineResult(
        "x", tokens=((1,),), version="0.21.0", probe={"parameters": parameters}, log=LogFacts()
    )


@pytest.mark.parametrize(
    ("place", "expected"),
    [("host", CaseVerdict.CLEAN), ("cpu", CaseVerdict.CLEAN), ("device", CaseVerdict.REPRODUCED)],
)
def test_an_engine_is_judged_by_where_its_weights_are(place: str, expected: CaseVerdict) -> None:
    seen = evidence(engine(place), {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert seen["asked_bytes"] == 64
    assert verdict(Observation(seen)) is expected


def test_an_engine_that_did_not_run_is_no_evidence() -> None:
    error = EngineError("ValueError", "no", "load", Death.EXCEPTION)
    with pytest.raises(RuntimeError, match="ValueError: no"):
        evidence(EngineResult("x", error=error), {})
    empty = evidence(EngineResult("x", probe={"parameters": []}), {})
    assert verdict(Observation(empty)) is CaseVerdict.ERROR


def test_the_control_is_the_same_without_the_plug_in() -> None:
    assert verdict(observe(Reload(rebinding, remembering))) is CaseVerdict.REPRODUCED
