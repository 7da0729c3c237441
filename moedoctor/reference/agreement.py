"""Whether a routing agrees with the reference, where experts that tie within rounding may change places."""

from __future__ import annotations

import torch


def differing_rows(
    logits: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    expected_ids: torch.Tensor,
    *,
    scoring: str,
    bias: torch.Tensor | None = None,
    renormalize: bool = False,
    atol: float = 1e-5,
) -> torch.Tensor:
    """[T] bool: the rows of a routing that part from the expected one by more than `atol`.

    `logits` [T, E] are finite or -Inf, `ids`, `weights` and `expected_ids` are [T, K]. Ids themselves are
    not compared: two experts may tie within rounding, and the order of a token's experts means nothing to
    the layer. What is compared is the chosen experts' choices (score + `bias`) from the highest down, and
    each weight with the score of the expert that it was given to. An id out of range makes its row differ.
    """
    logits = logits.float()  # [T, E]
    scores = torch.softmax(logits, 1) if scoring == "softmax" else torch.sigmoid(logits)  # [T, E]
    choice = scores if bias is None else scores + bias.float()  # [T, E]
    outside = (ids < 0) | (ids >= logits.shape[1])  # [T, K]
    own = ids.long().masked_fill(outside, 0)  # [T, K]
    score = scores.gather(1, own)  # [T, K]
    if renormalize:
        score = score / score.sum(1, keepdim=True)
    chosen = choice.gather(1, own).sort(dim=1, descending=True).values  # [T, K]
    best = choice.gather(1, expected_ids.long()).sort(dim=1, descending=True).values  # [T, K]
    return (outside | ((chosen - best).abs() > atol) | ~((weights - score).abs() <= atol)).any(1)
