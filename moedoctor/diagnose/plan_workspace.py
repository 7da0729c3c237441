"""The memory that a MoE backend needs beside weights and cache, as far as upstream's code says it.

vLLM asks every backend for the shapes of its workspaces (`workspace_shapes`) and keeps them for the largest
batch. The shapes below are those of 0.19.1 and 0.21.0. What a FlashInfer backend allocates inside its own
library is not in that code, so it is not known here and has to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from moedoctor.models.layer_shape import LayerShape


@dataclass(frozen=True)
class Workspace:
    """Workspace of a backend in bytes; None where upstream's Python code does not say it."""

    bytes: int | None
    how: str
    """The shapes that it was computed from, or why it is not known."""


def workspace(backend: str, layer: LayerShape, batched_tokens: int, *, model_bytes: int = 2) -> Workspace:
    """Workspace of `backend` (vLLM's name, any case) for a batch of `batched_tokens` tokens."""
    name = backend.upper()
    rows = batched_tokens * layer.top_k
    hidden, half = layer.hidden, layer.intermediate
    w13 = layer.w13_rows
    if name == "MARLIN":
        # The second takes 2 x intermediate_size also where there is no gate half (ReLU²) to hold.
        elements = rows * max(half, hidden) + rows * max(2 * half, hidden)
        how = f"[{rows}, {max(half, hidden)}] and [{rows}, {max(2 * half, hidden)}] elements"
    elif name == "TRITON":
        elements = rows * max(half, hidden) + rows * max(w13, hidden)
        how = f"[{batched_tokens}, {layer.top_k}, {max(half, hidden)}] and [..., {max(w13, hidden)}] elements"
    else:
        return Workspace(None, f"{name} allocates its workspace inside its own library; give --workspace")
    return Workspace(elements * model_bytes, how)
