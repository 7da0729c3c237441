"""MD019: sums through shared memory are wrong, ours are right, and the figures count shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from moedoctor.faults.cache.workspace_aliasing import (
    RESULTS,
    WorkspaceAliasing,
    WorkspaceAliasingParameters,
    modular_kernel,
)
from moedoctor.faults.cache.workspace_aliasing_lab import Call, shared_workspace
from moedoctor.interfaces import Measurement
from moedoctor.reference.expert_cache import Problem
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.results import Case, CaseVerdict, ClaimVerdict, Observation, Tier

torch.set_num_threads(1)


def case(subject: str, **given: Any) -> Case:
    parameters = WorkspaceAliasingParameters(**{"experts": 16, "top_k": 4, "tokens": 8, **given})
    return Case("MD019", subject, Tier.MODEL, parameters.model_dump())


@pytest.mark.parametrize("alias", ["sum", "results", "input"])
@pytest.mark.parametrize("groups", [2, 4])
def test_the_control_is_wrong_and_the_fix_is_not(alias: str, groups: int) -> None:
    fault, given = WorkspaceAliasing(), {"alias": alias, "groups": groups}
    faulty, fixed = (fault.observe(case(subject, **given), None) for subject in ("faulty", "fixed"))
    assert fault.judge(case("faulty", **given), faulty).verdict is CaseVerdict.REPRODUCED
    assert faulty.evidence["same_memory"] == groups
    assert fault.judge(case("fixed", **given), fixed).verdict is CaseVerdict.CLEAN
    assert fixed.evidence["worst_error"] < 1e-4
    assert fixed.evidence["calls"] == groups


def call(alias: str, groups: int) -> Call:
    problem = Problem.make(8, 16, 8, "cpu", 0)
    topk_ids = torch.tensor([[0, 5], [3, 7]], dtype=torch.int32)
    return Call(problem, problem.tokens(2, 0), torch.full((2, 2), 0.5), topk_ids, groups, alias)


def outputs(task: Call, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The right output of each group, [T, H] each."""
    x = task.x if x is None else x
    return [forward(x, MoeWeights.of(task.problem.weights), task.topk_weights, part) for part in task.parts]


def test_a_running_sum_in_the_workspace_counts_the_last_group_twice() -> None:
    task = call("sum", 2)
    assert torch.allclose(shared_workspace(task).output, 2 * outputs(task)[1], atol=1e-6)


def test_results_that_are_kept_all_equal_the_last_result() -> None:
    task = call("results", 4)
    assert torch.allclose(shared_workspace(task).output, 4 * outputs(task)[3], atol=1e-6)


def test_an_overwritten_input_leaves_only_the_first_group_right() -> None:
    task = call("input", 2)
    output, (first, second) = shared_workspace(task).output, outputs(task)
    assert torch.allclose(output, first + outputs(task, first)[1], atol=1e-6)
    assert not torch.allclose(output, first + second, atol=1e-3)


def test_groups_divide_the_ids_and_lose_none() -> None:
    task = call("sum", 4)
    assert torch.equal(torch.stack(task.parts).amax(0), task.topk_ids)
    assert sum(int((part >= 0).sum()) for part in task.parts) == task.topk_ids.numel()


@pytest.mark.parametrize("given", [{"groups": 3}, {"top_k": 17}, {"groups": 1}, {"alias": "output"}], ids=str)
def test_bad_points_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        case("faulty", **given)


@pytest.mark.parametrize(("wrong", "verdict"), [(0, ClaimVerdict.REFUTED), (64, ClaimVerdict.CONFIRMED)])
def test_the_claim_is_judged_by_the_returned_output(wrong: int, verdict: ClaimVerdict) -> None:
    returned, before = RESULTS
    rows = [
        {"what": returned, "groups": 2, "wrong_rows": wrong, "rows": 64},
        {"what": before, "groups": 2, "wrong_rows": 64, "rows": 64},
    ]
    measurements = [Measurement("installed", Observation({"rows": rows}))]
    judgement = modular_kernel.judge([], measurements, {"min_share": 0.5})
    assert judgement.verdict is verdict
    assert f"{wrong} of 64" in (judgement.reason or "")
    assert modular_kernel.units(["faulty", "fixed"]) == []
