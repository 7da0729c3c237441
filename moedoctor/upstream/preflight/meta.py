"""Meta tensors in place of device memory, and headers in place of weights; what is written is counted.

`OnMeta` sends what asks for a CUDA device to the meta device. While it watches, it keeps the regions that
were written of each storage, and those that were read of each tensor of the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8),
}
Headers = Mapping[str, Sequence[tuple[str, str, Sequence[int]]]]
"""Path of a file -> its tensors as (name, dtype of safetensors, shape)."""
_LOOKS = frozenset(
    {
        *("__get__", "__len__", "__repr__", "__hash__", "data_ptr", "dim", "element_size", "get_device"),
        *("numel", "is_contiguous", "is_floating_point", "ndimension", "nelement", "size", "storage_offset"),
        *("stride", "untyped_storage"),
    }
)
"""Functions that look at a tensor and take nothing from it."""
_WRITES = {torch.Tensor.copy_, torch.Tensor.__setitem__, torch.Tensor.fill_}
_REDUCED = {torch.Tensor.any, torch.any, torch.Tensor.all, torch.all}
_QUESTIONS = _REDUCED | {
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.allclose,
    torch.equal,
}
_INDICES = (torch.int32, torch.int64, torch.bool)
_MOVES = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.pin_memory}


@dataclass
class Stored:
    """A tensor of the checkpoint while it is loaded."""

    tensor: torch.Tensor
    file: str
    used: bool = False
    """An operation has taken it, not only its shape."""
    read: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """Region -> elements that were copied out of it."""
    cast: tuple[str, str] | None = None
    """(dtype stored, dtype of the parameter) of a copy that changes what the bytes mean."""


class OnMeta(TorchFunctionMode):
    """Everything is meta: what would be on the GPU, and the weights."""

    def __init__(self, headers: Headers) -> None:
        super().__init__()
        self._headers = headers
        self.watching = False
        self.questions = 0
        """Decisions that depend on values, answered as for a sound checkpoint."""
        self.written: dict[int, dict[tuple[Any, ...], int]] = {}
        self.stored: dict[str, Stored] = {}
        self.taken: dict[str, tuple[bool, float, list[int]]] = {}
        """Tensor -> (a rank took it, largest share that a rank read of it, shape), of all ranks so far."""
        self.current = ""
        """The tensor that the loader took last; empty before the first one and after the last one."""
        self._by_storage: dict[int, str] = {}

    @property
    def has_headers(self) -> bool:
        """True if the checkpoint has tensors: a config alone has none."""
        return bool(self._headers)

    def watch(self) -> None:
        """Begin to count anew."""
        self.watching = True
        self.written, self.stored, self._by_storage, self.current = {}, {}, {}, ""

    def __torch_function__(
        self, function: Any, kinds: Any, arguments: Any = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in _LOOKS:  # most of the calls of a loader
            return function(*arguments, **(options or {}))
        options = dict(options or {})
        if self.watching:
            self._note(function, arguments)
        if "device" in options and (_is_cuda(options["device"]) or type(options["device"]) is int):
            options["device"] = "meta"
        if options.pop("pin_memory", False):
            options["device"] = "meta"
        first = arguments[0] if arguments and isinstance(arguments[0], torch.Tensor) else None
        if first is not None and first.is_meta:
            if function in _QUESTIONS and not (function in _REDUCED and (len(arguments) > 1 or options)):
                return self._answer(function)
            if function in (torch.unique, torch.Tensor.unique):
                return first.flatten()[:1]  # a sound checkpoint has one scale in all shards
        if function in _MOVES:
            if function is torch.Tensor.cuda:
                return arguments[0].to("meta")
            is_real = first is not None and not first.is_meta
            # Real integers, such as the places of a rank's experts: their values are read.
            if function is torch.Tensor.pin_memory or (is_real and arguments[0].dtype in _INDICES):
                return arguments[0]
            arguments = tuple("meta" if _is_cuda(each) else each for each in arguments)
        return function(*arguments, **options)

    def _answer(self, function: Any) -> Any:
        """Answer a question about values as a sound checkpoint would: no NaN, all equal."""
        self.questions += 1
        if function in _REDUCED:
            return torch.tensor(function in (torch.all, torch.Tensor.all))
        return True if function in (torch.Tensor.__bool__, torch.allclose, torch.equal) else 1

    def _note(self, function: Any, arguments: Any) -> None:
        """Count what an operation writes and reads."""

        def take(value: Any) -> tuple[Stored, torch.Tensor] | None:
            """Return the tensor of the checkpoint that `value` is a view of, which is then used."""
            name = None
            if isinstance(value, torch.Tensor) and value.is_meta:
                name = self._by_storage.get(value.untyped_storage()._cdata)
            if name is None:
                return None
            self.stored[name].used = True
            return self.stored[name], value

        source = None
        for each in arguments[:2]:
            source = take(each) or source
        if function not in _WRITES or not isinstance(arguments[0], torch.Tensor):
            return
        target = arguments[0]
        if function is torch.Tensor.__setitem__:
            target = target[arguments[1]]
            source = take(arguments[2]) or source
        if function is torch.Tensor.fill_ and source is None and not self.stored:
            return
        key = target.untyped_storage()._cdata
        # The same region twice, such as a shape that each shard has, counts once.
        self.written.setdefault(key, {})[_locate(target)] = target.numel()
        if source is not None and function is torch.Tensor.copy_:
            stored, view = source
            stored.read[_locate(view)] = view.numel()
            if not _keeps_meaning(view.dtype, target.dtype) and view.numel() > 1:
                stored.cast = (_show_dtype(view.dtype), _show_dtype(target.dtype))

    def read_weights(self, files: Any, *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of safetensors files from their headers, in place of vLLM's iterator."""
        for file in sorted(map(str, files)):
            for name, dtype, shape in self._headers.get(os.path.realpath(file), ()):
                tensor = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
                self.stored[name] = Stored(tensor, file)
                self._by_storage[tensor.untyped_storage()._cdata] = name
                self.current = name
                yield name, tensor
        self.current = ""

    def end_rank(self) -> None:
        """Add what this rank took of the checkpoint to what others took."""
        self.watching = False
        for name, stored in self.stored.items():
            used, share, shape = self.taken.get(name, (False, 0.0, list(stored.tensor.shape)))
            read = min(1.0, sum(stored.read.values()) / max(1, stored.tensor.numel()))
            self.taken[name] = (used or stored.used, max(share, read), shape)

    def share_written(self, parameter: torch.Tensor) -> float:
        """Return the share of a parameter's elements that were written at least once, at most 1."""
        regions = self.written.get(parameter.untyped_storage()._cdata, {})
        return min(1.0, sum(regions.values()) / max(1, parameter.numel()))


def _locate(view: torch.Tensor) -> tuple[Any, ...]:
    return (view.storage_offset(), tuple(view.shape), view.stride())


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _keeps_meaning(stored: torch.dtype, parameter: torch.dtype) -> bool:
    """Return False if a copy converts numbers that need a scale, or packed bits, to something else."""
    if stored == parameter:
        return True
    wide = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    if stored in wide or parameter in wide:
        return stored in wide and parameter in wide
    return stored.itemsize == parameter.itemsize


def _show_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
