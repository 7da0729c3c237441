"""What stays on the device, by rules that the report lists, and which parameters a pattern names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from math import isfinite
from numbers import Real

import torch

_METADATA = re.compile(
    r"scale|zero|g_idx|sort_indices|absmax|(?:^|_)(?:zp|perm|permutation|alpha|global)s?(?=_|\d|$)"
)
_NAME_SHARE = 0.5
_TYPE_SHARE = 0.25
_VECTOR = 1 << 20

RULES = (
    "name: the parameter's own name holds scale, zero, g_idx, sort_indices, absmax, or the word zp, perm,"
    f" alpha or global, and it has at most {_NAME_SHARE:.0%} of the bytes of the largest parameter beside it",
    "type and size: another dtype than the largest parameter beside it, and at most"
    f" {_TYPE_SHARE:.0%} of its bytes",
    f"vector: at most one dimension and at most {_VECTOR >> 20} MiB",
    "small: fewer bytes than keep_below",
    "shared: its memory belongs to something that stays, to another layer, or is held under another tensor"
    " by an object of the module, such as a quantisation config",
    "reader: a hook before its layer's forward may read it, or a module outside of its layer owns it too",
    "written: the table of an embedding with max_norm, whose forward changes it",
    "kind: buffers, tensor subclasses, conjugate or negated views, and parameters outside of any layer",
)


def is_metadata_name(name: str) -> bool:
    """Whether the last dotted part of `name` is what quantisation metadata is called."""
    return _METADATA.search(name.rpartition(".")[2].lower()) is not None


def stays(name: str, tensor: torch.Tensor, siblings: Sequence[torch.Tensor], keep_below: int) -> str | None:
    """By which rule the parameter `tensor` stays on the device; None where it may go.

    `siblings`: all parameters of the module that owns it, itself among them.
    """
    if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
        return f"{type(tensor.data).__name__} of layout {tensor.layout}: not plain memory"
    if tensor.is_conj() or tensor.is_neg():
        return "conjugate or negative bit set: not plain memory"
    largest = max(siblings, key=lambda one: one.nbytes)
    share = tensor.nbytes / largest.nbytes if largest.nbytes else 1.0
    beside = largest is not tensor
    if beside and share <= _NAME_SHARE and is_metadata_name(name):
        return f"metadata by name, {share:.1%} of the largest parameter beside it"
    if beside and share <= _TYPE_SHARE and tensor.dtype != largest.dtype:
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"metadata by type and size: {kind}, {share:.1%} of the largest parameter beside it"
    if tensor.dim() <= 1 and tensor.nbytes <= _VECTOR:
        return "vector"
    if tensor.nbytes < max(keep_below, 1):
        return f"fewer than {max(keep_below, 1)} bytes"
    return None


def matches(names: Sequence[str], pattern: str) -> bool:
    """Whether `pattern` is whole dotted parts of one of `names`: ``experts`` of ``mlp.experts.w2_weight``."""
    return any(f".{pattern}." in f".{name}." for name in names)


def closest(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three things that could have been meant by `pattern`: parts of names, or else whole names."""
    parts = list(
        dict.fromkeys(part for name in names for part in [*name.split("."), name] if not part.isdigit())
    )
    return difflib.get_close_matches(pattern, parts, n=3, cutoff=0.5) or sorted(names, key=len)[:3]


def spread(count: int) -> list[int]:
    """0 … count - 1 in an order whose every beginning is spread out evenly.

    So a budget for half of the layers takes every other one, and each copy has two layers' time.
    """
    order: list[int] = []
    parts = 1
    while len(order) < count:
        for part in range(parts):
            index = (2 * part + 1) * count // (2 * parts)
            if index not in order:
                order.append(index)
        parts *= 2
        if parts > 4 * count:
            order.extend(index for index in range(count) if index not in order)
    return order[:count]


def is_number(value: object) -> bool:
    """Whether it is a finite number that a float holds."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:
        return False
