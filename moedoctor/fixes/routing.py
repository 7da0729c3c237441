"""Top-k routing of tokens to experts that stays right when router logits hold NaN or Inf.

A NaN must not make a kernel pick one expert several times: duplicate ids leave rows unwritten or send
later kernels out of bounds (vllm-project/vllm#39593, fixed in vLLM 0.20.0 by #39391). The rule, all of it
in float32:

- score: softmax over the row, or sigmoid. choice: score + bias; the bias never enters the weights.
- Experts are ranked by choice, highest first, ties to the lower id; a choice that is not finite (only a
  bias can cause it) ranks behind every finite one. Weights are the scores of the chosen experts.
- ``renormalize`` divides a row's weights by their sum if that is above 0.
- ``nan_policy="zero"``, what vLLM ships: a score that is NaN becomes 0. One NaN or +Inf logit, or nothing
  but -Inf, makes a softmax row NaN as a whole: without a bias it gets experts 0..K-1 and weights of 0, with
  one it is routed by the bias alone. A sigmoid row loses only its NaN entries.
- ``nan_policy="finite"``, what vllm-project/vllm#39593 proposed: before the activation NaN and -Inf become
  the lowest finite float32 and +Inf the highest. NaN ranks last. A row that holds such a logit and has no
  bias is ranked by its logits, since its scores may all underflow. Other rows are as under ``"zero"``.

Ids are always distinct and in range, weights always finite, and a row of finite logits is routed the same
under either policy. The results carry no gradient.

On a CUDA device with Triton one kernel does it all. Its exponentials are approximate: choices that differ
only by rounding may be in another order than on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moedoctor.fixes.expert_ids import check_int
from moedoctor.fixes.expert_ids import deduplicate as deduplicate
from moedoctor.fixes.expert_ids import find_local_ids as find_local_ids
from moedoctor.fixes.expert_ids import replace_sentinels as replace_sentinels
from moedoctor.fixes.expert_ids import validate_expert_ids as validate_expert_ids
from moedoctor.kernels.device_guard import has_kernels

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NOT_FINITE = -0x7F800001
"""The code of -inf: below that of every finite choice."""
_NAN_LAST = -(1 << 33)
"""Added to the code of a NaN logit's choice under the policy "finite"."""
_ABSENT = -(1 << 34)
"""The code of an expert outside the best groups."""


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
    return _route(logits, top_k, "softmax", bias, renormalize, nan_policy)


def topk_sigmoid(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    nan_policy: str = "zero",
) -> TopK:
    """Route `logits` [T, E] by sigmoid scores; arguments and errors as in `topk_softmax`."""
    return _route(logits, top_k, "sigmoid", bias, renormalize, nan_policy)


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
    """Route `logits` [T, E] within the best `topk_groups` of `num_groups` equal groups of neighbors.

    A group's score is its highest choice, or with a `bias` the sum of its two highest (DeepSeek-V3's
    noaux_tc); choices that are not finite, and NaN logits under ``"finite"``, add nothing, and a group
    without any other comes last. Ties go to the lower group. Experts of other groups are never chosen.
    Weights are multiplied by `routed_scaling_factor` at the end. `scoring` is ``"softmax"`` or
    ``"sigmoid"``; other arguments and errors as in `topk_softmax`.

    vLLM differs. Its fused kernel (csrc/moe/grouped_topk_kernels.cu at e35e4874) needs a bias, computes in
    the logits' own type, adds 1e-20 to the sum when it renormalizes, takes a logit that is not finite out of
    the choice, and gives experts 0..K-1 a weight of 1/K if too few groups have a finite score. Its Python
    form (0.21.0) leaves ties to `torch.topk`, divides by the bare sum and does not handle NaN.
    """
    grouping = (num_groups, topk_groups, routed_scaling_factor)
    return _route(logits, top_k, scoring, bias, renormalize, nan_policy, *grouping)


@torch.no_grad()
def _route(
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
    """Route by the module's rule, in a kernel or in torch operators.

    `torch.topk` leaves the order of equal values open. So each choice and its expert's id share one int64
    key: the choice, coded to sort as an integer of 32 bits, above the inverted id of 28. Whatever ranks
    behind every choice has a code below those.
    """
    _check_routing(logits, top_k, bias, nan_policy)
    _check_groups(logits.shape[1], top_k, num_groups, topk_groups, scoring, scale)
    if has_kernels(logits.device):
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
    # torch's CPU activations give other last bits if elements are not side by side.
    x = logits.float().contiguous()  # [T, E]
    clean = x  # [T, E]
    if nan_policy == "finite":
        limits = torch.finfo(torch.float32)
        clean = x.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    score = torch.softmax(clean, dim=-1) if scoring == "softmax" else torch.sigmoid(clean)  # [T, E]
    if nan_policy == "zero":
        score.nan_to_num_(nan=0.0)  # neither activation gives an Inf
    code = _encode_choices(x, clean, score, bias, nan_policy)  # [T, E]
    if num_groups > 1:
        code = _keep_best_groups(code, num_groups, topk_groups, sum_of_two=bias is not None)
    ids = _find_highest(code, top_k)  # [T, K]
    weights = score.gather(1, ids)  # [T, K]
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)  # [T, 1]
        weights = weights / torch.where(total > 0, total, 1.0)
    return TopK(weights * scale if scale != 1.0 else weights, ids.to(torch.int32))


