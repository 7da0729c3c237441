"""Percentiles, rounds, wall time and our harness's cost on the CPU; captured graphs on a GPU."""

import importlib.util
import re
import time
from functools import partial
from itertools import chain, repeat

import pytest
import torch

from moedoctor.bench import timing
from moedoctor.bench.harness_cost import judge_cost, measure_kernel_time, measure_launch_gap
from moedoctor.bench.timing import compare_rounds


def test_spread_interpolates_its_percentiles() -> None:
    spread = timing.Spread.summarize([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])
    assert spread == timing.Spread(median=3.5, p20=2.0, p80=5.0, samples=6)
    row = spread.to_row("us", scale=1 / 3, offset=-1, digits=2)
    assert row == {"us": 0.17, "us_p20": -0.33, "us_p80": 0.67}
    with pytest.raises(ValueError, match="at least one measurement"):
        timing.Spread.summarize([])


def test_rounds_take_turns_and_compare_within_a_round() -> None:
    """The machine slows down tenfold in the last round: times spread, ratios do not."""
    order: list[str] = []
    times = {"ours": iter([1.0, 2.0, 10.0]), "theirs": iter([2.0, 4.0, 20.0])}

    def measure(name: str) -> float:
        order.append(name)
        return next(times[name])

    clocks = {name: partial(measure, name) for name in times}
    comparison = timing.compare_rounds(clocks, baseline="theirs", rounds=3)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert comparison.baseline == "theirs"
    assert comparison.times["ours"].median == 2.0
    assert comparison.ratios == {"ours": timing.Spread(0.5, 0.5, 0.5, 3)}


@pytest.mark.gpu
def test_a_graph_runs_every_call_in_rotation_and_longer_work_takes_longer() -> None:
    counts = [torch.zeros((), device="cuda") for _ in range(2)]
    calls = [partial(count.add_, 1) for count in counts]
    spread = timing.time_graph(calls, launches=10, replays=3, warmup_seconds=0.0)
    # One launch each to warm up; then one warming replay and three measured ones of five each.
    assert [float(count) for count in counts] == [21.0, 21.0]
    assert spread.samples == 3

    small = torch.zeros(1 << 10, device="cuda")
    large = torch.zeros(1 << 28, device="cuda")
    calls = {"small": partial(small.add_, 1), "large": partial(large.add_, 1)}
    comparison = timing.compare_times(calls, baseline="small", launches=5, replays=3)
    assert comparison.ratios["large"].median > 10
    assert comparison.times["small"].p20 <= comparison.times["small"].median <= comparison.times["small"].p80
    with pytest.raises(ValueError, match="got 0 calls and 100 launches"):
        timing.time_graph([])


DEVICE = "cuda:0"


def test_a_cpu_is_timed_by_the_wall_clock() -> None:
    spread = timing.time_wall(lambda: time.sleep(0.01), seconds=0.05)
    assert spread.samples >= 3
    assert 10_000 <= spread.p20 <= spread.median <= spread.p80
    times = timing.time_layer(lambda: None, "cpu")
    assert (times.how, times.warm, times.eager) == ("wall time", None, None)
    assert timing.measure_seconds(lambda: time.sleep(0.01), "cpu") >= 0.01


@pytest.mark.parametrize(
    ("microseconds", "launches", "rounds"),
    [(0.1, 50, 15), (20, 50, 15), (400, 10, 15), (5000, 1, 15), (12_500, 1, 8), (1e6, 1, 5)],
)
def test_a_graph_is_neither_short_nor_long_and_long_work_is_repeated_less_often(
    microseconds: float, launches: int, rounds: int
) -> None:
    assert (timing.choose_launches(microseconds), timing.choose_rounds(microseconds)) == (launches, rounds)


@pytest.mark.gpu
def test_cold_reads_take_longer_than_warm_ones() -> None:
    data = torch.ones(2**22, device=DEVICE)  # 16 MiB, a third of an H200's L2 cache
    times = timing.time_layer(data.sum, DEVICE)
    assert times.how == "graph, cold L2"
    assert times.time.median > 1.2 * times.warm.median


