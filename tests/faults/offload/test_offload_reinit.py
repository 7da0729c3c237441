"""MD009: the assertion, the plug-in's workaround, and a release's function read from its file."""

from pathlib import Path

import pytest
from vllm_stub import write_files

from moedoctor.faults.offload.offload_reinit import OffloadReinit, OffloadReinitParameters
from moedoctor.faults.offload.offload_reinit_lab import FILE, mock_runner, observe, refuse, try_rebuild
from moedoctor.plugin.offload_fix import skip_assertion
from moedoctor.results import Case, CaseResult, CaseVerdict, Observation, Tier, UnavailableError
from moedoctor.upstream.releases.release_source import ReleaseSource
from tests.faults.offload.cases import run_case

CASE = Case("MD009", "faulty", Tier.MODEL, {"layout": "hybrid", "offload_gb": 4.0})
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
    case = run_case(OffloadReinit(), "vllm@0.19.1", Tier.LIBRARY, release(tmp_path, check))
    assert case.verdict is verdict
    assert case.evidence["with_offload_and_plug_in"] == "rebuilt"
    with pytest.raises(UnavailableError, match="vllm is not installed here"):
        run_case(OffloadReinit(), "installed", Tier.LIBRARY)


def test_a_function_that_never_rebuilds_is_not_clean() -> None:
    observation = Observation(observe(OffloadReinitParameters(), lambda runner, config, sizes: None))
    assert OffloadReinit().judge(CASE, observation).verdict is CaseVerdict.ERROR


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
        return CaseResult(name, Tier.LIBRARY, CASE.parameters, verdict, {"with_offload": "?"})

    bad, good = CaseVerdict.REPRODUCED, CaseVerdict.CLEAN
    results = [result("vllm@0.20.0", good), result("vllm@0.9.0", bad), result("vllm@0.19.1", bad)]
    assert OffloadReinit().conclude(results) == {
        "releases_run": ["0.9.0", "0.19.1", "0.20.0"],
        "refusing": ["0.9.0", "0.19.1"],
        "first_fixed_of_these": "0.20.0",
    }
    assert OffloadReinit().conclude([]) == {}
