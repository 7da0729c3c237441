"""MD027: the shared expert counts once for each rank. MD028: a rank that skips or pads alone is named."""

import time

import pytest
import torch
from fault_cases import run

from moedoctor.faults.parallel.collectives_out_of_step import CollectivesOutOfStep
from moedoctor.faults.parallel.collectives_out_of_step_lab import name_difference
from moedoctor.faults.parallel.ranks import Ended, Rank, run_ranks
from moedoctor.faults.parallel.shared_expert_parallel import SharedExpertParallel
from moedoctor.results import CaseVerdict

OUT_OF_STEP = CollectivesOutOfStep()
torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("way", "figures", "named"),
    [
        ("idle_rank", (2, 0, 0), "call 1 differs: rank 0 sizes, rank 1 sizes, rank 2 nothing"),
        ("sizes_differ", (2, 1, 0), "rank 2 stopped before call 2: 6 8"),
        ("order_differs", (1, 0, 0), "rank 2 dispatch of layer 0 part 0"),
    ],
)
def test_the_rank_that_takes_another_path_is_named_within_the_limit(way, figures, named):
    start = time.monotonic()
    judgement, evidence = run(OUT_OF_STEP, way=way, ranks=3, seconds=1.0)
    assert time.monotonic() - start < 10
    assert judgement.verdict is CaseVerdict.REPRODUCED
    assert tuple(evidence[f"ranks_{name}"] for name in ("waiting", "stopped", "wrong")) == figures
    assert named in evidence["named"]


@pytest.mark.parametrize("way", ["idle_rank", "sizes_differ", "order_differs"])
def test_ranks_that_agree_end_with_the_right_values(way: str) -> None:
    judgement, evidence = run(OUT_OF_STEP, "fixed", way=way, ranks=3)
    assert (judgement.verdict, evidence["named"], evidence["errors"]) == (CaseVerdict.CLEAN, "", [])


def test_the_same_calls_differ_in_nothing() -> None:
    assert name_difference([Ended(1, None, ["a", "b"]), Ended(1, None, ["a", "b"])]) == ""
    assert name_difference([Ended(1, None, ["a"]), Ended(1, None, ["a", "b"])]) == (
        "call 2 differs: rank 0 nothing, rank 1 b"
    )


def test_an_error_of_one_rank_is_kept_and_the_others_run_into_the_limit() -> None:
    def work(rank: Rank) -> float:
        if rank.number == 1:
            raise AssertionError("of its own")
        return float(rank.reduce(torch.ones(1)))

    first, second = run_ranks(2, work, 0.5)
    assert "Timed out" in str(first.error)
    assert (str(second.error), list(second.calls)) == ("of its own", [])


SHARED = SharedExpertParallel()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mistake", ["reduced_twice", "whole_added"])
def test_the_shared_part_counts_once_for_each_rank(mistake: str, ranks: int) -> None:
    judgement, evidence = run(SHARED, mistake=mistake, ranks=ranks)
    assert (judgement.verdict, evidence["times"]) == (CaseVerdict.REPRODUCED, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_shard_is_about_its_share_of_the_shared_part(ranks: int) -> None:
    _, evidence = run(SHARED, mistake="one_shard", ranks=ranks, hidden=64, intermediate=128)
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
    assert run(SHARED, mistake=mistake)[1]["collectives"] == faulty
    judgement, evidence = run(SHARED, "fixed", mistake=mistake)
    assert (judgement.verdict, evidence["times"], evidence["collectives"]) == (CaseVerdict.CLEAN, 1, fixed)
