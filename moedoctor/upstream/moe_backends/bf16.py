"""vLLM's backends for unquantised weights: TRITON, FLASHINFER_…."""

from __future__ import annotations

from typing import Any

import torch

from moedoctor.reference.moe_layer import Layer
from moedoctor.upstream.moe_backends.common import VllmBackend, load

NAMES = ("TRITON", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM")


class VllmBf16(VllmBackend):
    """Weights in bfloat16."""

    oracle = "oracle.unquantized"
    backends = "UnquantizedMoeBackend"

    def __init__(self, name: str) -> None:
        super().__init__(name, "bf16", "none")

    def _build(
        self, layer: Layer, holder: Any, config: Any, kernel_class: Any
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        assert isinstance(layer.w13, torch.Tensor)
        assert isinstance(layer.w2, torch.Tensor)
        oracle, member = load(self.oracle), self._member()
        w13, w2 = oracle.convert_to_unquantized_kernel_format(
            unquantized_backend=member, layer=holder, w13_weight=layer.w13, w2_weight=layer.w2
        )
        kernel = oracle.make_unquantized_moe_kernel(
            quant_config=load("config").FUSED_MOE_UNQUANTIZED_CONFIG,
            moe_config=config,
            backend=member,
            experts_cls=kernel_class,
        )
        return kernel, w13, w2
