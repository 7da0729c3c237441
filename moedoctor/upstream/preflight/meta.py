"""Meta tensors in place of device memory, and headers in place of weights; what is written is counted.

`OnMeta` sends what asks for a CUDA device to the meta device. While it watches, it keeps the regions that
were written of each storage, and those that were read of each tensor of the checkpoint. `NewMemory` counts
the bytes that weights take while they are repacked.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import empty
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily, get_overridable_functions
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
MADE = os.sep + "names of the release"
"""In place of a file, if there is none: its tensors were made by `names.list_tensors`."""
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
_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.pin_memory}
_UNIQUE = {torch.unique, torch.Tensor.unique}
_ABOVE = {torch.Tensor.__gt__, torch.Tensor.gt, torch.gt}
_ANSWERED = _QUESTIONS | _MOVES | _UNIQUE | _ABOVE


@dataclass
class Stored:
    """A tensor of the checkpoint while it is loaded."""

    tensor: torch.Tensor
    """Kept, so that no other storage gets the place of its own."""
    storage: int
    read: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """Region -> elements that were copied out of it."""
    cast: tuple[str, str] | None = None
    """(dtype stored, dtype of the parameter) of a copy that changes what the bytes mean."""


class OnMeta(TorchFunctionMode):
    """Everything is meta: what would be on the GPU, and the weights."""

    def __init__(self, headers: Headers) -> None:
        super().__init__()
        self.headers = headers
        self.watching = False
        self.questions = 0
        """Decisions that depend on values, answered as for a sound checkpoint."""
        self.written: dict[int, dict[tuple[Any, ...], int]] = {}
        self.stored: dict[str, Stored] = {}
        self.taken: dict[str, tuple[bool, float, list[int]]] = {}
        """Tensor -> (True if something took it, share of it that was read, shape), draft included."""
        self.current = ""
        """The tensor that the loader took last; empty before the first one and after the last one."""
        self._by_storage: dict[int, Stored] = {}
        self._unused: set[int] = set()
        """Storages of the checkpoint whose shape alone was looked at: no operation took them."""
        self._is_inside = False
        """True inside a replaced function: what it calls is torch's own affair."""

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Count anew what is written and read in this block, then add what a model of this rank took.

        Torch calls a mode for each look at a shape, too. So here its functions are replaced instead.
        """
        self.watching = True
        self.written, self.stored, self._by_storage, self._unused, self.current = {}, {}, {}, set(), ""
        data: Any = torch.Tensor.data
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_pop_mode_temporarily())
                for owner, name in _list_functions():
                    function = self._replace(getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, function))
                setter = property(data.__get__, self._replace(data.__set__))
                stack.enter_context(mock.patch.object(torch.Tensor, "data", setter))
                yield
        finally:
            self.watching = False
            for name, stored in self.stored.items():
                used, share, shape = self.taken.get(name, (False, 0.0, list(stored.tensor.shape)))
                read = min(1.0, sum(stored.read.values()) / max(1, stored.tensor.numel()))
                self.taken[name] = (used or stored.storage not in self._unused, max(share, read), shape)

    def _replace(self, function: Any) -> Callable[..., Any]:
        """Return a function in place of one of torch, which does what this mode would do."""
        is_seen = function in _WRITES or function in _ANSWERED

        def call(*arguments: Any, **options: Any) -> Any:
            if self._is_inside or not (is_seen or options or self._unused):
                return function(*arguments, **options)
            self._is_inside = True
            try:
                return self.__torch_function__(function, (), arguments, options)
            finally:
                self._is_inside = False

        return call

    def __torch_function__(
        self, function: Any, kinds: Any, arguments: Any = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if (name := getattr(function, "__name__", "")) in _LOOKS:  # most of the calls of a loader
            return function(*arguments, **(options or {}))
        is_noted = self.watching and (self._unused or function in _WRITES)
        if not options and function not in _ANSWERED:
            answer = function(*arguments)  # first, so that an error is torch's and not ours
            if is_noted:
                self._note(function, arguments)
            return answer
        if is_noted:
            self._note(function, arguments)
        options = dict(options or {})
        if "device" in options and (_is_cuda(options["device"]) or type(options["device"]) is int):
            options["device"] = "meta"
        if options.pop("pin_memory", False):
            options["device"] = "meta"
        first = arguments[0] if arguments and isinstance(arguments[0], torch.Tensor) else None
        if first is not None and first.is_meta:
            if function in _QUESTIONS and not (function in _REDUCED and (len(arguments) > 1 or options)):
                return self._answer(function, first)
            if function in _UNIQUE:
                return first.flatten()[:1]  # a sound checkpoint has one scale in all shards
            if function in _ABOVE and arguments[1:] == (0,):
                mask = function(*arguments)
                mask.is_of_scales = True
                return mask
        if function in _MOVES:
            if name == "cpu":  # numpy unpacks zero points
                return torch.zeros(first.shape, dtype=first.dtype) if first is not None else None
            if name == "cuda":
                return arguments[0].to("meta")
            is_real = first is not None and not first.is_meta
            # Real integers, such as the places of a rank's experts: their values are read.
            if name == "pin_memory" or (is_real and arguments[0].dtype in _INDICES):
                return arguments[0]
            arguments = tuple("meta" if _is_cuda(each) else each for each in arguments)
        return function(*arguments, **options)

    def _answer(self, function: Any, asked: torch.Tensor) -> Any:
        """Answer a question about values as a sound checkpoint would: no NaN, all equal, scales above 0."""
        self.questions += 1
        if function in _REDUCED:
            return torch.tensor(function.__name__ == "all" or hasattr(asked, "is_of_scales"))
        return True if function.__name__ in ("__bool__", "allclose", "equal") else 1

    def _note(self, function: Any, arguments: Any) -> None:
        """Count what an operation writes and reads."""
        takes = [each for each in arguments[:3] if isinstance(each, torch.Tensor) and each.is_meta]
        keys = [each.untyped_storage()._cdata for each in takes]
        self._unused.difference_update(keys)
        if function not in _WRITES or not takes or takes[0] is not arguments[0]:
            return
        name = function.__name__
        if name == "fill_" and not self.stored:
            return
        target = takes[0][arguments[1]] if name == "__setitem__" else takes[0]
        # The same region twice, such as a shape that each shard has, counts once.
        self.written.setdefault(keys[0], {})[_locate(target)] = target.numel()
        stored, view = self._by_storage.get(keys[-1]), takes[-1]
        if stored is not None and name == "copy_":
            stored.read[_locate(view)] = view.numel()
            if not _keeps_meaning(view.dtype, target.dtype) and view.numel() > 1:
                stored.cast = (_show_dtype(view.dtype), _show_dtype(target.dtype))

    def read_weights(self, files: Any, *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of safetensors files from their headers, in place of vLLM's iterator."""
        for file in sorted(map(str, files)):
            for name, dtype, shape in self.headers.get(os.path.realpath(file), ()):
                if dtype not in DTYPES:
                    raise ValueError(f"{name} has the type {dtype}, which is not known here")
                with torch._C.DisableTorchFunction():
                    tensor = empty(shape, dtype=DTYPES[dtype], device="meta")
                    storage = tensor.untyped_storage()._cdata
                self.stored[name] = self._by_storage[storage] = Stored(tensor, storage)
                self._unused.add(storage)
                self.current = name
                yield name, tensor
        self.current = ""

    def share_written(self, parameter: torch.Tensor) -> float:
        """Return the share of a parameter's elements that were written at least once, at most 1."""
        regions = self.written.get(parameter.untyped_storage()._cdata, {})
        return min(1.0, sum(regions.values()) / max(1, parameter.numel()))


