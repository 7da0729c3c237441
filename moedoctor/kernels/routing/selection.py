"""Choosing from coded tiles: the best experts of a row, and the best groups. Shapes as in `ranking`."""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.routing.ranking import ABSENT, NOT_FINITE, code_of, drop, value_of


@triton.jit
def pick_sorted(lists: tl.tuple, width: tl.constexpr, top_k: tl.constexpr) -> tl.tuple:
    """Return the highest key [rows] of each row, and its `top_k` highest, the k-th in lane k [lanes, rows].

    `lists` are `width` tensors [lanes, rows] of distinct int32 keys, sorted within each lane, highest first.
    Lanes of the result from `top_k` on hold 0. Each pick is one maximum over the lanes' heads; the lane that
    had it moves its list up.
    """
    lane = tl.arange(0, lists[0].shape[0])[:, None]  # [lanes, 1]
    picked = tl.zeros(lists[0].shape, tl.int32)  # [lanes, rows]
    for k in tl.static_range(top_k):
        best = tl.max(lists[0], axis=0)  # [rows]
        if k == 0:
            highest = best
        picked = tl.where(lane == k, best[None, :], picked)
        if k + 1 < top_k:
            hit = lists[0] == best[None, :]
            moved: tl.tuple = ()
            for i in tl.static_range(width):
                # Entries that no later pick can reach are left behind.
                if i + k + 1 < top_k:
                    if i + 1 < width:
                        moved = moved + (tl.where(hit, lists[i + 1], lists[i]),)
                    else:
                        moved = moved + (tl.where(hit, ABSENT, lists[i]),)
                else:
                    moved = moved + (lists[i],)
            lists = moved
    return highest, picked


@triton.jit
def pick_experts(code: tl.tensor, expert: tl.tensor, top_k: tl.constexpr) -> tl.tuple:
    """Return the ids [lanes, rows] of the `top_k` highest codes of each row, and the highest code [rows].

    Ties go to the lower id. The k-th id is in lane k.

    `code` [lanes, rows, width] int32 or int64, `expert` broadcasts to it. Lanes from `top_k` on hold 0.
    """
    lane = tl.arange(0, code.shape[0])[:, None]  # [lanes, 1]
    picked = tl.zeros([code.shape[0], code.shape[1]], tl.int32)  # [lanes, rows]
    highest = tl.full([code.shape[1]], ABSENT, code.dtype)  # [rows]
    for k in range(top_k):
        best = tl.max(tl.max(code, axis=2), axis=0)  # [rows]
        highest = tl.maximum(highest, best)
        tied = tl.where(code == best[None, :, None], expert, 0x7FFFFFFF)
        first = tl.min(tl.min(tied, axis=2), axis=0)  # [rows]
        picked = tl.where(lane == k, first[None, :], picked)
        code = drop(code, expert != first[None, :, None])
    return picked, highest


@triton.jit
def _best_two(first: tl.tensor, second: tl.tensor, third: tl.tensor, fourth: tl.tensor) -> tl.tuple:
    """Return the two highest of two sorted pairs."""
    return tl.maximum(first, third), tl.maximum(tl.minimum(first, third), tl.maximum(second, fourth))


@triton.jit
def keep_best_groups(
    code: tl.tensor, groups: tl.constexpr, kept: tl.constexpr, has_bias: tl.constexpr
) -> tl.tensor:
    """Return `code` [lanes, rows, width] with ABSENT for the experts outside the `kept` best groups.

    A group is ``lanes / groups`` consecutive lanes. Its score is its highest choice, with a bias the sum
    of its two highest finite ones; ties go to the lower group. Groups of padding have the highest numbers
    and no finite choice, so they come last.
    """
    rows: tl.constexpr = code.shape[1]
    grouped = tl.reshape(code, [groups, code.shape[0] // groups, rows, code.shape[2]])
    if has_bias:
        absent = drop(grouped, tl.full(grouped.shape, 0, tl.int1))
        first, second = tl.reduce(tl.reduce((grouped, absent), 3, _best_two), 1, _best_two)  # [groups, rows]
        score = value_of(first.to(tl.int32)) + tl.where(
            second > NOT_FINITE, value_of(second.to(tl.int32)), 0.0
        )
        # A sum can overflow to -inf: still better than a group without a finite choice.
        rank = tl.where(first > NOT_FINITE, tl.maximum(code_of(score), NOT_FINITE + 1), NOT_FINITE)
    else:
        rank = tl.max(tl.max(grouped, axis=3), axis=1)  # [groups, rows]
    own = tl.arange(0, groups)[:, None, None]
    other = tl.arange(0, groups)[None, :, None]
    mine = rank[:, None, :]
    theirs = rank[None, :, :]
    ahead = (theirs > mine) | ((theirs == mine) & (other < own))  # [groups, groups, rows]
    place = tl.sum(ahead.to(tl.int32), axis=1)  # [groups, rows]
    grouped = drop(grouped, (place < kept)[:, None, :, None])
    return tl.reshape(grouped, code.shape)
