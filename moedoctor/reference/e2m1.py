"""E2M1, the 4-bit float of NVFP4 and MXFP4: one sign, two exponent and one mantissa bit.

Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3. There is neither Inf nor NaN.
"""

from __future__ import annotations

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitude of the codes 0 to 7; bit 3 is the sign."""
MAX = 6.0

_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Rounding changes here from code i to code i + 1."""


def encode(values: torch.Tensor) -> torch.Tensor:
    """Return uint8 codes 0..15 of `values`: to nearest, ties to the even code, beyond 6 to 6.

    The sign of a zero is kept. Raises ValueError for NaN, which has no code.
    """
    if bool(values.isnan().any()):
        raise ValueError("values: NaN has no E2M1 code")
    magnitude = values.abs().double().contiguous()  # [...]
    midpoints = torch.tensor(_MIDPOINTS, dtype=torch.float64, device=values.device)  # [7]
    code = torch.bucketize(magnitude, midpoints)  # [...], ties to the lower code
    tie = magnitude == midpoints[code.clamp(max=len(_MIDPOINTS) - 1)]  # [...]
    code = code + (tie & (code % 2 == 1))
    return (code + 8 * torch.signbit(values)).to(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of uint8 `codes`; only the low four bits count."""
    table = torch.tensor(VALUES + tuple(-value for value in VALUES), device=codes.device)  # [16]
    return table[(codes & 15).long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., K/2] of codes [..., K]: the even element in the low nibble, as checkpoints have it.

    Raises ValueError if K is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: the last dimension must be even, got {codes.shape[-1]}")
    codes = codes & 15
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 codes [..., K] of packed bytes [..., K/2]: the inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
