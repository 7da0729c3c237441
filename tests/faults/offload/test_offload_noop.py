"""MD013: the mark that outlives its memory. MD009: the assertion, and the plug-in's workaround."""

from pathlib import Path

import pytest
from engine_stub import answered, died
from fault_cases import judge, run
from packaging.version import Version
from vllm_stub import write_files

from moedoctor.faults.offload import offload_noop_lab
from moedoctor.faults.offload.offload_noop import OffloadNoop
from moedoctor.faults.offload.offload_noop_lab import collect_engine_evidence
from moedoctor.faults.offload.offload_reinit import OffloadReinit, OffloadReinitParameters
from moedoctor.faults.offload.offload_reinit_lab import FILE, mock_runner, observe, refuse, try_rebuild
from moedoctor.plugin.offload_fix import skip_assertion
from moedoctor.results import CaseResult, CaseVerdict, Tier, UnavailableError
from moedoctor.runner.plan import Options, plan
from moedoctor.scenario.targets import find_builtin_file, load_scenario
from moedoctor.upstream.engine import engine as engine_module
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult
from moedoctor.upstream.releases.release_source import ReleaseSource

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


def run_release(tmp_path: Path, replace: str) -> CaseResult:
    files = {"utils.py": replace, "model_loader/utils.py": CONTEXT}
    write_files(tmp_path, {f"vllm/model_executor/{name}": text for name, text in files.items()})
    return run(OffloadNoop(), "vllm@0.33.0", Tier.LIBRARY, ReleaseSource(tmp_path))


def test_a_release_that_keeps_the_parameter_leaves_changed_weights_on_the_gpu(tmp_path: Path) -> None:
    assert run_release(tmp_path, NEW_OBJECT).verdict is CaseVerdict.CLEAN
    case = run_release(tmp_path, SAME_OBJECT)
    assert case.verdict is CaseVerdict.REPRODUCED
    weights = [(row["parameter"], row["marked"], row["memory"]) for row in case.evidence["weights"]]
    assert weights == [("w13_weight", True, "device"), ("w2_weight", True, "host")]
    assert case.evidence["host_bytes_with_plug_in"] == case.evidence["asked_bytes"]
    names = "releases_run", "repacked_weights_stay_on_the_gpu", "of_these_mended_by_the_plug_in"
    assert OffloadNoop().conclude([case]) == {name: ["0.33.0"] for name in names}


def test_the_plan_holds_each_point_at_its_own_tiers() -> None:
    scenario = load_scenario(find_builtin_file("offload_noop"))
    options = Options(sources={"vllm@0.33.0": "vllm.whl", "vllm@0.32.0": "moe_C.so"})
    planned = plan([scenario], options, {})[0].cases
    points = {(item.case.subject, item.case.tier.value, item.case.parameters["cause"]) for item in planned}
    assert points == {
        *((subject, "model", "repacked") for subject in ("faulty", "fixed")),
        *((subject, "engine", "repacked") for subject in ("faulty", "fixed")),
        *((subject, "engine", "v2_runner") for subject in ("faulty", "fixed")),
        ("installed", "library", "repacked"),
        *((f"vllm@{release}", "library", "repacked") for release in ("0.33.0", "0.32.0")),
    }
    skipped = {(item.case.subject, item.case.tier.value): item.skip for item in planned}
    assert skipped["vllm@0.33.0", "library"] is None
    assert "in a wheel, not in a shared object" in str(skipped["vllm@0.32.0", "library"])
    assert "vllm is not installed here" in str(skipped["fixed", "engine"])


