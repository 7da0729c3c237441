"""MD019: sums through shared memory are wrong, ours are right, and the figures count shared memory."""

from __future__ import annotations

import pytest
import torch
from fault_cases import by_rows, run

from moedoctor.faults.cache.workspace_aliasing import RESULTS, WorkspaceAliasing, judge_modular_kernel
from moedoctor.faults.cache.workspace_aliasing_lab import Call, share_workspace
from moedoctor.reference.expert_cache import Problem
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.results import CaseVerdict, ClaimVerdict

FAULT = WorkspaceAliasing()
torch.set_num_threads(1)


@pytest.mark.parametrize("alias", ["sum", "results", "input"])
@pytest.mark.parametrize("groups", [2, 4])
def test_the_control_is_wrong_and_the_fix_is_not(alias: str, groups: int) -> None:
    point = {"alias": alias, "groups": groups, "experts": 16, "top_k": 4, "tokens": 8}
    judged, faulty = run(FAULT, "faulty", **point)
    assert (judged.verdict, faulty["same_memory"]) == (CaseVerdict.REPRODUCED, groups)
    judged, fixed = run(FAULT, "fixed", **point)
    assert (judged.verdict, fixed["calls"]) == (CaseVerdict.CLEAN, groups)
    assert fixed["worst_error"] < 1e-4


def call(alias: str, groups: int) -> Call:
    problem = Problem.make(8, 16, 8, "cpu", 0)
    topk_ids = torch.tensor([[0, 5], [3, 7]], dtype=torch.int32)
    return Call(problem, problem.draw_tokens(2, 0), torch.full((2, 2), 0.5), topk_ids, groups, alias)


def outputs(task: Call, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The right output of each group, [T, H] each."""
    x = task.x if x is None else x
    return [
        forward(x, MoeWeights.from_tensors(task.problem.weights), task.topk_weights, part)
        for part in task.parts
    ]


def test_a_running_sum_in_the_workspace_counts_the_last_group_twice() -> None:
    task = call("sum", 2)
    assert torch.allclose(share_workspace(task).output, 2 * outputs(task)[1], atol=1e-6)


def test_results_that_are_kept_all_equal_the_last_result() -> None:
    task = call("results", 4)
    assert torch.allclose(share_workspace(task).output, 4 * outputs(task)[3], atol=1e-6)


def test_an_overwritten_input_leaves_only_the_first_group_right() -> None:
    task = call("input", 2)
    output, (first, second) = share_workspace(task).output, outputs(task)
    assert torch.allclose(output, first + outputs(task, first)[1], atol=1e-6)
    assert not torch.allclose(output, first + second, atol=1e-3)


def test_groups_divide_the_ids_and_lose_none() -> None:
    task = call("sum", 4)
    assert torch.equal(torch.stack(task.parts).amax(0), task.topk_ids)
    assert sum(int((part >= 0).sum()) for part in task.parts) == task.topk_ids.numel()


@pytest.mark.parametrize(("wrong", "verdict"), [(0, ClaimVerdict.REFUTED), (64, ClaimVerdict.CONFIRMED)])
def test_the_claim_is_judged_by_the_returned_output(wrong: int, verdict: ClaimVerdict) -> None:
    returned, before = RESULTS
    rows = [
        {"what": returned, "groups": 2, "wrong_rows": wrong, "rows": 64},
        {"what": before, "groups": 2, "wrong_rows": 64, "rows": 64},
    ]
    judgement = by_rows(judge_modular_kernel, {"min_share": 0.5}, *rows)
    assert judgement.verdict is verdict
    assert f"{wrong} of 64" in (judgement.reason or "")
    assert judge_modular_kernel.units(["faulty", "fixed"]) == []
