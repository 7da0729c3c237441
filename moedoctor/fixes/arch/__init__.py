"""The CUDA target to compile MoE kernels for: the answer to MD004, for FlashInfer's and torch's settings.

    >>> resolve_arch((12, 0), (13, 0)).target
    '120f'

The choice of the suffix is that of FlashInfer 0.7.1 and later. The instructions behind it were tried
on ptxas 12.0 to 13.5; `moedoctor.diagnose.cuda.instructions` tries them on the compilers of this machine.
"""

from moedoctor.fixes.arch.lists import (
    FLASHINFER_LIST,
    TORCH_LIST,
    ArchListExplanation,
    ListProblem,
    ListReading,
    explain_arch_list,
    resolve_arch_list,
)
from moedoctor.fixes.arch.resolve import ArchDecision, resolve_arch

__all__ = [
    "FLASHINFER_LIST",
    "TORCH_LIST",
    "ArchDecision",
    "ArchListExplanation",
    "ListProblem",
    "ListReading",
    "explain_arch_list",
    "resolve_arch",
    "resolve_arch_list",
]