def _encode_choices(
    x: torch.Tensor, clean: torch.Tensor, score: torch.Tensor, bias: torch.Tensor | None, nan_policy: str
) -> torch.Tensor:
    """Return int64 codes [T, E] that order the experts of each row, the best highest."""
    if bias is not None:
        choice = score + bias.float()
    elif nan_policy == "finite":
        dirty = (~x.isfinite()).any(dim=-1, keepdim=True)  # [T, 1]
        choice = torch.where(dirty, clean, score)
    else:
        choice = score
    code = _encode(choice)
    if bias is not None:
        code = torch.where(choice.isfinite(), code, _NOT_FINITE)
    code = code.long()
    if nan_policy == "finite":
        code = torch.where(x.isnan(), code + _NAN_LAST, code)
    return code


def _encode(x: torch.Tensor) -> torch.Tensor:
    """Return int32 that sorts as the float32 `x` does."""
    bits = (x + 0.0).view(torch.int32)  # adding 0.0 makes -0.0 tie with 0.0
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def _decode(code: torch.Tensor) -> torch.Tensor:
    """Invert `_encode`."""
    bits = code.to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _keep_best_groups(code: torch.Tensor, groups: int, count: int, *, sum_of_two: bool) -> torch.Tensor:
    """Return `code` [T, E] with _ABSENT for the experts outside the `count` best groups."""
    grouped = code.unflatten(1, (groups, -1))  # [T, G, S]
    rank = grouped.amax(dim=-1)  # [T, G]
    if sum_of_two:
        best = grouped.topk(min(2, grouped.shape[2]), dim=-1).values  # [T, G, 2 or 1]
        total = torch.where(best > _NOT_FINITE, _decode(best), 0.0).sum(dim=-1)  # [T, G]
        # A sum can overflow to -inf: still better than a group without a finite choice.
        code_of_total = _encode(total).clamp(min=_NOT_FINITE + 1).long()
        rank = torch.where(rank > _NOT_FINITE, code_of_total, _NOT_FINITE)
    chosen = torch.zeros_like(rank, dtype=torch.bool).scatter(1, _find_highest(rank, count), True)  # [T, G]
    return torch.where(chosen.unsqueeze(-1), grouped, _ABSENT).flatten(1)


def _find_highest(code: torch.Tensor, count: int) -> torch.Tensor:
    """Return the columns [T, count] of the highest codes, the highest first, ties to the lower column."""
    last = code.shape[1] - 1
    inverted = torch.arange(last, -1, -1, device=code.device)  # [columns]
    keys = (code << 28).bitwise_or_(inverted).topk(count, dim=-1, sorted=True).values  # [T, count]
    return last - (keys & 0xFFFFFFF)


def _check_routing(logits: torch.Tensor, top_k: int, bias: torch.Tensor | None, nan_policy: str) -> None:
    """Raise TypeError or ValueError for a wrong argument that all routing functions share."""
    _check_floating("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits must have two dimensions [tokens, experts], got shape {list(logits.shape)}")
    experts = logits.shape[1]
    check_int("top_k", top_k)
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and the number of experts {experts}, got {top_k}")
    if bias is not None:
        _check_floating("bias", bias)
        if bias.shape != (experts,):
            raise ValueError(f"bias must have shape [{experts}], one value an expert, got {list(bias.shape)}")
        if bias.device != logits.device:
            raise ValueError(f"bias must be on the device of logits, {logits.device}, got {bias.device}")
    _check_name("nan_policy", nan_policy, ("zero", "finite"))


def _check_groups(
    experts: int, top_k: int, num_groups: int, topk_groups: int, scoring: str, routed_scaling_factor: float
) -> None:
    """Raise TypeError or ValueError for a wrong argument of grouped routing."""
    check_int("num_groups", num_groups)
    if num_groups < 1 or experts % num_groups:
        raise ValueError(f"num_groups must divide the number of experts {experts}, got {num_groups}")
    check_int("topk_groups", topk_groups)
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups must be between 1 and num_groups {num_groups}, got {topk_groups}")
    reachable = topk_groups * (experts // num_groups)
    if top_k > reachable:
        raise ValueError(
            f"top_k must be at most {reachable}, the experts of topk_groups {topk_groups}, got {top_k}"
        )
    _check_name("scoring", scoring, ("softmax", "sigmoid"))
    if isinstance(routed_scaling_factor, bool) or not isinstance(routed_scaling_factor, (int, float)):
        raise TypeError(f"routed_scaling_factor must be a number, got {type(routed_scaling_factor).__name__}")
    if not abs(routed_scaling_factor) <= torch.finfo(torch.float32).max:
        raise ValueError(f"routed_scaling_factor must be a finite float32, got {routed_scaling_factor}")


def _check_floating(name: str, value: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in _FLOATING:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {value.dtype}")


def _check_name(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
