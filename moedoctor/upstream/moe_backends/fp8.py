"""vLLM's backends for FP8 weights with one scale an expert: TRITON, MARLIN, VLLM_CUTLASS, FLASHINFER_…."""

from __future__ import annotations

from typing import Any

import torch

from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe_layer import Layer
from moedoctor.upstream.moe_backends.common import VllmBackend, load, scalar

NAMES = ("TRITON", "MARLIN", "VLLM_CUTLASS", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM")


class VllmFp8(VllmBackend):
    """Weights as a checkpoint with static per-tensor scales has them."""

    oracle = "oracle.fp8"
    backends = "Fp8MoeBackend"
    keys = ("kFp8StaticTensorSym", "kFp8StaticTensorSym")

    def __init__(self, name: str) -> None:
        super().__init__(name, "fp8", "none" if name == "MARLIN" else "fp8")

    def _build(
        self, layer: Layer, holder: Any, config: Any, kernel_class: Any
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        assert isinstance(layer.w13, Fp8)
        assert isinstance(layer.w2, Fp8)
        oracle, member, device = load(self.oracle), self._member(), layer.w13.values.device
        input_scale = scalar(layer.input_scale, device)
        intermediate_scale = scalar(layer.intermediate_scale, device)
        holder.w13_weight, holder.w2_weight = layer.w13.values, layer.w2.values
        w13, w2, w13_scale, w2_scale = oracle.convert_to_fp8_moe_kernel_format(
            fp8_backend=member,
            layer=holder,
            w13=layer.w13.values.clone(),
            w2=layer.w2.values.clone(),
            w13_scale=layer.w13.scale.clone(),
            w2_scale=layer.w2.scale.clone(),
            w13_input_scale=input_scale,
            w2_input_scale=intermediate_scale,
        )
        quant_config = oracle.make_fp8_moe_quant_config(
            fp8_backend=member,
            w1_scale=w13_scale,
            w2_scale=w2_scale,
            a1_scale=input_scale,
            a2_scale=intermediate_scale,
        )
        kernel = oracle.make_fp8_moe_kernel(
            moe_quant_config=quant_config, moe_config=config, experts_cls=kernel_class, fp8_backend=member
        )
        del holder.w13_weight, holder.w2_weight
        return kernel, w13, w2
