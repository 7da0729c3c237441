import time
from itertools import chain, repeat

import pytest
import torch

from moedoctor.bench import timing as moe_timing
from moedoctor.bench.timing import cold_time, eager_time, launches_for, rounds_for, time_layer, wall_time

DEVICE = "cuda:0"


def test_wall_time_measures_a_call() -> None:
    spread = wall_time(lambda: time.sleep(0.01), seconds=0.05)
    assert spread.samples >= 3
    assert 10_000 <= spread.p20 <= spread.median <= spread.p80


def test_a_cpu_is_timed_by_the_wall_clock() -> None:
    times = time_layer(lambda: None, "cpu")
    assert times.how == "wall time"
    assert times.warm is None
    assert times.eager is None


@pytest.mark.parametrize(("microseconds", "launches"), [(0.1, 50), (20, 50), (400, 10), (1e6, 1)])
def test_a_graph_is_long_enough_and_not_too_long(microseconds: float, launches: int) -> None:
    assert launches_for(microseconds) == launches


@pytest.mark.parametrize(("microseconds", "rounds"), [(0.1, 15), (5000, 15), (12_500, 8), (1e6, 5)])
def test_what_takes_long_is_repeated_less_often(microseconds: float, rounds: int) -> None:
    assert rounds_for(microseconds) == rounds


@pytest.mark.gpu
def test_cold_reads_take_longer_than_warm_ones() -> None:
    data = torch.ones(2**22, device=DEVICE)  # 16 MiB, a third of an H200's L2 cache

    def read() -> None:
        data.sum()

    times = time_layer(read, DEVICE)
    assert times.how == "graph, cold L2"
    assert times.warm is not None
    assert times.time.median > 1.2 * times.warm.median


@pytest.mark.gpu
def test_the_flush_is_not_counted() -> None:
    """A kernel that touches no memory takes as long with the cache overwritten as without."""
    cycles = 200_000

    def wait() -> None:
        torch.cuda._sleep(cycles)

    warm = moe_timing.graph_time(wait, launches=20, replays=10).median
    assert cold_time(wait, DEVICE).median == pytest.approx(warm, rel=0.02)


@pytest.mark.gpu
def test_eager_time_counts_the_host() -> None:
    def slow() -> None:
        time.sleep(0.001)
        torch.cuda._sleep(1)

    assert eager_time(slow).median > 900


@pytest.mark.gpu
def test_the_harness_adds_at_most_two_percent() -> None:
    pytest.importorskip("triton")
    from moedoctor.bench.harness_cost import measure_harness_cost

    cost = measure_harness_cost(DEVICE)
    assert 19 < cost["kernel_us"] < 21
    assert cost["launch_gap_us"] < 5
    assert cost["within_limit"], cost


class NoticedError(Exception):
    pass


def looks(seen: list[str]):
    def check(how: str, output: object) -> None:
        assert isinstance(output, torch.Tensor)
        seen.append(how)
        if not torch.equal(output, torch.ones_like(output)):
            raise NoticedError(how)

    return check


def test_the_last_output_that_was_timed_is_looked_at() -> None:
    outputs = chain([torch.ones(1)] * 3, repeat(torch.zeros(1)))
    with pytest.raises(NoticedError, match="wall time"):
        time_layer(lambda: next(outputs), "cpu", check=looks([]))
    seen: list[str] = []
    time_layer(lambda: torch.ones(1), "cpu", check=looks(seen))
    assert seen == ["wall time"]


@pytest.mark.gpu
def test_every_way_of_timing_is_looked_at() -> None:
    ones, seen = torch.ones(64, device=DEVICE), []
    time_layer(lambda: ones * 1, DEVICE, check=looks(seen))
    assert seen == ["eager", "graph", "graph, cold L2"]


@pytest.mark.gpu
def test_what_is_wrong_in_a_graph_alone_is_noticed() -> None:
    ones = torch.ones(64, device=DEVICE)

    def call() -> torch.Tensor:
        return ones * (0 if torch.cuda.is_current_stream_capturing() else 1)

    with pytest.raises(NoticedError, match="graph"):
        time_layer(call, DEVICE, check=looks([]))


@pytest.mark.gpu
def test_an_output_that_a_replay_does_not_write_is_noticed() -> None:
    kept = torch.ones(64, device=DEVICE)

    def call() -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            kept.fill_(1)
        return kept

    with pytest.raises(NoticedError, match="graph"):
        time_layer(call, DEVICE, check=looks([]))
