"""Expert ids that a router rarely gives: the same expert twice in a row, and empty slots."""

from __future__ import annotations

import torch

IDS = ("distinct", "duplicates", "empty")


def unusual_ids(topk_ids: torch.Tensor, kind: str) -> torch.Tensor:
    """`topk_ids` [T, K] with every second token's first two slots at one expert, or with slots of -1.

    With ``empty`` a third of the tokens have no expert at all and another third one fewer; the first and the
    last token keep theirs, which planted faults change. ``distinct`` changes nothing. Raises ValueError for
    another kind, and for one that needs more slots.
    """
    if kind not in IDS:
        raise ValueError(f"ids: expected {', '.join(IDS)}, got {kind!r}")
    ids = topk_ids.clone()  # [T, K]
    if kind == "duplicates":
        if ids.shape[1] < 2:
            raise ValueError("ids: duplicates need a top_k of at least 2")
        ids[::2, 1] = ids[::2, 0]
    elif kind == "empty":
        inside = ids[1:-1]  # [T - 2, K], a view
        inside[::3] = -1
        inside[1::3, -1] = -1
    return ids
