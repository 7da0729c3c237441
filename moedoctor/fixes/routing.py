"""Top-k routing of tokens to experts that stays right when router logits hold NaN or Inf.

A NaN must not make a kernel pick one expert several times: duplicate ids leave rows unwritten or send
later kernels out of bounds (vllm-project/vllm#39593, fixed in vLLM 0.20.0 by #39391). The rule, all of it
in float32:

- score: softmax over the row, or sigmoid. choice: score + bias; the bias never enters the weights.
- Experts are ranked by choice, highest first, ties to the lower id; a choice that is not finite (only a
  bias can cause it) ranks behind every finite one. Weights are the scores of the chosen experts.
- ``renormalize`` divides a row's weights by their sum where that is above 0.
- ``nan_policy="zero"``, what vLLM ships: a score that is NaN becomes 0. One NaN or +Inf logit, or nothing
  but -Inf, makes a softmax row NaN as a whole: without a bias it gets experts 0..K-1 and weights of 0, with
  one it is routed by the bias alone. A sigmoid row loses only its NaN entries.
- ``nan_policy="finite"``, what vllm-project/vllm#39593 proposed: before the activation NaN and -Inf become
  the lowest finite float32 and +Inf the highest. NaN ranks last. A row that holds such a logit and has no
  bias is ranked by its logits, since its scores may all underflow. Other rows are as under ``"zero"``.

Ids are always distinct and in range, weights always finite, and a row of finite logits is routed the same
under either policy. The results carry no gradient.

On a CUDA device with Triton one kernel does it all. There exponentials are approximate: choices that differ
by rounding alone may change places with those of the CPU.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from moedoctor.fixes._routing_arguments import check_groups, check_routing
from moedoctor.fixes._routing_torch import route
from moedoctor.fixes.expert_ids import deduplicate, local_ids, validate_expert_ids, without_sentinels

__all__ = [
    "TopK",
    "deduplicate",
    "grouped_topk",
    "local_ids",
    "topk_sigmoid",
    "topk_softmax",
    "validate_expert_ids",
    "without_sentinels",
]


class TopK(NamedTuple):
    """The experts of each token, best first."""

    weights: torch.Tensor
    """float32 [T, K]."""
    ids: torch.Tensor
    """int32 [T, K], distinct within a row."""


def topk_softmax(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    nan_policy: str = "zero",
) -> TopK:
    """Route `logits` [T, E] (any floating type, any strides) by softmax scores.

    `bias` [E] is added for the choice only; `nan_policy` is ``"zero"`` or ``"finite"`` (see the module).
    Raises TypeError or ValueError that names the argument, what was given and what was expected.
    """
    check_routing(logits, top_k, bias, nan_policy)
    return _topk(logits, top_k, "softmax", bias, renormalize, nan_policy)


def topk_sigmoid(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    nan_policy: str = "zero",
) -> TopK:
    """Route `logits` [T, E] by sigmoid scores; arguments and errors as in `topk_softmax`."""
    check_routing(logits, top_k, bias, nan_policy)
    return _topk(logits, top_k, "sigmoid", bias, renormalize, nan_policy)


def grouped_topk(
    logits: torch.Tensor,
    top_k: int,
    *,
    num_groups: int,
    topk_groups: int,
    scoring: str = "sigmoid",
    bias: torch.Tensor | None = None,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    nan_policy: str = "zero",
) -> TopK:
    """Route `logits` [T, E] within the best `topk_groups` of `num_groups` equal groups of neighbours.

    A group's score is its highest choice, or with a `bias` the sum of its two highest (DeepSeek-V3's
    noaux_tc); choices that are not finite, and NaN logits under ``"finite"``, add nothing, and a group
    without any other comes last. Ties go to the lower group. Experts of other groups are never chosen.
    Weights are multiplied by `routed_scaling_factor` at the end. `scoring` is ``"softmax"`` or
    ``"sigmoid"``; other arguments and errors as in `topk_softmax`.

    vLLM differs. Its fused kernel (csrc/moe/grouped_topk_kernels.cu at e35e4874) needs a bias, computes in
    the logits' own type, adds 1e-20 to the sum when it renormalises, takes a logit that is not finite out of
    the choice, and gives experts 0..K-1 a weight of 1/K where too few groups have a finite score. Its Python
    form (0.21.0) leaves ties to `torch.topk`, divides by the bare sum and knows no NaN.
    """
    check_routing(logits, top_k, bias, nan_policy)
    check_groups(logits.shape[1], top_k, num_groups, topk_groups, scoring, routed_scaling_factor)
    return _topk(
        logits, top_k, scoring, bias, renormalize, nan_policy, num_groups, topk_groups, routed_scaling_factor
    )


@torch.no_grad()
def _topk(
    logits: torch.Tensor,
    top_k: int,
    scoring: str,
    bias: torch.Tensor | None,
    renormalize: bool,
    nan_policy: str,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> TopK:
    if logits.is_cuda and importlib.util.find_spec("triton") is not None:
        from moedoctor.kernels.routing.launch import launch_topk

        weights = torch.empty((logits.shape[0], top_k), dtype=torch.float32, device=logits.device)  # [T, K]
        ids = torch.empty((logits.shape[0], top_k), dtype=torch.int32, device=logits.device)  # [T, K]
        launch_topk(
            logits,
            weights,
            ids,
            scoring=scoring,
            bias=bias,
            renormalize=renormalize,
            num_groups=num_groups,
            topk_groups=topk_groups,
            routed_scaling_factor=scale,
            nan_policy=nan_policy,
        )
        return TopK(weights, ids)
    return TopK(*route(logits, top_k, scoring, bias, renormalize, nan_policy, num_groups, topk_groups, scale))
