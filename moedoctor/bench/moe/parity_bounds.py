"""How far each scheme may part from its reference on snapped inputs.

What is left there is the rounding of intermediates to bfloat16 (2**-9 of a value) and, where activations
are quantised by a backend that rounds in another order than the reference, values near the edge between two
codes that fall to the other side.
"""

from __future__ import annotations

from moedoctor.reference.token_agreement import Bounds

_BOUNDS = {
    "none": Bounds(cosine=0.9998, norm=0.015, element=0.02, matched=0.99, worst=0.08),
    "fp8": Bounds(cosine=0.998, norm=0.03, element=0.1, matched=0.95, worst=0.4),
    "nvfp4": Bounds(cosine=0.995, norm=0.04, element=0.15, matched=0.97, worst=0.6),
}


def bounds_of(activations: str) -> Bounds:
    """The bounds of a backend that quantises activations like that (``none``, ``fp8``, ``nvfp4``)."""
    return _BOUNDS[activations]
