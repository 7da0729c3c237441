"""vLLM's backends for NVFP4 weights: MARLIN, EMULATION, FLASHINFER_…, VLLM_CUTLASS."""

from __future__ import annotations

from typing import Any

import torch

from moedoctor.reference.moe_layer import Layer
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.upstream.moe_backends.common import VllmBackend, load, scalar

NAMES = (
    "MARLIN",
    "EMULATION",
    "FLASHINFER_TRTLLM",
    "FLASHINFER_CUTEDSL",
    "FLASHINFER_CUTLASS",
    "VLLM_CUTLASS",
)


class VllmNvfp4(VllmBackend):
    """Weights as a ModelOpt checkpoint has them."""

    oracle = "oracle.nvfp4"
    backends = "NvFp4MoeBackend"
    keys = ("kNvfp4Static", "kNvfp4Dynamic")

    def __init__(self, name: str) -> None:
        super().__init__(name, "nvfp4", "none" if name == "MARLIN" else "nvfp4")

    def _build(
        self, layer: Layer, holder: Any, config: Any, kernel_class: Any
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        assert isinstance(layer.w13, Nvfp4)
        assert isinstance(layer.w2, Nvfp4)
        oracle, member, experts = load(self.oracle), self._member(), layer.shape.experts
        device = layer.w13.packed.device
        w13, w13_scale, w13_scale_2, a13_scale, w2, w2_scale, w2_scale_2, a2_scale = (
            oracle.convert_to_nvfp4_moe_kernel_format(
                nvfp4_backend=member,
                layer=holder,
                w13=layer.w13.packed.clone(),
                w13_scale=layer.w13.block_scales.clone(),
                w13_scale_2=layer.w13.global_scale.clone(),
                a13_scale=scalar(layer.input_scale, device, experts),
                w2=layer.w2.packed.clone(),
                w2_scale=layer.w2.block_scales.clone(),
                w2_scale_2=layer.w2.global_scale.clone(),
                a2_scale=scalar(layer.intermediate_scale, device, experts),
                is_act_and_mul=config.is_act_and_mul,
            )
        )
        quant_config = oracle.make_nvfp4_moe_quant_config(
            backend=member,
            w13_scale=w13_scale,
            w2_scale=w2_scale,
            w13_scale_2=w13_scale_2,
            w2_scale_2=w2_scale_2,
            a13_scale=a13_scale,
            a2_scale=a2_scale,
        )
        kernel = oracle.make_nvfp4_moe_kernel(
            moe_quant_config=quant_config, moe_config=config, experts_cls=kernel_class
        )
        holder.w13_weight_scale_2, holder.w2_weight_scale_2 = w13_scale_2, w2_scale_2
        holder.w13_input_scale, holder.w2_input_scale = a13_scale, a2_scale
        kernel.fused_experts.process_weights_after_loading(holder)
        return kernel, w13, w2