def engine(place: str) -> EngineResult:
    parameters = [
        {"name": "layers.0.experts.w13_weight", "bytes": 64, "place": place},
        {"name": "layers.0.experts.w13_weight_scale", "bytes": 8, "place": "device"},
    ]
    return answered(probe={"parameters": parameters})


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize(
    ("release", "cause", "subject", "runner", "fixes"),
    [
        ("0.27.1", "v2_runner", "faulty", "1", ""),
        ("0.27.1", "v2_runner", "fixed", "0", ""),
        ("0.33.0", "repacked", "faulty", "0", ""),
        ("0.33.0", "repacked", "fixed", "0", "offload"),
    ],
)
def test_an_engine_is_judged_by_the_place_of_its_weights(
    monkeypatch, place, release, cause, subject, runner, fixes
):
    def run_engine(request: EngineRequest) -> EngineResult:
        assert request.environ["MOEDOCTOR_FIXES"] == fixes
        assert request.environ["VLLM_USE_V2_MODEL_RUNNER"] == runner
        assert request.arguments["cpu_offload_params"] == ["w13_weight", "w2_weight"]
        assert (request.probe_when, request.probe_options) == ("before", {"names": "experts"})
        assert request.probe == "moedoctor.upstream.engine.probes:locate_weights"
        return engine(place)

    monkeypatch.setattr(engine_module, "need_engine", lambda: None)
    monkeypatch.setattr(engine_module, "run_engine", run_engine)
    monkeypatch.setattr(offload_noop_lab, "read_vllm_version", lambda: release)
    case = run(OffloadNoop(), subject, Tier.ENGINE, cause=cause)
    expected = CaseVerdict.CLEAN if place == "host" else CaseVerdict.REPRODUCED
    assert (case.evidence["asked_bytes"], case.verdict) == (64, expected)


@pytest.mark.parametrize(("cause", "release"), [("v2_runner", "0.28.0"), ("repacked", "0.30.0")])
def test_a_release_that_cannot_have_the_failure_is_skipped(cause: str, release: str) -> None:
    with pytest.raises(UnavailableError, match=release):
        offload_noop_lab.choose_engine_variables(cause, fixed=False, release=Version(release))


def test_an_engine_that_did_not_run_is_no_evidence() -> None:
    with pytest.raises(RuntimeError, match="ValueError: no"):
        collect_engine_evidence(died("no", kind="ValueError"), {})
    empty = collect_engine_evidence(answered(probe={"parameters": []}), {})
    assert judge(OffloadNoop(), empty).verdict is CaseVerdict.ERROR
    on_host = collect_engine_evidence(engine("cpu"), {})
    assert judge(OffloadNoop(), on_host).verdict is CaseVerdict.CLEAN


RELEASE = """
class GPUModelRunner:
    def may_reinitialize_input_batch(self, kv_cache_config, kernel_block_sizes):
        sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        if sizes != self._init_block_sizes or kernel_block_sizes != self._init_kernel_block_sizes:
            {check}
            self.input_batch = InputBatch(block_sizes=sizes)
"""
CHECK = "assert self.offload_config.uva.cpu_offload_gb == 0, 'Cannot re-initialize'"


def release(tmp_path: Path, check: str) -> ReleaseSource:
    write_files(tmp_path, {FILE: RELEASE.replace("{check}", check)})
    return ReleaseSource(tmp_path)


@pytest.mark.parametrize(("check", "verdict"), [(CHECK, CaseVerdict.REPRODUCED), ("pass", CaseVerdict.CLEAN)])
def test_a_release_is_run_from_its_file(tmp_path: Path, check: str, verdict: CaseVerdict) -> None:
    case = run(OffloadReinit(), "vllm@0.19.1", Tier.LIBRARY, release(tmp_path, check))
    assert case.verdict is verdict
    assert case.evidence["with_offload_and_plug_in"] == "rebuilt"
    with pytest.raises(UnavailableError, match="vllm is not installed here"):
        run(OffloadReinit(), "installed", Tier.LIBRARY)


def test_a_function_that_never_rebuilds_is_not_clean() -> None:
    evidence = observe(OffloadReinitParameters(), lambda runner, config, sizes: None)
    assert judge(OffloadReinit(), evidence).verdict is CaseVerdict.ERROR


def test_the_plug_in_restores_the_configuration() -> None:
    assert try_rebuild(skip_assertion(refuse), (32,), 4.0) == "rebuilt"
    runner = mock_runner(4.0)

    def failing(self: object) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        skip_assertion(failing)(runner)
    assert runner.offload_config.uva.cpu_offload_gb == 4.0


def test_the_first_fixed_of_the_available_releases() -> None:
    def result(name: str, verdict: CaseVerdict) -> CaseResult:
        return CaseResult(name, Tier.LIBRARY, {}, verdict, {"with_offload": "?"})

    bad, good = CaseVerdict.REPRODUCED, CaseVerdict.CLEAN
    results = [result("vllm@0.20.0", good), result("vllm@0.9.0", bad), result("vllm@0.19.1", bad)]
    assert OffloadReinit().conclude(results) == {
        "releases_run": ["0.9.0", "0.19.1", "0.20.0"],
        "refusing": ["0.9.0", "0.19.1"],
        "first_fixed_of_these": "0.20.0",
    }
    assert OffloadReinit().conclude([]) == {}
