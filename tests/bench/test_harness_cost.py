import importlib.util
import re

import pytest
import torch

from moedoctor.bench.harness_cost import judge_cost, measure_kernel_time, measure_launch_gap
from moedoctor.bench.timing import compare_rounds


def judged(graph: float, cold: float, do_bench: float) -> dict[str, object]:
    times = {"launch": 20.0, "graph": graph, "graph_cold": cold, "do_bench": do_bench}
    measures = {name: (lambda value=value: value) for name, value in times.items()}
    return judge_cost(compare_rounds(measures, baseline="launch", rounds=3), 0.75)


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
    facts = judged(graph, cold, do_bench)
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
