"""The kernels that faulted, from CUDA's core dumps, or from what CUDA wrote into a log while it made one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from moedoctor.diagnose.autopsy.core_dump import EXCEPTIONS, DumpError, Size, is_core_dump, read_core_dump
from moedoctor.diagnose.autopsy.owners import Owner, demangle, find_owner
from moedoctor.diagnose.triage.cause import Errors
from moedoctor.text import escape, read_bytes

MOST_FILES = 64
_MOST_LOG = 64 * 2**20
_MOST_FAULTS = 100
_DETECTED = re.compile(rb"coredump: Detected an exception of type (\w{1,80}) \((\d{1,3})\)")
_FRAME = re.compile(rb"coredump: {0,8}#0\s{1,8}0x[0-9a-f]{1,16}\s{1,8}(\S.{0,2000})")
DUMP = (
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_ENABLE_LIGHTWEIGHT_COREDUMP=1 CUDA_COREDUMP_FILE=cuda.%p.core "
    "vllm serve …"
)
"""A command that a fault ends with a core dump without the contents of memory. `skip_abort` is not among its
flags: on an H200 with driver 580 the program then went on as if nothing had happened."""
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

    @property
    def summary(self) -> AutopsySummary:
        """The counts."""
        kinds = [each.kind for each in self.examined]
        return AutopsySummary(len(self.faults), kinds.count("core dump"), kinds.count("log"))


def examine(path: Path) -> AutopsyDocument:
    """Return what a core dump, a log, or a folder of dumps and capsules says.

    Raises DumpError for a damaged dump and for a folder without anything to read, TextFileError and OSError.
    """
    faults: list[KernelFault] = []
    examined: list[Examined] = []
    for file in _list_files(path):
        if file.suffix == ".moecapsule":
            examined.append(Examined(escape(file.name), "capsule"))
        elif is_core_dump(file):
            found, what = _read_dump(file)
            faults += found
            examined.append(what)
        else:
            found, what = _read_log(file)
            faults += found
            examined.append(what)
    capsules = [each.file for each in examined if each.kind == "capsule"]
    return AutopsyDocument(
        tuple(faults[:_MOST_FAULTS]), tuple(examined), tuple(_advise(faults, capsules, examined))
    )


def _list_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(
        file
        for file in path.iterdir()
        if file.is_file() and not file.is_symlink() and (file.suffix == ".moecapsule" or is_core_dump(file))
    )
    if not files:
        raise DumpError("no core dump of CUDA and no capsule is in this folder")
    if len(files) > MOST_FILES:
        raise DumpError(
            f"it holds {len(files)} dumps and capsules; expected up to {MOST_FILES}, or one of them"
        )
    return files


def _read_dump(file: Path) -> tuple[list[KernelFault], Examined]:
    dump = read_core_dump(file)
    faults = [
        KernelFault(
            file=escape(file.name),
            line=None,
            kernel=escape(demangle(fault.kernel.symbol)),
            symbol=escape(fault.kernel.symbol),
            exception=fault.exception,
            code=fault.code,
            owner=find_owner(fault.kernel.symbol, fault.source),
            function=escape(demangle(fault.function)) if fault.function else None,
            source=escape(fault.source) if fault.source else None,
            grid=fault.kernel.grid,
            block_size=fault.kernel.block,
            block=fault.block,
            thread=fault.thread,
            warps=fault.warps,
            blocks=fault.blocks,
        )
        for fault in dump.faults
    ]
    faulted = {fault.kernel for fault in dump.faults}
    running = [escape(demangle(kernel.symbol)) for kernel in dump.kernels if kernel not in faulted]
    note = (
        None if faults else "the dump records no exception of the GPU: it was asked for, or a kernel trapped"
    )
    return faults, Examined(
        escape(file.name),
        "core dump",
        escape(dump.gpu),
        dump.capability,
        dump.driver,
        dump.cuda,
        tuple(dict.fromkeys(running)),
        note,
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
            faults.append(
                KernelFault(
                    file=escape(file.name),
                    line=exception[0],
                    kernel=escape(demangle(symbol)),
                    symbol=escape(symbol),
                    exception=EXCEPTIONS.get(exception[1], f"exception {exception[1]}"),
                    code=exception[1],
                    owner=find_owner(symbol, None),
                )
            )
            exception = None
    return faults, Examined(escape(file.name), "log", note=None if faults else _judge_log(lines))


def _judge_log(lines: Sequence[bytes]) -> str:
    errors = Errors()
    errors.read(lines, range(1, len(lines) + 1))
    cause = errors.find_cause()
    if cause is None:
        return "no error ended what this log is of"
    if cause.kind != "kernel_fault":
        return f"line {cause.line}: {cause.says}: no kernel faulted, as far as this log tells"
    if cause.note:
        return (
            f"line {cause.line}: a kernel faulted, which the log does not name; {cause.place} may be innocent"
        )
    return f"line {cause.line}: a kernel faulted; launches were blocking, so {cause.place} is the place"


def _advise(
    faults: Sequence[KernelFault], capsules: Sequence[str], examined: Sequence[Examined]
) -> Iterator[str]:
    """Give what to do next, from what was found."""
    owners = [fault.owner for fault in faults if fault.owner]
    if any(owner.moe for owner in owners):
        yield (
            f"moedoctor replay {capsules[0]}: computes the last recorded call again"
            if capsules
            else f"{_RECORD}: keeps the calls before the crash, which `moedoctor replay` computes again"
        )
    if owners and not any(owner.moe for owner in owners):
        yield (
            "It is no kernel that only MoE layers use. CUDA_LAUNCH_BLOCKING=1 and --enforce-eager show the "
            "line of Python that launched it: what it was given comes from there"
        )
    if not faults and any("does not name" in (each.note or "") for each in examined):
        yield f"{DUMP}: then `moedoctor autopsy` names the kernel"
