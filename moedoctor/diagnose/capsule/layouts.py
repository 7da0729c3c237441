"""Compares the backend's tensors with the checkpoint's: their layout, and which experts differ.

A capsule may hold tensors as the backend got them (``backend.NAME``). Each is compared, an expert at a time,
with the checkpoint's tensors of the same matrix in the layouts of `_yield_forms`. A tensor in none may
still hold the same codes in another order, as Marlin's weights do. An expert that differs from the others is
named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moedoctor.fixes.moe.weight_layout import tile_scales
from moedoctor.trace.capsule import OF_BACKEND, Capsule

AS_STORED = "as the checkpoint has it"
TILED = "in tiles of 128 x 4"
EXCHANGED = "with gate and up exchanged"
REORDERED = "the same bytes in another order"
REPACKED = "the same codes in another order"
RENAMED = "as many equal codes, in another order"
OTHER = "other values"
_FACTOR = "times {:.6g}"
_LEAST_CODES = 8
"""Different codes that a tensor must have before the counts of equal ones say anything."""


@dataclass(frozen=True)
class OddExpert:
    """An expert whose tensor is not laid out as those of the others, or holds other values."""

    expert: int
    """Its id in the layer."""
    form: str
    like: int | None = None
    """The expert whose values it holds instead, if it is one of the capsule."""


@dataclass(frozen=True)
class BackendTensor:
    name: str
    of: str | None
    """The capsule's tensor that it holds; None if it is none of them."""
    form: str
    """The layout that most experts have."""
    odd: tuple[OddExpert, ...] = ()


def compare_backend_tensors(capsule: Capsule) -> list[BackendTensor]:
    """Return what each tensor of the backend holds, in the order of their names."""
    return [
        _compare(capsule, name)
        for name in sorted(capsule.tensors)
        if name.startswith(OF_BACKEND) and "w13" in capsule.tensors
    ]


def _compare(capsule: Capsule, name: str) -> BackendTensor:
    own = capsule.tensors[name]  # [U, ...]
    short = name.removeprefix(OF_BACKEND)
    matrix = "w13" if "w13" in short or "w1_" in short else "w2" if "w2" in short else ""
    candidates = [f"{matrix}{part}" for part in ("", "_block_scales", "_scale")] if matrix else []
    gated = matrix == "w13" and capsule.record.shape.gated
    held = [each for each in candidates if each in capsule.tensors]
    found = {each: _find_forms(own, capsule.tensors[each], gated=gated) for each in held}
    fits = {each: sum(_RANK.get(form, _RANK[_FACTOR]) for form in forms) for each, forms in found.items()}
    of = max(fits, key=fits.__getitem__, default="")
    if not fits.get(of):
        return BackendTensor(short, None, OTHER)
    forms = found[of]
    common = Counter(forms).most_common(1)[0][0]
    ids = capsule.expert_ids
    odd = tuple(
        OddExpert(
            ids[place], _relate(form, common), _find_expert(own, capsule.tensors[of], place, common, ids)
        )
        for place, form in enumerate(forms)
        if form != common
    )
    return BackendTensor(short, of, common, odd)


_RANK = {
    AS_STORED: 10,
    TILED: 10,
    EXCHANGED: 10,
    f"{TILED}, {EXCHANGED}": 10,
    _FACTOR: 8,
    REORDERED: 6,
    REPACKED: 4,
    RENAMED: 1,
    OTHER: 0,
}
"""The weight of each form; a tensor is taken for the matrix with the most weight over its experts."""


def _find_forms(own: torch.Tensor, stored: torch.Tensor, *, gated: bool) -> list[str]:
    """Return the form of each expert of `own` [U, ...], of the checkpoint's `stored` [U, ...]."""
    if stored.dtype == torch.float32 and own.is_floating_point() and own[0].numel() <= stored[0].numel():
        return [_find_factor(part, other) for part, other in zip(own, stored, strict=True)]
    exact = dict(_yield_forms(stored, gated=gated))
    return [
        next((form for form, tensor in exact.items() if _has_same_bytes(part, tensor[place])), None)
        or _compare_codes(_view_bytes(part), _view_bytes(stored[place]))
        for place, part in enumerate(own)
    ]


def _yield_forms(stored: torch.Tensor, *, gated: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield AS_STORED, stored
    raw = stored.view(torch.uint8) if stored.element_size() == 1 else stored
    exchanged = None
    if gated and raw.dim() == 3:
        exchanged = torch.cat(raw.chunk(2, dim=1)[::-1], dim=1)  # [U, 2I, ...]
        yield EXCHANGED, exchanged
    if stored.dtype == torch.float8_e4m3fn and stored.dim() == 3:
        yield TILED, tile_scales(raw)
        if exchanged is not None:
            yield f"{TILED}, {EXCHANGED}", tile_scales(exchanged)


def _has_same_bytes(own: torch.Tensor, stored: torch.Tensor) -> bool:
    return own.nbytes == stored.nbytes and torch.equal(_view_bytes(own), _view_bytes(stored))


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8 [B]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _compare_codes(own: torch.Tensor, stored: torch.Tensor) -> str:
    """Return in which way bytes [B] hold the same codes as others [B'], in whatever order."""
    counts, wanted = own.bincount(minlength=256), stored.bincount(minlength=256)  # [256] each
    if torch.equal(counts, wanted):
        return REORDERED
    if torch.equal(_count_nibbles(counts), _count_nibbles(wanted)):
        return REPACKED
    several = int((wanted > 0).sum()) >= _LEAST_CODES and len(own) == len(stored)
    return RENAMED if several and torch.equal(counts.sort().values, wanted.sort().values) else OTHER


def _count_nibbles(counts: torch.Tensor) -> torch.Tensor:
    """Return [16]: how often each half of a byte occurs, of the counts of bytes [256]."""
    square = counts.view(16, 16)  # high half, low half
    return square.sum(0) + square.sum(1)


def _find_factor(own: torch.Tensor, stored: torch.Tensor) -> str:
    """Return the factor by which float scales differ from the checkpoint's; `OTHER` if by no single one."""
    got, want = own.double().flatten(), stored.double().flatten()
    wanted = want if got.numel() == want.numel() else want.amax().expand_as(got)
    ratios = got / wanted
    if bool(ratios.isfinite().all()) and bool(ratios.max() - ratios.min() <= 1e-5 * ratios.abs().max()):
        factor = float(ratios.mean())
        return AS_STORED if abs(factor - 1) < 1e-6 else _FACTOR.format(factor)
    return "the reciprocal" if bool(((got * wanted - 1).abs() < 1e-5).all()) else OTHER


def _relate(form: str, common: str) -> str:
    """Return the form of an expert whose factor differs from that of the others by that difference."""
    if not (form.startswith("times ") and common.startswith("times ")):
        return form
    return f"{float(form.split()[1]) / float(common.split()[1]):.4g} times the others'"


def _find_expert(
    own: torch.Tensor, stored: torch.Tensor, place: int, common: str, ids: Sequence[int]
) -> int | None:
    """Return the expert whose values `place` holds, in the common form; None if none of the capsule."""
    if stored[0].numel() < _LEAST_CODES:
        return None  # a scale may be equal by chance
    form = dict(_yield_forms(stored, gated=stored.dim() == 3)).get(common)

    def fits(other: int) -> bool:
        if form is not None:
            return _has_same_bytes(own[place], form[other])
        return _compare_codes(_view_bytes(own[place]), _view_bytes(stored[other])) == common

    return next((id for other, id in enumerate(ids) if other != place and fits(other)), None)
