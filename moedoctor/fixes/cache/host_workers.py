"""Workers on the CPU that compute experts in host memory; ``host_workers.c`` says how.

The file is compiled at first use, by the C compiler that Triton needs too. A worker that ends or is late ends
the process with one line and exit code 71: a sum that lacks its part must not reach a layer.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from moedoctor.fixes.cache.store import ExpertStore
from moedoctor.fixes.offload.pinned import allocate, register, view_on_device
from moedoctor.results import UnavailableError

MOST_TOKENS, MOST_EXPERTS, MOST_WORKERS = 8, 64, 64
LATE_MS = 5000
"""A worker that has not answered for so long ends the process."""
LEVELS: Mapping[str, tuple[str, ...]] = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "bmi2", "popcnt"),
    "avx2": ("avx2", "fma", "bmi2", "popcnt"),
    "plain": (),
}
"""Vector instructions of the CPU, the widest first -> flags of the compiler, named as in /proc/cpuinfo."""
_OPTIONS = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-Wno-psabi", "-pthread")
_SECONDS = 120.0
_PACKED = 0
_FORMATS = {torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.int32: 3}
"""Type of weights that are not packed -> ``enum format``."""


class _Matrix(ctypes.Structure):
    """``struct matrix``"""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride", "rows", "cols")),
        *((name, ctypes.c_int64) for name in ("scale_stride", "scale_rows", "scale_cols")),
        *((name, ctypes.c_int64) for name in ("block_bytes", "listed", "format")),
    ]


class _Layer(ctypes.Structure):
    """``struct layer``"""

    _fields_ = [("up", _Matrix), ("down", _Matrix)]


@dataclass(frozen=True)
class Box:
    """The memory through which a GPU and the workers talk: ``struct box``, seen from one of the two."""

    request: torch.Tensor  # int64 [1]: the stamp of the last request
    head: torch.Tensor  # int32 [3]: layer, number of experts, number of tokens
    answers: torch.Tensor  # int64 [workers]: the stamp of what each worker has computed
    ids: torch.Tensor  # int32 [MOST_EXPERTS]
    weights: torch.Tensor  # float32 [MOST_EXPERTS, MOST_TOKENS]; 0 if the token does not use the expert
    hidden: torch.Tensor  # bfloat16 [MOST_TOKENS, H]
    sums: torch.Tensor  # float32 [MOST_TOKENS, H]: what the workers computed

    @classmethod
    def view(cls, memory: torch.Tensor, hidden_size: int, workers: int) -> Box:
        """View uint8 `memory` as a box."""

        def view_part(start: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            count = dtype.itemsize * torch.Size(shape).numel()
            return memory[start : start + count].view(dtype).view(shape)

        return cls(
            view_part(0, torch.int64, 1),
            view_part(64, torch.int32, 3),
            view_part(128, torch.int64, workers),
            view_part(_IDS_AT, torch.int32, MOST_EXPERTS),
            view_part(_IDS_AT + 4 * MOST_EXPERTS, torch.float32, MOST_EXPERTS, MOST_TOKENS),
            view_part(_HIDDEN_AT, torch.bfloat16, MOST_TOKENS, hidden_size),
            view_part(_HIDDEN_AT + 2 * MOST_TOKENS * hidden_size, torch.float32, MOST_TOKENS, hidden_size),
        )


_IDS_AT = 128 + 8 * MOST_WORKERS
_HIDDEN_AT = _IDS_AT + 4 * MOST_EXPERTS * (1 + MOST_TOKENS)
_ROW_BYTES = (2 + 4) * MOST_TOKENS
"""Of hidden and sums, for each column."""


class HostWorkers:
    """Threads that answer requests for experts of several layers, until `stop` or the end of the process."""

    def __init__(
        self,
        stores: Sequence[ExpertStore],
        cores: Sequence[int],
        device: torch.device,
        *,
        level: str | None = None,
        late_ms: int = LATE_MS,
    ) -> None:
        """Start a worker on each of `cores`; a core of -1 is any.

        `stores` are the layers, in order, with the tensors of `find_problem`. Raises UnavailableError if they
        cannot be computed on this machine, or if no compiler or memory is to be had.
        """
        for number, store in enumerate(stores):
            if (problem := find_problem(store)) is not None:
                raise UnavailableError(f"layer {number} cannot be computed on the CPU: {problem}")
        if not 1 <= len(cores) <= MOST_WORKERS:
            raise UnavailableError(f"{len(cores)} workers; expected 1 to {MOST_WORKERS}")
        library = _load(level or find_levels()[0])
        self.count, self.experts = len(cores), stores[0].num_experts
        self.hidden_size, inner = sizes = _measure(stores[0], "w2")
        if any((store.num_experts, _measure(store, "w2")) != (self.experts, sizes) for store in stores):
            raise UnavailableError("layers have experts of different number or shape")
        gpu = device.type == "cuda"
        memory, failure = allocate(_HIDDEN_AT + _ROW_BYTES * self.hidden_size, register if gpu else None)
        if failure is not None:
            raise UnavailableError(f"no pinned memory to talk to the workers: {failure}")
        memory.bytes.zero_()
        self.box = Box.view(memory.bytes, self.hidden_size, self.count)  # as the host sees it
        mapped = view_on_device(memory.bytes, device) if gpu else memory.bytes
        self.device_box = Box.view(mapped, self.hidden_size, self.count)  # as the GPU sees it
        layers = (_Layer * len(stores))(
            *(_Layer(_describe(store, "w1"), _describe(store, "w2")) for store in stores)
        )
        counts = len(stores), self.experts, self.hidden_size, inner, self.count
        numbers = (ctypes.c_int * self.count)(*cores)
        self._crew = library.moedoctor_start(memory.bytes.data_ptr(), layers, *counts, numbers, late_ms)
        if not self._crew:
            raise UnavailableError(f"{self.count} threads for workers could not be started")
        self._library = library
        # What the threads read must outlive them.
        held = memory, layers, list(stores)
        self.stop = weakref.finalize(self, _stop, library, self._crew, os.getpid(), held)


def _stop(library: Any, crew: int, process: int, held: object) -> None:
    if os.getpid() == process:  # a fork has no threads to stop
        library.moedoctor_stop(ctypes.c_void_p(crew))


def find_problem(store: ExpertStore) -> str | None:
    """Return why workers cannot compute the experts of `store`, or None.

    They take ``w1`` [E, 2I, H], gate and up, and ``w2`` [E, H, I], of bfloat16, or of float8_e4m3fn with
    float32 scales ``_w1.scale`` and ``_w2.scale``: [E], or [E, rows, columns] of blocks. Of packed weights H
    and I are multiples of 64. They also take NVFP4 as vLLM repacks it for MARLIN: int32 [E, columns / 16,
    2 * rows], multiples of 64 too, float8_e4m3fn scales [E, columns / 16, rows] that hold other numbers, and
    float32 ``_w1.alpha_or_gscale`` [E].
    """
    names = set(store.shapes)
    for name, part in (("w1", "_w1"), ("w2", "_w2")):
        shape, dtype = store.shapes[name]
        wanted = _SCALES.get(dtype)
        if len(shape) != 2 or wanted is None:
            return f"its weights are {dtype}; expected bfloat16, float8_e4m3fn, or NVFP4 of MARLIN"
        for field in {*wanted, "scale", "alpha_or_gscale"}:
            given = store.shapes[f"{part}.{field}"][1] if f"{part}.{field}" in names else None
            if given is not wanted.get(field):
                return f"{dtype} weights have {field} {given}; expected {wanted.get(field)}"
            names.discard(f"{part}.{field}")
        sizes = [tuple(store.shapes[f"{part}.{field}"][0]) for field in wanted]
        if dtype is torch.int32 and sizes != [(shape[0], shape[1] // 2), ()]:
            return f"its scales are {sizes}; expected one for 16 inputs, and one for the expert"
    if names != {"w1", "w2"}:
        return f"it has {', '.join(sorted(names - {'w1', 'w2'}))}; expected weights and their scales alone"
    twice, hidden = _measure(store, "w1")
    inner = twice // 2
    is_tiled = store.packed or store.shapes["w1"][1] is torch.int32
    is_odd = hidden % 64 or inner % 64 if is_tiled else hidden % 16
    is_odd = is_odd or inner % min(_describe(store, "w1").scale_rows, inner)  # in rows of gate and up alike
    if is_odd or _measure(store, "w2") != (hidden, inner):
        return f"its shapes are {[list(store.shapes[name][0]) for name in ('w1', 'w2')]}"
    return None


_SCALES: Mapping[torch.dtype, Mapping[str, torch.dtype]] = {
    torch.bfloat16: {},
    torch.float8_e4m3fn: {"scale": torch.float32},
    torch.int32: {"scale": torch.float8_e4m3fn, "alpha_or_gscale": torch.float32},
}
"""Type of the weights -> the scales that they have, and the types of these."""


def _measure(store: ExpertStore, name: str) -> tuple[int, int]:
    """Return rows and columns of an expert's matrix."""
    (first, second), dtype = store.shapes[name]
    return (second // 2, first * 16) if dtype is torch.int32 else (first, second)


def _describe(store: ExpertStore, name: str) -> _Matrix:
    (rows, cols), dtype = _measure(store, name), store.shapes[name][1]
    matrix = _Matrix(rows=rows, cols=cols, scale_rows=rows, scale_cols=cols)
    if name in store.packed:
        packed = store.packed[name]
        matrix.data, matrix.stride = packed.blocks.data_ptr(), packed.blocks[0].nbytes
        matrix.block_bytes, matrix.listed, matrix.format = packed.blocks.shape[2], packed.listed, _PACKED
        return matrix
    matrix.data, matrix.stride = store.tensors[name].data_ptr(), store.tensors[name][0].nbytes
    matrix.format = _FORMATS[dtype]
    if dtype is not torch.bfloat16:
        scales = store.tensors[f"_{name}.scale"]  # [E], or [E, rows of blocks, columns of blocks]
        matrix.scales, matrix.scale_stride = scales.data_ptr(), scales[0].numel()
    if dtype is torch.int32:
        matrix.factors = store.tensors[f"_{name}.alpha_or_gscale"].data_ptr()
    elif dtype is torch.float8_e4m3fn and scales[0].numel() > 1:
        parts = 2 if name == "w1" else 1  # gate and up have blocks of their own
        matrix.scale_rows = _measure_block(rows // parts, scales.shape[1] // parts)
        matrix.scale_cols = _measure_block(cols, scales.shape[2])
    return matrix


def _measure_block(size: int, count: int) -> int:
    """Return how many of `size` rows share one of `count` scales: a power of two, or all."""
    fitting = (block for block in (1 << power for power in range(16)) if -(-size // block) == count)
    return min(next(fitting, size), size)


@cache
def find_levels() -> tuple[str, ...]:
    """Return those of `LEVELS` that this CPU has, the widest first; ``plain`` alone if it is not x86."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ("plain",)
    flags = next(
        (line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), []
    )
    return tuple(level for level, needed in LEVELS.items() if set(needed) <= set(flags))


def find_compiler() -> str:
    """Return the C compiler that Triton takes: ``CC`` if it names a program, else gcc, else clang.

    Raises UnavailableError if there is none.
    """
    for name in (os.environ.get("CC", ""), "gcc", "clang", "cc"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    raise UnavailableError("no C compiler was found; expected gcc or clang, or the variable CC")


def _find_folder() -> Path:
    """Return a folder for compiled files that only this user can write to. Raises UnavailableError."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(root) / "moedoctor" / "host_workers"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UnavailableError(f"{folder} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UnavailableError(f"{folder} must be a folder that only its owner can enter: chmod 700")
    return folder


def build(level: str) -> Path:
    """Return the shared object for one of `LEVELS`, compiled unless it is there. Raises UnavailableError."""
    source = (resources.files(__package__) / "host_workers.c").read_bytes()
    compiler = find_compiler()
    options = (*_OPTIONS, *(f"-m{flag}" for flag in LEVELS[level]))
    key = "\0".join((compiler, *options)).encode() + source
    target = _find_folder() / f"{level}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        code, made = Path(name, "host_workers.c"), Path(name, "made.so")
        code.write_bytes(source)
        command = [compiler, *options, str(code), "-o", str(made), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(f"{compiler} could not be run: {type(error).__name__}") from None
        if done.returncode or not made.is_file():
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [
                f"exit code {done.returncode}"
            ]
            raise UnavailableError(f"{compiler} did not compile the workers: {lines[0][:200]}")
        os.replace(made, target)  # two processes may build at once
    return target


def _load(level: str) -> Any:
    library = ctypes.CDLL(str(build(level)))
    numbers = (ctypes.c_int64,) * 5
    library.moedoctor_start.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        *numbers,
        ctypes.c_void_p,
        ctypes.c_int64,
    ]
    library.moedoctor_start.restype = ctypes.c_void_p
    library.moedoctor_fault.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.moedoctor_stop.restype = library.moedoctor_fault.restype = None
    return library
