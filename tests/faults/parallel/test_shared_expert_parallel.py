"""MD027: the part of the shared expert that ranks add up, and ranks that agree."""

import pytest
import torch
from fault_cases import run

from moedoctor.faults.parallel.shared_expert_parallel import SharedExpertParallel
from moedoctor.results import CaseVerdict

FAULT = SharedExpertParallel()
torch.set_num_threads(1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mistake", ["reduced_twice", "whole_added"])
def test_the_shared_part_counts_once_for_each_rank(mistake: str, ranks: int) -> None:
    judgement, evidence = run(FAULT, mistake=mistake, ranks=ranks)
    assert (judgement.verdict, evidence["times"]) == (CaseVerdict.REPRODUCED, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_shard_is_about_its_share_of_the_shared_part(ranks: int) -> None:
    _, evidence = run(FAULT, mistake="one_shard", ranks=ranks, hidden=64, intermediate=128)
    assert evidence["times"] == pytest.approx(1 / ranks, rel=0.3)


@pytest.mark.parametrize(
    ("mistake", "faulty", "fixed"),
    [
        ("reduced_twice", ["all_reduce", "all_reduce"], ["all_reduce"]),
        ("one_shard", ["reduce_scatter", "all_gather"], ["reduce_scatter", "all_gather"]),
        ("whole_added", ["all_reduce"], ["all_reduce"]),
    ],
)
def test_the_fix_needs_no_more_collectives(mistake: str, faulty: list[str], fixed: list[str]) -> None:
    assert run(FAULT, mistake=mistake)[1]["collectives"] == faulty
    judgement, evidence = run(FAULT, "fixed", mistake=mistake)
    assert (judgement.verdict, evidence["times"], evidence["collectives"]) == (CaseVerdict.CLEAN, 1, fixed)
