"""A backend that is the reference, with a change to its outputs."""

import itertools
from collections.abc import Callable

import torch

from moedoctor.bench.moe.own_backends import Reference
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.agreement import Bounds
from moedoctor.reference.moe_backend import Backend, Computed, Prepared, Variant
from moedoctor.reference.moe_layer import Layer

Harm = Callable[[torch.Tensor, int, Layer], torch.Tensor]
"""(right output, number of the call from 1 on, layer) -> output"""
LAX = Bounds(cosine=-1, norm=1e9, element=1e9, matched=0, worst=1e9)
"""Bounds that nothing but NaN violates."""


class FakeBackend(Backend):
    variant = Variant("OURS", "nvfp4")

    def __init__(self, harm: Harm = lambda output, calls, layer: output) -> None:
        self.harm = harm
        self.prepared: list[Layer] = []

    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        return None

    def prepare(self, layer: Layer) -> Prepared:
        self.prepared.append(layer)
        right, calls = Reference("nvfp4").prepare(layer), itertools.count(1)
        return Computed(lambda *inputs: self.harm(right(*inputs), next(calls), layer))
