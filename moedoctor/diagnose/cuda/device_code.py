"""The GPU code inside a file: machine code (SASS) and PTX, with the exact target of each piece.

What is embedded in a shared object or object file is listed and taken out by cuobjdump. That tool drops
suffixes that it does not know (12.8 shows ``sm_120`` for 120f), so what it takes out is read once more.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moedoctor.diagnose.cuda.cubin import cubin_target
from moedoctor.fixes.arch.targets import Target
from moedoctor.processes.cuda_tools import Tool, run_tool

_LIST_SECONDS = 120.0
_HEADER = re.compile(r"^Fatbin (elf|ptx) code:\n=+\narch = (sm_[1-9]\d{1,2}[af]?)$", re.MULTILINE)
_PTX_TARGET = re.compile(rb"^\s*\.target\s+(sm_[1-9]\d{1,2}[af]?)\b", re.MULTILINE)
_PTX_HEAD_BYTES = 1 << 16


class DeviceCodeError(Exception):
    """A file whose device code cannot be listed; one line says why."""


@dataclass(frozen=True, order=True)
class Image:
    """Pieces of device code of one kind and target."""

    kind: str
    """``sass`` or ``ptx``."""
    target: Target
    count: int = 1


def list_images(path: Path, tool: Tool) -> tuple[Image, ...]:
    """What is embedded in the shared object or object file at `path`, by cuobjdump; empty where nothing is.

    Raises DeviceCodeError where the file is no such file, or the tool fails or takes over two minutes.
    """
    said = _ask(tool, [str(path.resolve())], None)
    if said is None:
        return ()
    found = [("sass" if kind == "elf" else "ptx", name) for kind, name in _HEADER.findall(said)]
    counts: Counter[tuple[str, Target]] = Counter()
    for (kind, name), count in Counter(found).items():
        target = Target.parse(name)
        # Only since 10.0 are there suffixes that cuobjdump may not show.
        if target.suffix or target.major < 10:
            counts[kind, target] += count
        else:
            counts.update((kind, one) for one in _exact(path, kind, target, count, tool))
    return _images(counts)


def cubin_images(blobs: Iterator[bytes]) -> tuple[Image, ...]:
    """The targets of cubins given as bytes; what is no cubin is left out."""
    counts: Counter[tuple[str, Target]] = Counter()
    for blob in blobs:
        target = cubin_target(blob)
        if target is not None:
            counts["sass", target] += 1
    return _images(counts)


def _images(counts: Counter[tuple[str, Target]]) -> tuple[Image, ...]:
    return tuple(sorted(Image(kind, target, count) for (kind, target), count in counts.items()))


def _exact(path: Path, kind: str, target: Target, count: int, tool: Tool) -> Sequence[Target]:
    """The targets of the pieces that cuobjdump calls `target`; `target` itself where they cannot be had."""
    option, ending = ("-xelf", "*.cubin") if kind == "sass" else ("-xptx", "*.ptx")
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        try:
            _ask(tool, [option, f"sm_{target}", str(path.resolve())], folder)
        except DeviceCodeError:
            return [target] * count
        found = [_target_of(file, kind) for file in sorted(Path(folder).glob(ending))]
    exact = [one for one in found if one is not None and one.capability == target.capability]
    # The pattern also takes out those whose suffix was listed.
    plain = [one for one in exact if one.suffix != "a"]
    return plain if len(plain) == count else (exact if len(exact) == count else [target] * count)


def _target_of(file: Path, kind: str) -> Target | None:
    if kind == "sass":
        return cubin_target(file.read_bytes())
    with file.open("rb") as text:
        match = _PTX_TARGET.search(text.read(_PTX_HEAD_BYTES))
    return Target.parse(match[1].decode()) if match else None


def _ask(tool: Tool, arguments: Sequence[str], folder: str | None) -> str | None:
    """cuobjdump's output; None where it says that the file holds no device code."""
    try:
        said = run_tool(tool.path, arguments, folder=folder, seconds=_LIST_SECONDS)
    except OSError as error:
        raise DeviceCodeError(f"{tool.name} does not start: {error.strerror}") from error
    if said.code == 0:
        return said.stdout
    if "does not contain device code" in said.stderr + said.stdout:
        return None
    raise DeviceCodeError(said.first_line or f"{tool} ended with status {said.code}")
