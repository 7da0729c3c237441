"""MD019: sums through shared memory are wrong, ours are right, and the figures say where the results lay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from moedoctor.faults.cache import workspace_aliasing_claims as claims
from moedoctor.faults.cache.workspace_aliasing import WorkspaceAliasing, WorkspaceAliasingParameters
from moedoctor.faults.cache.workspace_aliasing_lab import SharedWorkspace, groups_of
from moedoctor.interfaces import Measurement
from moedoctor.reference.expert_cache_problem import Problem, compute, even_weights
from moedoctor.results import Case, CaseVerdict, ClaimVerdict, Observation, Tier

torch.set_num_threads(1)


def case(subject: str, **given: Any) -> Case:
    parameters = WorkspaceAliasingParameters(**{"experts": 16, "top_k": 4, "tokens": 8, **given})
    return Case("MD019", subject, Tier.MODEL, parameters.model_dump())


def seen(subject: str, **given: Any) -> Observation:
    fault, one = WorkspaceAliasing(), case(subject, **given)
    return fault.observe(one, getattr(fault, subject)(one))


@pytest.mark.parametrize("alias", ["sum", "results", "input"])
@pytest.mark.parametrize("groups", [2, 4])
def test_the_control_is_wrong_and_the_fix_is_not(alias: str, groups: int) -> None:
    fault, given = WorkspaceAliasing(), {"alias": alias, "groups": groups}
    faulty, fixed = seen("faulty", **given), seen("fixed", **given)
    assert fault.judge(case("faulty", **given), faulty).verdict is CaseVerdict.REPRODUCED
    assert faulty.evidence["same_memory"] == groups
    assert fault.judge(case("fixed", **given), fixed).verdict is CaseVerdict.CLEAN
    assert fixed.evidence["worst_error"] < 1e-4
    assert fixed.evidence["calls"] == groups


def summed(alias: str, groups: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(what the control adds up, what each group really gives)."""
    problem = Problem.make(8, 16, 8, "cpu", 0)
    ids = torch.tensor([[0, 5], [3, 7]], dtype=torch.int32)
    x, weights = problem.tokens(2, 0), even_weights(ids)
    said = SharedWorkspace().run(problem, x.clone(), weights, ids, groups=groups, alias=alias)
    parts = [compute(problem.weights, x, weights, one) for one in groups_of(ids, 8, groups)]
    return said.output, parts


def test_a_running_sum_in_the_workspace_counts_the_last_group_twice() -> None:
    output, parts = summed("sum", 2)
    assert torch.allclose(output, 2 * parts[1], atol=1e-6)


def test_kept_results_are_all_the_last_one() -> None:
    output, parts = summed("results", 4)
    assert torch.allclose(output, 4 * parts[3], atol=1e-6)


def test_an_overwritten_input_leaves_the_first_group_right_alone() -> None:
    output, parts = summed("input", 2)
    ids = torch.tensor([[0, 5], [3, 7]], dtype=torch.int32)
    problem = Problem.make(8, 16, 8, "cpu", 0)
    second = compute(problem.weights, parts[0], even_weights(ids), groups_of(ids, 8, 2)[1])
    assert torch.allclose(output, parts[0] + second, atol=1e-6)
    assert not torch.allclose(output, parts[0] + parts[1], atol=1e-3)


def test_groups_part_the_ids_and_lose_none() -> None:
    ids = torch.tensor([[0, 5], [3, 7]], dtype=torch.int32)
    parts = groups_of(ids, 8, 4)
    assert torch.equal(torch.stack(parts).amax(0), ids)
    assert sum(int((one >= 0).sum()) for one in parts) == ids.numel()


@pytest.mark.parametrize("given", [{"groups": 3}, {"top_k": 17}, {"groups": 1}, {"alias": "output"}], ids=str)
def test_points_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        case("faulty", **given)


@pytest.mark.parametrize(("wrong", "verdict"), [(0, ClaimVerdict.REFUTED), (64, ClaimVerdict.CONFIRMED)])
def test_the_claim_is_about_what_the_kernel_returns(wrong: int, verdict: ClaimVerdict) -> None:
    (test,) = claims.CLAIMS
    returned, before = claims._WAYS
    rows = [
        {"what": returned, "groups": 2, "wrong_rows": wrong, "rows": 64},
        {"what": before, "groups": 2, "wrong_rows": 64, "rows": 64},
    ]
    said = test.judge([], [Measurement("installed", Observation({"rows": rows}))], {"min_share": 0.5})
    assert said.verdict is verdict
    assert f"{wrong} of 64" in (said.reason or "")
    assert test.units(["faulty", "fixed"]) == []
