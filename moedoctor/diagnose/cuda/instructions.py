"""The PTX instructions that decide which suffix a MoE kernel's target needs, and which targets take them.

What takes what was tried with ptxas 12.0.76, 12.6.85, 12.8.93, 12.9.86, 13.0.88 and 13.5.37;
`moedoctor.diagnose.cuda.toolchain` tries it again on the compilers of a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moedoctor.fixes.arch.targets import Capability, CudaVersion, Target, toolkit_knows

PTX_OF_CUDA: dict[CudaVersion, str] = {
    (12, 0): "8.0",
    (12, 1): "8.1",
    (12, 2): "8.2",
    (12, 3): "8.3",
    (12, 4): "8.4",
    (12, 5): "8.5",
    (12, 8): "8.7",
    (12, 9): "8.8",
    (13, 0): "9.0",
}
"""CUDA release -> the newest PTX version that it reads; each one between reads its predecessor's."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, and the targets that take it."""

    name: str
    ptx: str
    """The statement, over the registers that `moedoctor.diagnose.cuda.toolchain` declares."""
    majors: frozenset[int]
    """Major versions whose targets take it."""
    suffixed: bool
    """Whether only targets with a suffix take it."""
    since: CudaVersion
    """The first CUDA release that knows it."""
    role: str
    """What a MoE kernel does with it."""


_ALL = frozenset({9, 10, 11, 12})
_BLACKWELL = frozenset({10, 11, 12})

INSTRUCTIONS = (
    Instruction(
        "tma_load",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%r0], [%d0, {%r1, %r2}], [%r3];",
        _ALL,
        suffixed=False,
        since=(12, 0),
        role="TMA loads of tiles",
    ),
    Instruction(
        "griddepcontrol", "griddepcontrol.wait;", _ALL, suffixed=False, since=(12, 0), role="dependent launch"
    ),
    Instruction(
        "tensormap_replace",
        "tensormap.replace.tile.global_address.global.b1024.b64 [%d0], %d1;",
        _ALL,
        suffixed=True,
        since=(12, 3),
        role="a TMA descriptor for each group of a grouped GEMM",
    ),
    Instruction(
        "setmaxnreg",
        "setmaxnreg.inc.sync.aligned.u32 240;",
        _ALL,
        suffixed=True,
        since=(12, 0),
        role="registers of specialised warps",
    ),
    Instruction(
        "wgmma",
        "wgmma.fence.sync.aligned;",
        frozenset({9}),
        suffixed=True,
        since=(12, 0),
        role="Hopper's MMA",
    ),
    Instruction(
        "tcgen05",
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 32;",
        frozenset({10, 11}),
        suffixed=True,
        since=(12, 8),
        role="MMA and tensor memory of data-centre Blackwell",
    ),
    Instruction(
        "mma_mxf4nvf4",
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
        " {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%f0, %f1, %f2, %f3},"
        " %r6, {%h0, %h1}, %r7, {%h0, %h1};",
        frozenset({12}),
        suffixed=True,
        since=(12, 8),
        role="block-scaled FP4 MMA",
    ),
    Instruction(
        "cvt_e2m1x2",
        "cvt.rn.satfinite.e2m1x2.f32 %b0, %f0, %f1;",
        _BLACKWELL,
        suffixed=True,
        since=(12, 8),
        role="conversion to FP4",
    ),
)


def needed(capability: Capability) -> tuple[Instruction, ...]:
    """What the grouped GEMMs of MoE layers use on GPUs of this capability; nothing special before 9.0."""
    return tuple(one for one in INSTRUCTIONS if capability[0] in one.majors)


def takes(target: Target, instruction: Instruction, cuda: CudaVersion) -> bool:
    """Whether the compiler of this CUDA release accepts `instruction` for `target`, by what was tried."""
    if not toolkit_knows(target, cuda) or cuda < instruction.since:
        return False
    return target.major in instruction.majors and bool(target.suffix or not instruction.suffixed)


def lacking(target: Target, instructions: Sequence[Instruction], cuda: CudaVersion) -> tuple[str, ...]:
    """The names of those of `instructions` that `target` does not take."""
    return tuple(one.name for one in instructions if not takes(target, one, cuda))


def ptx_version(cuda: CudaVersion) -> str:
    """The PTX version to write for the compiler of this CUDA release."""
    return PTX_OF_CUDA[max(one for one in PTX_OF_CUDA if one <= max(cuda, (12, 0)))]
