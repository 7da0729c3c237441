"""What the CUDA compilers of this machine accept: each deciding instruction, for each target.

Nothing is run on a GPU. ptxas is asked directly; where there is only nvcc, it is given the same PTX.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moedoctor.diagnose.cuda.instructions import INSTRUCTIONS, Instruction, ptx_version
from moedoctor.fixes.arch.targets import Target
from moedoctor.processes.cuda_tools import Outcome, Tool, find_tools, run_tool

TARGETS = ("120", "120a", "120f", "121a", "90a")
"""The targets that MD004 is about."""

_SECONDS = 30.0
_SOURCE = """\
.version {version}
.target sm_{target}
.address_size 64
.visible .entry probe()
{{
.reg .b8 %b<2>; .reg .b16 %h<2>; .reg .b32 %r<8>; .reg .b64 %d<2>; .reg .f32 %f<4>;
{statements}
ret;
}}
"""
_FIRST_LINE = 7
"""Where the statements start."""
_REFUSAL = re.compile(r", line (\d+); error\s*:")
_FATAL = re.compile(r"\bfatal\s*: (.*)")
_UNKNOWN_TARGET = re.compile(r"is not defined for option 'gpu-name'|Unsupported gpu architecture")


@dataclass(frozen=True)
class Attempt:
    """One instruction for one target, and what the compiler made of it."""

    accepted: bool
    line: str
    """The compiler's first line where it refused, else empty."""

    @property
    def knows_target(self) -> bool:
        """Whether the compiler got as far as the instruction."""
        return _UNKNOWN_TARGET.search(self.line) is None


Acceptance = Mapping[str, Mapping[str, Attempt]]
"""Target -> instruction -> attempt."""


def find_compilers(environ: Mapping[str, str] | None = None) -> tuple[Tool, ...]:
    """The ptxas of every CUDA release at hand, the oldest first; where there is none, every nvcc."""
    return find_tools(["ptxas"], environ) or find_tools(["nvcc"], environ)


def compiler_for(cuda: tuple[int, int], compilers: Sequence[Tool]) -> Tool | None:
    """The compiler of this CUDA release, if it is among them."""
    return next((one for one in compilers if one.cuda == cuda), None)


def attempt(compiler: Tool, target: Target, instruction: Instruction | None) -> Attempt:
    """Compile `instruction` for `target`; with None an empty kernel, which shows whether the target is known.

    Asked once a process for each version of a compiler. A compiler that does not answer counts as refusing.
    """
    return _attempt(_compiled(compiler, target, instruction.ptx if instruction else ""))


def attempts(compiler: Tool, target: Target, instructions: Sequence[Instruction]) -> dict[str, Attempt]:
    """`attempt` for each of `instructions`, by name, in one go: the compiler names the line of each refusal.

    One by one where what it says cannot be read that way.
    """
    said = _compiled(compiler, target, "\n".join(one.ptx for one in instructions))
    if said.code == 0 or _UNKNOWN_TARGET.search(said.first_line):
        return {one.name: _attempt(said) for one in instructions}
    refusals: dict[int, str] = {}
    for line in said.stderr.splitlines():
        match = _REFUSAL.search(line)
        if match is not None:
            refusals.setdefault(int(match[1]) - _FIRST_LINE, line.strip())
    # A syntax error, fatal too, would hide what comes after it.
    complete = _FATAL.findall(said.stderr) == ["Ptx assembly aborted due to errors"]
    if complete and refusals and set(refusals) <= set(range(len(instructions))):
        lines = (refusals.get(place, "") for place in range(len(instructions)))
        return {one.name: Attempt(not line, line) for one, line in zip(instructions, lines, strict=True)}
    return {one.name: attempt(compiler, target, one) for one in instructions}


def _attempt(said: Outcome) -> Attempt:
    return Attempt(said.code == 0, "" if said.code == 0 else said.first_line)


@functools.lru_cache(maxsize=4096)
def _compiled(compiler: Tool, target: Target, statements: str) -> Outcome:
    source = _SOURCE.format(version=ptx_version(compiler.cuda), target=target, statements=statements)
    options = [f"-arch=sm_{target}", "probe.ptx", "-o", "probe.cubin"]
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        Path(folder, "probe.ptx").write_text(source, encoding="ascii")
        if compiler.name == "nvcc":
            options = ["-cubin", *options]
        try:
            return run_tool(compiler.path, options, folder=folder, seconds=_SECONDS)
        except OSError as error:
            return Outcome(None, "", f"{compiler.name} does not start: {error.strerror}")


def acceptance(
    compiler: Tool,
    targets: Sequence[str] = TARGETS,
    instructions: Sequence[Instruction] = INSTRUCTIONS,
) -> Acceptance:
    """Every instruction tried for every target."""
    return {target: attempts(compiler, Target.parse(target), instructions) for target in targets}


def summarise(table: Acceptance) -> dict[str, str]:
    """The table in words: target -> the instructions that it takes, or why the target is not known."""
    said = {}
    for target, row in table.items():
        unknown = [one.line for one in row.values() if not one.knows_target]
        taken = " ".join(name for name, one in row.items() if one.accepted)
        said[target] = unknown[0] if unknown else f"takes {taken or 'none'}"
    return said
