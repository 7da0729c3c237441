"""MD027: the shared expert counts once for each rank. MD028: a rank that skips or pads alone is named."""

import time

import pytest
from fault_cases import run

from moedoctor.faults.parallel.collectives_out_of_step import CollectivesOutOfStep
from moedoctor.faults.parallel.shared_expert_parallel import SharedExpertParallel
from moedoctor.results import CaseVerdict

OUT_OF_STEP = CollectivesOutOfStep()


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
    judged = run(OUT_OF_STEP, way=way, ranks=3, seconds=1.0)
    assert time.monotonic() - start < 10
    assert judged.verdict is CaseVerdict.REPRODUCED
    assert tuple(judged.evidence[f"ranks_{name}"] for name in ("waiting", "stopped", "wrong")) == figures
    assert named in judged.evidence["named"]


@pytest.mark.parametrize("way", ["idle_rank", "sizes_differ", "order_differs"])
def test_ranks_that_agree_end_with_the_right_values(way: str) -> None:
    judged = run(OUT_OF_STEP, "fixed", way=way, ranks=3)
    assert judged.verdict is CaseVerdict.CLEAN
    assert (judged.evidence["named"], judged.evidence["errors"]) == ("", [])


SHARED = SharedExpertParallel()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mistake", ["reduced_twice", "whole_added"])
def test_the_shared_part_counts_once_for_each_rank(mistake: str, ranks: int) -> None:
    judged = run(SHARED, mistake=mistake, ranks=ranks)
    assert (judged.verdict, judged.evidence["times"]) == (CaseVerdict.REPRODUCED, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_shard_is_about_its_share_of_the_shared_part(ranks: int) -> None:
    judged = run(SHARED, mistake="one_shard", ranks=ranks, hidden=64, intermediate=128)
    assert judged.evidence["times"] == pytest.approx(1 / ranks, rel=0.3)


@pytest.mark.parametrize(
    ("mistake", "faulty", "fixed"),
    [
        ("reduced_twice", ["all_reduce", "all_reduce"], ["all_reduce"]),
        ("one_shard", ["reduce_scatter", "all_gather"], ["reduce_scatter", "all_gather"]),
        ("whole_added", ["all_reduce"], ["all_reduce"]),
    ],
)
def test_the_fix_needs_no_more_collectives(mistake: str, faulty: list[str], fixed: list[str]) -> None:
    assert run(SHARED, mistake=mistake).evidence["collectives"] == faulty
    judged = run(SHARED, "fixed", mistake=mistake)
    assert (judged.verdict, judged.evidence["times"]) == (CaseVerdict.CLEAN, 1)
    assert judged.evidence["collectives"] == fixed
