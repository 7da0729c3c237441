"""The kernels for expert ids and for the NaN trace: interpreted on any machine, compiled on a GPU."""

import pytest
import torch

from tests.interpreted import needs_triton, run_check

pytestmark = needs_triton

IDS = ("ids int32", "ids int64", "ids with a step")
DEDUPLICATE = (
    "deduplicate",
    "deduplicate int64",
    "deduplicate float16",
    "deduplicate bfloat16",
    "deduplicate float64",
)
WATCH = ("watch", "watch three", "watch groups")


@pytest.mark.parametrize(
    "names",
    [pytest.param(IDS, marks=pytest.mark.slow), (*DEDUPLICATE, *WATCH)],
    ids=["ids", "deduplicate and watch"],
)
def test_interpreted(names: tuple[str, ...]) -> None:
    run_check("id_and_watch_calls.py", *names)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*IDS, *DEDUPLICATE, *WATCH])
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
