"""The kernels that faulted, from CUDA's core dumps, or from what CUDA wrote into a log while it made one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moedoctor.diagnose.autopsy.core_dump import (
    EXCEPTIONS,
    DumpError,
    Size,
    is_core_dump,
    is_elf,
    read_core_dump,
)
from moedoctor.diagnose.autopsy.cuda_gdb import SECONDS, ask_cuda_gdb
from moedoctor.diagnose.autopsy.known_tensors import (
    KnownTensor,
    TensorPlace,
    find_places,
    list_tensors,
    read_record,
)
from moedoctor.diagnose.autopsy.owners import Owner, demangle, find_owner
from moedoctor.diagnose.cuda.elf import ElfError
from moedoctor.diagnose.triage.cause import Errors
from moedoctor.text import TextFileError, escape, read_bytes

MOST_FILES = 1024
"""A recording leaves two capsules a layer."""
SUFFIX = ".moecapsule"
_MOST_LOG = 64 * 2**20
_MOST_FAULTS = 100
_DETECTED = re.compile(rb"coredump: Detected an exception of type (\w{1,80}) \((\d{1,3})\)")
_FRAME = re.compile(rb"coredump: {0,8}#0\s{1,8}0x[0-9a-f]{1,16}\s{1,8}(\S.{0,2000})")
_PROCESS = re.compile(r"cuda\.(\d{1,10})\.core")
_RECORD = "moedoctor record --when crash -- vllm serve …"


@dataclass(frozen=True)
class KernelFault:
    """A kernel that faulted, and whose it is."""

    file: str
    """The dump or log that says so."""
    line: int | None
    """Of a log."""
    kernel: str
    """Its qualified name; empty if the dump has none."""
    symbol: str
    exception: str
    code: int
    owner: Owner | None
    function: str | None = None
    """The device function of the kernel that holds the instruction, if that is another symbol."""
    source: str | None = None
    """FILE:LINE of the instruction."""
    grid: Size | None = None
    block_size: Size | None = None
    block: Size | None = None
    thread: Size | None = None
    """The first thread that faulted, in its block. None in a log, like the sizes and counts."""
    warps: int | None = None
    blocks: int | None = None
    address: str | None = None
    """The address that the first thread's instruction used, such as ``0x7f2a5be00180``."""
    tensors: tuple[TensorPlace, ...] = ()
    """The recorded tensors that the kernel was given, and those that hold the address, the nearest first."""


@dataclass(frozen=True)
class Examined:
    """A file that was read."""

    file: str
    kind: str
    """``core dump``, ``log`` or ``capsule``."""
    gpu: str | None = None
    capability: str | None = None
    driver: str | None = None
    cuda: str | None = None
    running: tuple[str, ...] = ()
    """The kernels that were on the GPU and did not fault."""
    note: str | None = None
    debugger: tuple[str, ...] = ()
    """The stack and the next instruction of the first thread that faulted, as cuda-gdb shows them."""
    no_debugger: str | None = None
    """The reason why cuda-gdb was not used, and the dump was read by moedoctor alone."""


@dataclass(frozen=True)
class CallReplay:
    """The last recorded call, computed again by every backend that runs here, each in its own process."""

    capsule: str
    layer: str
    call: int
    faulted: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    """``NAME: why`` of backends that failed without a fault of a kernel."""
    problem: str | None = None
    """The reason why no backend ran."""


@dataclass(frozen=True)
class AutopsySummary:
    """The counts."""

    faults: int
    dumps: int
    logs: int


@dataclass(frozen=True)
class AutopsyDocument:
    """The report of dumps and logs about the kernel that ended a process."""

    command: ClassVar[str] = "autopsy"
    faults: tuple[KernelFault, ...]
    examined: tuple[Examined, ...]
    next_steps: tuple[str, ...]
    replay: CallReplay | None = None
    """None if no call was computed again."""

    @property
    def summary(self) -> AutopsySummary:
        kinds = [each.kind for each in self.examined]
        return AutopsySummary(len(self.faults), kinds.count("core dump"), kinds.count("log"))


def examine(path: Path) -> AutopsyDocument:
    """Return what a core dump, a log, or a folder of dumps and capsules says.

    Raises ElfError for a damaged dump and for a folder without anything to read, TextFileError and OSError.
    """
    return examine_files(_list_files(path))


def examine_files(files: Sequence[Path], refuse: Callable[[str], None] | None = None) -> AutopsyDocument:
    """Return what dumps, logs and capsules say together.

    With `refuse`, all but the capsules are dumps, and it takes a line about each damaged one. Without it, a
    damaged dump raises ElfError.
    """
    faults: list[KernelFault] = []
    examined: list[Examined] = []
    records = {file: read_record(file) for file in files if file.suffix == SUFFIX}
    tensors = list_tensors(records.values())
    until = time.monotonic() + SECONDS
    for file in files:
        if file in records:
            examined.append(Examined(_name(file), "capsule"))
            continue
        try:
            is_dump = refuse is not None or is_elf(file)
            found, what = _read_dump(file, tensors, until) if is_dump else _read_log(file)
        except (ElfError, TextFileError, OSError) as error:
            if refuse is None:
                raise
            refuse(f"{_name(file)}: {error}")
            continue
        faults += found
        examined.append(what)
    call = find_last_call(records, [each.file for each in examined])
    return AutopsyDocument(
        tuple(faults[:_MOST_FAULTS]), tuple(examined), tuple(_advise(faults, call, examined))
    )


