"""The expert weights of a whole layer in the form that `block_product` reads, made from a checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moedoctor.kernels.moe.nvfp4_words import pack_words

_LEAST_COLUMNS = 16
"""The fewest columns of a weight that share an FP8 scale: the shortest step of a tensor core."""


@dataclass(frozen=True)
class ExpertWeights:
    """One weight of all experts."""

    values: torch.Tensor
    """[E, N, K] in bfloat16, float16 or float8_e4m3fn (contiguous, K a multiple of 4); for NVFP4 int32
    [E, N, 8 * G] of `pack_words`"""
    block_scales: torch.Tensor | None = None
    """int32 [E, N, G] of `pack_words` for NVFP4"""
    scale: torch.Tensor | None = None
    """float32, contiguous: for NVFP4 [E] or [E, 2], for FP8 also [E, rows of scales, columns of scales]"""
    bias: torch.Tensor | None = None
    """[E, N]"""
    block: tuple[int, int] | None = None
    """Rows and columns of the weight that share an FP8 scale; None if all of a matrix, or of a half, do."""
    halves: int = 1
    """2 if gate and up have scales of their own."""

    @property
    def quantization(self) -> str:
        """``none``, ``fp8`` or ``nvfp4``."""
        if self.block_scales is not None:
            return "nvfp4"
        return "none" if self.scale is None else "fp8"

    def scale_layout(self, depth: int) -> tuple[int, int, int]:
        """Return (halves with scales of their own, rows that share a scale, columns that share a scale)."""
        rows, columns = self.block or (self.values.shape[1] // self.halves, depth)
        return self.halves, rows, min(columns, depth)


def make_fp8_weights(
    values: torch.Tensor,
    scale: torch.Tensor,
    *,
    block: tuple[int, int] | None = None,
    halves: int = 1,
    bias: torch.Tensor | None = None,
) -> ExpertWeights:
    """Return FP8 weights float8_e4m3fn [E, N, K] with dequantizing scales.

    `scale` is float32 [E] or [E, 1] (a scale a matrix), [E, 2] (one for each half), [E, N, 1] (one for each
    row; `block` None), or with a `block` of (n, k) [E, halves * ceil(N / halves / n), ceil(K / k)]. Raises
    ValueError for another shape or type, for blocks whose columns are not a multiple of 16, and for K that is
    not a multiple of 4, as kernels read four weights in a word.
    """
    experts, rows, depth = values.shape
    if values.dtype != torch.float8_e4m3fn or not values.is_contiguous():
        layout = "" if values.is_contiguous() else " that is not contiguous"
        raise ValueError(f"values: expected contiguous float8_e4m3fn, got {values.dtype}{layout}")
    if depth % 4:
        raise ValueError(f"values: expected columns in multiples of 4, got {depth}")
    if scale.dtype != torch.float32:
        raise ValueError(f"scale: expected float32, got {scale.dtype}")
    if scale.dim() == 3 and block is None and scale.shape[1:] == (rows, 1):
        block = (1, depth)
    if block is None:
        halves = scale.numel() // experts
        shape: tuple[int, ...] = (experts, halves)
        if halves not in (1, 2):
            raise ValueError(f"scale: expected [{experts}] or [{experts}, 2], got {list(scale.shape)}")
    else:
        tall, wide = block
        shape = (experts, halves * -(-(rows // halves) // tall), -(-depth // wide))
        if wide % _LEAST_COLUMNS and wide < depth:
            raise ValueError(f"block: expected columns in multiples of {_LEAST_COLUMNS}, got {wide}")
    if scale.numel() != torch.Size(shape).numel() or scale.shape[0] != experts:
        raise ValueError(f"scale: expected {list(shape)} for {list(values.shape)}, got {list(scale.shape)}")
    return ExpertWeights(values, None, scale.contiguous(), bias, block, halves)


def make_nvfp4_weights(
    packed: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> ExpertWeights:
    """Return NVFP4 weights of a checkpoint: `packed` uint8 [E, N, K / 2], `block_scales` E4M3 [E, N, K / 16].

    `global_scale` dequantizes: float32 [E], or [E, 2] if gate and up have scales of their own.
    """
    words, word_scales = pack_words(packed, block_scales)
    return ExpertWeights(
        words, word_scales, global_scale.contiguous(), bias, halves=global_scale.numel() // packed.shape[0]
    )