class NewMemory(TorchDispatchMode):
    """Counts the bytes of meta tensors that are made beside those of a layer."""

    def __init__(self, loaded: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._loaded = {each.untyped_storage()._cdata: each.untyped_storage() for each in loaded}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, kinds: Any, arguments: Any = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        places, mask = 0, arguments[1][0] if function is torch.ops.aten.index.Tensor else None
        if mask is not None and mask.is_meta and mask.dtype is torch.bool:
            # At most all of it is selected. torch makes the places first, an int64 for each dimension.
            places = torch.int64.itemsize * mask.dim() * mask.numel()
            answer = arguments[0].new_empty((mask.numel(), *arguments[0].shape[mask.dim() :]))
        else:
            answer = function(*arguments, **(options or {}))
        given = {storage._cdata for storage in _list_storages((arguments, options))}
        made = [each for each in _list_storages(answer) if each._cdata not in given]
        self._made |= {each._cdata: (StorageWeakRef(each), each.nbytes()) for each in made}
        self.peak = max(self.peak, self.count_made() + places)
        return answer

    def count_made(self) -> int:
        """Return the bytes of the tensors that were made and still live."""
        self._made = {key: row for key, row in self._made.items() if not row[0].expired()}
        return sum(size for _, size in self._made.values())

    def count_left(self, layer: Iterable[torch.Tensor]) -> int:
        """Return how many bytes more than before a layer takes, which has these tensors now."""
        kept = {each.untyped_storage()._cdata for each in layer}
        return self.count_made() - sum(s.nbytes() for key, s in self._loaded.items() if key not in kept)


@functools.cache
def _list_functions() -> list[tuple[Any, str]]:
    """Return (owner, name) of the functions for which torch calls a mode, but those that only look."""
    functions = [*itertools.chain(*get_overridable_functions().values()), *_device_constructors()]
    numbers = set(map(id, functions))  # some cannot be hashed
    return [
        *((torch._ops.OpOverloadPacket, "__call__"), (torch._ops.OpOverload, "__call__")),
        *(
            (owner, name)
            for owner in (torch.Tensor, torch, torch.nn.functional, torch.linalg)
            for name in dir(owner)
            if name not in _LOOKS and id(getattr(owner, name)) in numbers
        ),
    ]


def _list_storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.is_meta)
    return [each.untyped_storage() for each in tensors]


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
