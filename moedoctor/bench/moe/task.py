"""The task of a benchmark of MoE backends: backend, layer, tokens, routing. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_backend import Variant


@dataclass(frozen=True)
class Routing:
    """The rule by which expert ids are made."""

    kind: str = "balanced"
    """``balanced``: every expert as often; ``zipf``: by popularity; ``trace``: as a model's router chose"""
    skew: float = 1.0
    """Zipf: the n-th expert is chosen in proportion to ``n ** -skew``."""
    rows: Sequence[Sequence[int]] = ()
    """Trace: the ids of one token each."""


@dataclass(frozen=True)
class LayerTask:
    """One backend on one layer, at several numbers of tokens."""

    variant: Variant
    model: str
    """The layer's name in reports."""
    shape: LayerShape
    tokens: tuple[int, ...]
    routing: Routing = Routing()
    tune: bool = False
    """Also look for faster tiles of vLLM's Triton kernel."""
