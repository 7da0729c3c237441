"""The PTX instructions that decide which suffix a MoE kernel's target needs, and which compilers take them.

`takes` answers from a table that was made with ptxas 12.0.76, 12.6.85, 12.8.93, 12.9.86, 13.0.88 and 13.5.37.
`try_instructions` tries the compilers of this machine: ptxas, or nvcc with the same PTX without ptxas.
Nothing is run on a GPU.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moedoctor.fixes.arch.targets import Capability, CudaVersion, Target, is_known_target
from moedoctor.processes.cuda_tools import Outcome, Tool, find_tools, run_tool
from moedoctor.processes.guardian import make_temporary_folder
from moedoctor.text import load_yaml

_TABLES = load_yaml("moedoctor.diagnose.cuda", "instructions.yaml")
PTX_OF_CUDA: Mapping[CudaVersion, str] = {tuple(cuda): ptx for cuda, ptx in _TABLES["ptx_of_cuda"]}
"""CUDA release -> the newest PTX version that it reads. Releases between two rows read the older version."""
TARGETS = ("120", "120a", "120f", "121a", "90a")
"""The targets that MD004 is about."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, and the targets that take it."""

    name: str
    ptx: str
    """The statement, over the registers that `_SOURCE` declares."""
    majors: frozenset[int]
    """Major versions whose targets take it."""
    suffixed: bool
    """True if only targets with a suffix take it."""
    since: CudaVersion
    """The first CUDA release that knows it."""


INSTRUCTIONS = tuple(
    Instruction(**{**row, "majors": frozenset(row["majors"]), "since": tuple(row["since"])})
    for row in _TABLES["instructions"]
)

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
"""The line of the first statement."""
_REFUSAL = re.compile(r", line (\d+); error\s*:")
_FATAL = re.compile(r"\bfatal\s*: (.*)")
_UNKNOWN_TARGET = re.compile(r"is not defined for option 'gpu-name'|Unsupported gpu architecture")


@dataclass(frozen=True)
class Attempt:
    """The compiler's answer to one instruction for one target."""

    accepted: bool
    line: str
    """The compiler's first line if it refused, else empty."""

    @property
    def knows_target(self) -> bool:
        """True if the compiler got as far as the instruction."""
        return _UNKNOWN_TARGET.search(self.line) is None


Acceptance = Mapping[str, Mapping[str, Attempt]]
"""Target -> instruction -> attempt."""


def list_needed(capability: Capability) -> tuple[Instruction, ...]:
    """Return what the grouped GEMMs of MoE layers use on GPUs of this capability: nothing before 9.0."""
    return tuple(instruction for instruction in INSTRUCTIONS if capability[0] in instruction.majors)


def takes(target: Target, instruction: Instruction, cuda: CudaVersion) -> bool:
    """Return True if the compiler of this CUDA release accepts `instruction` for `target`, by the table."""
    if not is_known_target(target, cuda) or cuda < instruction.since:
        return False
    return target.major in instruction.majors and bool(target.suffix or not instruction.suffixed)


def list_lacking(target: Target, instructions: Sequence[Instruction], cuda: CudaVersion) -> tuple[str, ...]:
    return tuple(instruction.name for instruction in instructions if not takes(target, instruction, cuda))


def find_ptx_version(cuda: CudaVersion) -> str:
    return PTX_OF_CUDA[max(release for release in PTX_OF_CUDA if release <= max(cuda, (12, 0)))]


def find_compilers(environ: Mapping[str, str] | None = None) -> tuple[Tool, ...]:
    """Return the ptxas of every CUDA release on this machine, the oldest first, or every nvcc without any."""
    return find_tools(["ptxas"], environ) or find_tools(["nvcc"], environ)


def try_instruction(compiler: Tool, target: Target, instruction: Instruction | None) -> Attempt:
    """Compile `instruction` for `target`; with None an empty kernel, which shows whether the target is known.

    Each version of a compiler is asked once a process. A compiler that does not answer refuses.
    """
    return _read_attempt(_compile(compiler, target, instruction.ptx if instruction else ""))


def try_instructions(
    compiler: Tool, target: Target, instructions: Sequence[Instruction]
) -> dict[str, Attempt]:
    """Return `try_instruction` for each of `instructions`, by name.

    All are compiled together, since the compiler names the line of each refusal. They are compiled one by one
    if its output cannot be read that way.
    """
    outcome = _compile(compiler, target, "\n".join(instruction.ptx for instruction in instructions))
    names = [instruction.name for instruction in instructions]
    if outcome.code == 0 or _UNKNOWN_TARGET.search(outcome.first_line):
        return dict.fromkeys(names, _read_attempt(outcome))
    refusals: dict[int, str] = {}
    for line in outcome.stderr.splitlines():
        match = _REFUSAL.search(line)
        if match is not None:
            refusals.setdefault(int(match[1]) - _FIRST_LINE, line.strip())
    # A syntax error, which is fatal too, would hide what comes after it.
    complete = _FATAL.findall(outcome.stderr) == ["Ptx assembly aborted due to errors"]
    if complete and refusals and set(refusals) <= set(range(len(names))):
        lines = [refusals.get(place, "") for place in range(len(names))]
        return {name: Attempt(not line, line) for name, line in zip(names, lines, strict=True)}
    return {instruction.name: try_instruction(compiler, target, instruction) for instruction in instructions}


def _read_attempt(outcome: Outcome) -> Attempt:
    return Attempt(outcome.code == 0, "" if outcome.code == 0 else outcome.first_line)


@functools.lru_cache(maxsize=4096)
def _compile(compiler: Tool, target: Target, statements: str) -> Outcome:
    source = _SOURCE.format(version=find_ptx_version(compiler.cuda), target=target, statements=statements)
    options = [f"-arch=sm_{target}", "probe.ptx", "-o", "probe.cubin"]
    with make_temporary_folder() as folder:
        Path(folder, "probe.ptx").write_text(source, encoding="ascii")
        if compiler.name == "nvcc":
            options = ["-cubin", *options]
        try:
            return run_tool(compiler.path, options, folder=folder, seconds=_SECONDS)
        except OSError as error:
            return Outcome(None, "", f"{compiler.name} does not start: {error.strerror}")


def try_targets(compiler: Tool) -> Acceptance:
    return {target: try_instructions(compiler, Target.parse(target), INSTRUCTIONS) for target in TARGETS}


def summarize(table: Acceptance) -> dict[str, str]:
    """Return target -> the instructions that it takes, or why the compiler does not know it."""
    words = {}
    for target, row in table.items():
        unknown = [attempt.line for attempt in row.values() if not attempt.knows_target]
        taken = " ".join(name for name, attempt in row.items() if attempt.accepted)
        words[target] = unknown[0] if unknown else f"takes {taken or 'none'}"
    return words