@pytest.mark.gpu
def test_the_flush_is_not_counted() -> None:
    """A kernel that touches no memory takes as long with the cache overwritten as without."""
    wait = partial(torch.cuda._sleep, 200_000)
    warm = timing.time_graph(wait, launches=20, replays=10).median
    assert timing.time_cold(wait, DEVICE).median == pytest.approx(warm, rel=0.02)


@pytest.mark.gpu
def test_eager_time_counts_the_host() -> None:
    def slow() -> None:
        time.sleep(0.001)
        torch.cuda._sleep(1)

    assert timing.time_eager(slow).median > 900


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


def noting(ways: list[str]):
    def check(how: str, output: object) -> None:
        assert isinstance(output, torch.Tensor)
        ways.append(how)
        if not torch.equal(output, torch.ones_like(output)):
            raise NoticedError(how)

    return check


def test_the_last_timed_output_is_checked() -> None:
    outputs = chain([torch.ones(1)] * 3, repeat(torch.zeros(1)))
    with pytest.raises(NoticedError, match="wall time"):
        timing.time_layer(lambda: next(outputs), "cpu", check=noting([]))
    ways: list[str] = []
    timing.time_layer(lambda: torch.ones(1), "cpu", check=noting(ways))
    assert ways == ["wall time"]


@pytest.mark.gpu
def test_every_way_of_timing_is_checked() -> None:
    ones, ways = torch.ones(64, device=DEVICE), []
    timing.time_layer(lambda: ones * 1, DEVICE, check=noting(ways))
    assert ways == ["eager", "graph", "graph, cold L2"]


@pytest.mark.gpu
@pytest.mark.parametrize("writes", [True, False])
def test_an_output_that_is_wrong_only_in_a_graph_or_that_it_does_not_write_is_noticed(writes: bool) -> None:
    output = torch.ones(64, device=DEVICE)

    def call() -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            return output.fill_(1)
        return output * 0 if writes else output

    with pytest.raises(NoticedError, match="graph"):
        timing.time_layer(call, DEVICE, check=noting([]))


@pytest.mark.parametrize(
    ("graph", "cold", "do_bench", "within"),
    [
        (20.0, 20.0, 24.0, True),
        (20.39, 19.61, 10.0, True),
        (20.41, 20.0, 24.0, False),
        (20.0, 20.41, 24.0, False),
        (19.59, 20.0, 24.0, False),  # too short is as wrong as too long
        (24.0, 24.0, 24.0, False),  # do_bench says 24, too, and is not the truth
    ],
)
def test_our_time_is_compared_with_the_cost_of_a_launch(graph, cold, do_bench, within):
    times = {"launch": 20.0, "graph": graph, "graph_cold": cold, "do_bench": do_bench}
    measures = {name: (lambda value=value: value) for name, value in times.items()}
    facts = judge_cost(compare_rounds(measures, baseline="launch", rounds=3), 0.75)
    assert facts["within_limit"] is within
    assert facts["graph_overhead"] == pytest.approx(graph / 20 - 1, abs=1e-4)
    assert facts["graph_cold_overhead"] == pytest.approx(cold / 20 - 1, abs=1e-4)
    assert facts["do_bench_overhead"] == pytest.approx(do_bench / 20 - 1)
    assert (facts["launch_us"], facts["kernel_us"], facts["launch_gap_us"]) == (20.0, 19.25, 0.75)
    assert facts["do_bench_us"] == do_bench


def test_stamps_are_durations_and_gaps() -> None:
    stamps = torch.tensor([[0, 20_000], [21_000, 41_500], [42_000, 61_500]])  # [3, 2] nanoseconds
    assert measure_kernel_time(stamps) == 20.0
    assert measure_launch_gap(stamps) == 0.75


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_waiting_kernel_stamps_outside_of_its_loop() -> None:
    """Compiled without a GPU: the end time is read after the wait and before any store."""
    from moedoctor.kernels.stamped_wait import stamped_wait
    from tests.compiled_kernels import compile_launches

    with compile_launches(90) as kernels:
        stamped_wait[(1,)](torch.empty(2, dtype=torch.int64), 1000, num_warps=1)
    order = re.findall(r"%(globaltimer|clock64)|(\$L__BB\S+:)|(st)\.global", kernels[0].asm["ptx"])
    names = [clock or ("label" if label else store) for clock, label, store in order]
    assert names == ["globaltimer", "clock64", "label", "clock64", "label", "globaltimer", "st", "st"]
