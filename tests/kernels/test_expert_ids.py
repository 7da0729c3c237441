"""The kernels for expert ids and for the NaN trace on a GPU, and their checks in the interpreter."""

import pytest
import torch

from tests.interpreted import needs_triton

pytestmark = needs_triton

INTERPRETED = ("ids int64", "ids with a step", "deduplicate bfloat16", "deduplicate float64")
WATCH = ("watch", "watch three", "watch groups")
COMPILED = ("ids int32", "deduplicate", "deduplicate int64", "deduplicate float16")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*INTERPRETED, *WATCH, *COMPILED])
def test_on_a_gpu(name: str) -> None:
    from id_and_watch_calls import CHECKS

    CHECKS[name]("cuda")


@pytest.mark.gpu
def test_a_cuda_graph_holds_the_guard_and_its_flags_are_read_afterwards() -> None:
    from moedoctor.fixes.expert_ids import ExpertIdCounts, ExpertIdFlags, validate_expert_ids

    ids = torch.arange(128 * 8, device="cuda", dtype=torch.int32).reshape(128, 8) % 64
    flags = ExpertIdFlags("cuda")
    validate_expert_ids(ids, 64, flags=flags)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        validate_expert_ids(ids, 64, flags=flags)
    graph.replay()
    assert flags.count_real() == ExpertIdCounts()
    ids[5, 1] = ids[5, 0]
    ids[7, 0] = -1
    graph.replay()
    graph.replay()
    assert flags.count_real() == ExpertIdCounts(repeated=2, sentinel=2)
