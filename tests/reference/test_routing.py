"""The oracle against the rule restated one expert at a time, and its groups by hand."""

import math

import pytest
import torch
from hypothesis import given
from routing_cases import Call, calls

from moedoctor.reference import routing as reference


def test_groups_by_hand() -> None:
    row = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.6, 0.1]]).logit()
    best_expert, _ = reference.grouped_topk(row, 1, num_groups=3, topk_groups=1)
    torch.testing.assert_close(best_expert, torch.tensor([[0.9]]))
    # With a bias the sum of two counts: 0.9 + 0.0, 0.5 + 0.5, 0.6 + 0.1.
    _, ids = reference.grouped_topk(row, 2, num_groups=3, topk_groups=1, bias=torch.zeros(6))
    assert ids.tolist() == [[2, 3]]


@given(calls())
def test_every_row_follows_the_rule(call: Call) -> None:
    weights, ids = call.of(reference)
    scale = call.options.get("routed_scaling_factor", 1.0)
    for row, got_weights, got_ids in zip(call.logits.float(), weights.tolist(), ids.tolist(), strict=True):
        scores, expected = _route_row(row, call)
        assert got_ids == expected
        chosen = [scores[expert] for expert in expected]
        total = (sum(chosen) if call.options["renormalize"] else 1.0) or 1.0
        right = [weight / total * scale for weight in chosen]
        assert got_weights == pytest.approx(right, rel=1e-5, abs=1e-37)


def _route_row(row: torch.Tensor, call: Call) -> tuple[list[float], list[int]]:
    """Scores of all experts and the ids of the chosen ones, one expert at a time."""
    finite = call.options["nan_policy"] == "finite"
    scoring = call.options.get("scoring") or call.name.removeprefix("topk_")
    limit = torch.finfo(torch.float32).max
    logits = row.tolist()
    if finite:
        clean = [-limit if math.isnan(logit) else min(max(logit, -limit), limit) for logit in logits]
    else:
        clean = logits
    tensor = torch.tensor(clean, dtype=torch.float32)
    scores = (tensor.softmax(0) if scoring == "softmax" else tensor.sigmoid()).tolist()
    scores = [score if math.isfinite(score) else 0.0 for score in scores]

    ranks = []
    for expert, score in enumerate(scores):
        choice = score
        if call.bias is not None:
            choice = float(torch.tensor(score) + call.bias[expert])
        elif finite and not all(map(math.isfinite, logits)):
            choice = clean[expert]
        known = math.isfinite(choice)
        ranks.append((finite and math.isnan(logits[expert]), not known, -choice if known else 0.0, expert))

    groups = call.options.get("num_groups", 1)
    size = len(logits) // groups
    members = [ranks[group * size : (group + 1) * size] for group in range(groups)]
    order = sorted(range(groups), key=lambda group: (_group_rank(members[group], call), group))
    allowed = [rank for group in order[: call.options.get("topk_groups", 1)] for rank in members[group]]
    return scores, [rank[-1] for rank in sorted(allowed)[: call.top_k]]


def _group_rank(ranks: list[tuple[bool, bool, float, int]], call: Call) -> tuple[bool, bool, float]:
    ranks = sorted(ranks)
    if call.bias is None:
        return ranks[0][:3]
    known = [-choice for is_nan, is_not_finite, choice, _ in ranks[:2] if not is_nan and not is_not_finite]
    return (False, not known, -float(torch.tensor(known, dtype=torch.float32).sum()))
