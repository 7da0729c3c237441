"""Percentiles and rounds on the CPU; captured graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moedoctor.bench.timing import Spread, compare_rounds, compare_times, graph_time


def test_spread_interpolates_its_percentiles() -> None:
    spread = Spread.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])
    assert spread == Spread(median=3.5, p20=2.0, p80=5.0, samples=6)


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one measurement"):
        Spread.of([])


def test_rounds_take_turns_and_compare_within_a_round() -> None:
    order: list[str] = []

    def clock(name: str, times: list[float]) -> Callable[[], float]:
        remaining = iter(times)

        def measure() -> float:
            order.append(name)
            return next(remaining)

        return measure

    # The machine slows down tenfold in the last round: times spread, ratios do not.
    found = compare_rounds(
        {"ours": clock("ours", [1.0, 2.0, 10.0]), "theirs": clock("theirs", [2.0, 4.0, 20.0])},
        baseline="theirs",
        rounds=3,
    )
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert found.baseline == "theirs"
    assert found.times["ours"].median == 2.0
    assert found.ratios == {"ours": Spread(0.5, 0.5, 0.5, 3)}


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(KeyError, match="baseline must be one of ours, got 'theirs'"):
        compare_times({"ours": lambda: None}, baseline="theirs")


def test_graphs_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        graph_time(lambda: None)


@pytest.mark.gpu
def test_a_graph_runs_every_call_in_rotation_and_longer_work_takes_longer() -> None:
    counts = [torch.zeros((), device="cuda") for _ in range(2)]
    spread = graph_time(
        [lambda one=one: one.add_(1) for one in counts], launches=10, replays=3, warmup_seconds=0.0
    )
    # One launch each to warm up; then one warming replay and three measured ones of five each.
    assert [float(one) for one in counts] == [21.0, 21.0]
    assert spread.samples == 3

    small = torch.zeros(1 << 10, device="cuda")
    large = torch.zeros(1 << 28, device="cuda")
    found = compare_times(
        {"small": lambda: small.add_(1), "large": lambda: large.add_(1)},
        baseline="small",
        launches=5,
        replays=3,
    )
    assert found.ratios["large"].median > 10
    assert found.times["small"].p20 <= found.times["small"].median <= found.times["small"].p80
    with pytest.raises(ValueError, match="got 0 calls and 100 launches"):
        graph_time([])