def find_last_call(records: Mapping[Path, Mapping[str, Any]], files: Sequence[str]) -> Path | None:
    """Return the capsule of the last call, if possible of a process that left a dump, and with weights."""
    processes = tuple(f"-{match[1]}{SUFFIX}" for file in files if (match := _PROCESS.search(file)))

    def rank(file: Path) -> tuple[bool, bool, int]:
        of_dump = file.name.endswith(processes) if processes else True
        return of_dump, records[file].get("weights") == "recorded", file.stat().st_size

    return max(records, key=rank, default=None)


def _name(file: Path) -> str:
    """Return a path that can be used in the folder where moedoctor was called."""
    here = os.path.relpath(file)
    return escape(str(file) if here.startswith("..") else here)


def _list_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(
        file
        for file in path.iterdir()
        if file.is_file() and not file.is_symlink() and (file.suffix == SUFFIX or is_core_dump(file))
    )
    if not files:
        raise DumpError("no core dump of CUDA and no capsule is in this folder")
    if len(files) > MOST_FILES:
        raise DumpError(
            f"it holds {len(files)} dumps and capsules; expected up to {MOST_FILES}, or one of them"
        )
    return files


def _read_dump(
    file: Path, tensors: Sequence[KnownTensor], until: float
) -> tuple[list[KernelFault], Examined]:
    dump = read_core_dump(file)
    faults = [
        _make_fault(
            file,
            None,
            fault.kernel.symbol,
            fault.code,
            fault.source,
            function=escape(demangle(fault.function)) if fault.function else None,
            grid=fault.kernel.grid,
            block_size=fault.kernel.block,
            block=fault.block,
            thread=fault.thread,
            warps=fault.warps,
            blocks=fault.blocks,
            address=None if fault.address is None else hex(fault.address),
            tensors=find_places(fault.address, fault.parameters, tensors),
        )
        for fault in dump.faults
    ]
    faulted = {fault.kernel for fault in dump.faults}
    running = [escape(demangle(kernel.symbol)) for kernel in dump.kernels if kernel not in faulted]
    note = (
        None if faults else "the dump records no exception of the GPU: it was asked for, or a kernel trapped"
    )
    return faults, Examined(
        _name(file),
        "core dump",
        escape(dump.gpu),
        dump.capability,
        dump.driver,
        dump.cuda,
        tuple(dict.fromkeys(running)),
        note,
        *ask_cuda_gdb(file, until),
    )


def _make_fault(
    file: Path, line: int | None, symbol: str, code: int, source: str | None = None, **more: Any
) -> KernelFault:
    """Return a fault of the kernel `symbol`, with its owner."""
    return KernelFault(
        _name(file),
        line,
        kernel=escape(demangle(symbol)),
        symbol=escape(symbol),
        exception=EXCEPTIONS.get(code, f"exception {code}"),
        code=code,
        owner=find_owner(symbol, source),
        source=escape(source) if source else None,
        **more,
    )


def _read_log(file: Path) -> tuple[list[KernelFault], Examined]:
    """Return what CUDA_COREDUMP_SHOW_PROGRESS wrote; without it, what the error in the log is worth."""
    lines = read_bytes(file, _MOST_LOG, "a log, or a core dump of CUDA").splitlines()
    faults: list[KernelFault] = []
    exception: tuple[int, int] | None = None
    for number, line in enumerate(lines, 1):
        if match := _DETECTED.search(line):
            exception = number, int(match[2])
        elif exception and (match := _FRAME.search(line)):
            symbol = match[1].decode("utf-8", "replace").strip()
            faults.append(_make_fault(file, exception[0], symbol, exception[1]))
            exception = None
    return faults, Examined(_name(file), "log", note=None if faults else _judge_log(lines))


def _judge_log(lines: Sequence[bytes]) -> str:
    errors = Errors()
    errors.read(lines, range(1, len(lines) + 1))
    cause = errors.find_cause()
    if cause is None:
        return "no error ended what this log is of"
    if cause.kind != "kernel_fault":
        return f"line {cause.line}: {cause.says}: no kernel faulted, as far as this log shows"
    if cause.note or not cause.place:
        innocent = f"; {cause.place} may be innocent" if cause.place else ""
        return f"line {cause.line}: a kernel faulted, which the log does not name{innocent}"
    return f"line {cause.line}: a kernel faulted; launches were blocking, so {cause.place} is the place"


def is_of_moe(faults: Sequence[KernelFault]) -> bool:
    """Return True if a kernel of a MoE layer faulted."""
    return any(fault.owner and fault.owner.moe for fault in faults)


def _advise(faults: Sequence[KernelFault], call: Path | None, examined: Sequence[Examined]) -> Iterator[str]:
    """Give what to do next, from what was found."""
    if is_of_moe(faults):
        yield (
            f"moedoctor replay {_name(call)} --backend all: computes the last recorded call again"
            if call
            else f"{_RECORD}: keeps the calls before the crash, which `moedoctor replay` computes again"
        )
    elif any(fault.owner for fault in faults):
        yield (
            "Not only MoE layers use this kernel. CUDA_LAUNCH_BLOCKING=1 and --enforce-eager show the "
            "line of Python that launched it: what it was given comes from there"
        )
    if not faults and any("does not name" in (each.note or "") for each in examined):
        yield f"{_RECORD}: asks CUDA for a core dump, and names the kernel"
